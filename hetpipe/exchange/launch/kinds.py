"""The kinds of nodes of a cluster: those of one kind have the same devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster, Node
from hetpipe.exchange.launch.asked import DEVICE_NAME, Asked
from hetpipe.files.messages import InputError, counted, shown

MOST_KIND_NAME = 16  # characters, before what tells two kinds of the same name apart


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Nodes that are alike: `ranks` are their places in the cluster file, which are the node ranks of torchrun."""

    name: str
    nodes: tuple[Node, ...]
    ranks: tuple[int, ...]

    @property
    def devices(self) -> Mapping[str, int]:
        """How many devices of which type each node has."""
        return self.nodes[0].devices

    @property
    def size(self) -> int:
        """How many devices each node has."""
        return sum(self.devices.values())

    def requested(self, asked: Asked) -> dict[str, int]:
        """Return how many devices each node needs, by what the other system calls them. Those of the processor are not asked
        for."""
        found = Counter[str]()
        for device_type, count in self.devices.items():
            name = asked.types.get(device_type, "" if device_type.lower().startswith("cpu") else device_type)
            if name and not DEVICE_NAME.fullmatch(name):
                raise InputError(
                    f"a launcher cannot ask for devices of type {shown(name)}: names have letters, digits and _ . / = - only. "
                    f"Say what the other system calls them, such as --type {shown(f'{device_type}=a100')}"
                )
            if name:
                found[name] += count
        return dict(found)


def kinds_of(cluster: Cluster) -> list[Kind]:
    """The kinds in the order of their first nodes, so that the first node of the cluster file is the first of the first kind."""
    alike: dict[frozenset[tuple[str, int]], list[int]] = {}
    for rank, node in enumerate(cluster.nodes):
        alike.setdefault(frozenset(node.devices.items()), []).append(rank)
    found: list[Kind] = []
    for ranks in alike.values():
        nodes = tuple(cluster.nodes[rank] for rank in ranks)
        name = _name(nodes[0], {kind.name for kind in found})
        found.append(Kind(name=name, nodes=nodes, ranks=tuple(ranks)))
    return found


def _name(node: Node, taken: set[str]) -> str:
    """`a100-2-t4-1`, as a part of a host name."""
    words = "-".join(f"{device_type}-{count}" for device_type, count in node.devices.items())
    plain = "-".join(re.findall(r"[a-z0-9]+", words.lower()))[:MOST_KIND_NAME].strip("-")
    return next(name for i in range(len(taken) + 1) if (name := f"{plain}-{'x' * i}" if i else plain) not in taken)


def summary(cluster: Cluster, kinds: list[Kind]) -> str:
    """`3 nodes of 2 kinds, 5 devices`."""
    nodes = f"{counted(len(cluster.nodes), 'node')} of {counted(len(kinds), 'kind')}"
    return f"{nodes}, {counted(cluster.device_count, 'device')}"


def refuse_hosts(kinds: list[Kind], system: str) -> None:
    """InputError if a node of the cluster file is bound to a machine, where the other system chooses machines and their names."""
    bound = next((node for kind in kinds for node in kind.nodes if node.host is not None), None)
    if bound is not None:
        raise InputError(
            f"node {shown(bound.name)} is bound to the machine {shown(bound.host)} by its 'host', but {system} gives machines "
            "names of its own, so no node would be found. Leave 'host' out of the cluster file"
        )
