"""Which process of a system is which device of the plan: nodes and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.grid.shape import Shape

LISTED_DEVICES = 8  # devices listed one by one
Place = tuple[int, int, int]  # replica, stage, and number in a tensor-parallel group


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


def by_stage(shape: Shape) -> list[Place]:
    """Ranks count through the devices of a stage, then its replicas, then the stages."""
    return [(r, s, t) for s in range(shape.pp) for r in range(shape.dp) for t in range(shape.degrees[s])]


def by_replica(shape: Shape) -> list[Place]:
    """Ranks count through the devices of a stage, then the stages of a replica, then the replicas."""
    return [(r, s, t) for r in range(shape.dp) for s in range(shape.pp) for t in range(shape.degrees[s])]


def devices_by_rank(plan: Plan, wish: Sequence[Place], *, sort: bool) -> tuple[list[str], list[str]]:
    """Devices in the order of their ranks when the system gives rank g the place `wish[g]`, and what then differs from the
    plan. Ranks count through nodes, so a node's devices stay together; `sort`: and ascend."""
    where = {
        (r, s, t): device
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        for t, device in enumerate(stage.devices)
    }
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
