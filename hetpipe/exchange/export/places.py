"""Which process of a system is which device of the plan: nodes and their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.export.shape import Shape

LISTED_DEVICES = 8  # devices listed one by one


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One node: its name, its address, and the indices of its devices in the order of their local ranks."""

    node: str
    host: str
    indices: tuple[int, ...]


def launches(ids: Sequence[str], cluster: Cluster | None) -> list[Launch]:
    """Devices by node, nodes in the order of their first device; ranks count through the nodes."""
    by_node: dict[str, list[int]] = {}
    for device in ids:
        node, index = device.rsplit("/", 1)
        by_node.setdefault(node, []).append(int(index))
    hosts = {} if cluster is None else {node.name: node.host or node.name for node in cluster.nodes}
    return [Launch(node=node, host=hosts.get(node, node), indices=tuple(found)) for node, found in by_node.items()]


def devices_by_rank(
    plan: Plan, shape: Shape, role: Callable[[int], tuple[int, int]], *, sort: bool
) -> tuple[list[str], list[str]]:
    """Devices in the order of their ranks when the system gives rank g the (replica, stage) `role(g)`, and what then
    differs from the plan. Ranks count through nodes, so a node's devices stay together; `sort`: and ascend."""
    where = {
        (r, s, t): device
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        for t, device in enumerate(stage.devices)
    }
    wish = [(*role(g), g % shape.tp) for g in range(shape.tp * shape.pp * shape.dp)]
    ids = [where[w] for w in wish if w in where]
    spare = [d for d in plan.device_ids if d not in ids]
    ids += spare[: len(wish) - len(ids)]
    order = [f"{launch.node}/{i}" for launch in launches(ids, None) for i in (sorted(launch.indices) if sort else launch.indices)]
    role_of = {device: w for w, device in where.items()}
    wrong = [
        f"the place of {device}: stage {role_of[device][1]} of replica {role_of[device][0]} in the plan, here stage {w[1]} "
        f"of replica {w[0]}"
        for device, w in zip(order, wish, strict=True)
        if role_of[device][:2] != w[:2]
    ]
    return order, wrong


def few(wrong: list[str]) -> list[str]:
    """Not more than `LISTED_DEVICES` of them, and how many there are besides."""
    return (
        wrong
        if len(wrong) <= LISTED_DEVICES
        else [*wrong[:LISTED_DEVICES], f"the places of {len(wrong) - LISTED_DEVICES} more devices"]
    )
