"""A large cluster as classes of devices: one type in nodes of one shape, however many nodes there are."""

from __future__ import annotations

from functools import cache, cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hetpipe.cluster import Link, Node
from hetpipe.partition import Problem
from hetpipe.partitioners._space import Array, Kind, Space, link_floor, span


class Classes(Space):
    """A `Space` whose kinds are classes: (type, what else is in the node, the link inside it).

    **A relaxation.** Every pair of classes is given, apart, the least occupied seconds and the least latency
    of all links that could join a device of one to a device of the other; so every pipeline of the cluster is
    a pipeline of the classes, with transfers that take no longer, and bounds for classes hold for the
    cluster."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.one_node = False  # a relaxation too: stages on different nodes are never better
        grouped: dict[tuple[object, ...], list[Node]] = {}
        for node in problem.cluster.nodes:
            inside = self._inside(node)
            for kind in node.devices:
                grouped.setdefault((kind, frozenset(node.devices.items()), inside), []).append(node)
        ids: dict[tuple[str, str], list[str]] = {}
        for device in problem.cluster.devices:
            ids.setdefault((device.node, device.type), []).append(device.id)
        self.shapes = list(grouped)
        self.nodes = list(grouped.values())
        self.kinds = [
            Kind(f"class {i}", str(shape[0]), tuple(d for n in nodes for d in ids[n.name, str(shape[0])]))
            for i, (shape, nodes) in enumerate(zip(self.shapes, self.nodes, strict=True))
        ]
        self.ids = ids
        self.counts = tuple(len(kind.devices) for kind in self.kinds)
        types = problem.cluster.device_types
        self.limits = [types[kind.type].memory * (1 - problem.memory_reserve) for kind in self.kinds]
        self.prices = [types[kind.type].price_per_hour for kind in self.kinds]
        self.largest_node = max(sum(node.devices.values()) for node in problem.cluster.nodes)

    def _inside(self, node: Node) -> Link | None:
        cluster = self.problem.cluster
        return cluster.link_between(node.name, node.name) if sum(node.devices.values()) > 1 else None

    @cached_property
    def between(self) -> list[Link]:
        """All links between nodes."""
        cluster = self.problem.cluster
        if len(cluster.nodes) < 2:
            return []
        own = [Link(**link.model_dump(exclude={"between"})) for link in cluster.links
               if len(set(link.between)) > 1]  # fmt: skip
        found = ([cluster.link] if cluster.link is not None else []) + own
        if not found:
            cluster.link_between(cluster.nodes[0].name, cluster.nodes[1].name)  # says what is missing
        return list(dict.fromkeys(found))

    def joins(self, i: int, j: int) -> list[Link]:
        """Links that could join a device of class i to another of class j."""
        found = []
        inside = self.shapes[i][2]
        own_node = self.nodes[i][0].devices[self.kinds[i].type] > 1 if i == j else True
        if isinstance(inside, Link) and self.shapes[i][1:] == self.shapes[j][1:] and own_node:
            found.append(inside)
        if len({node.name for node in (*self.nodes[i], *self.nodes[j])}) > 1:
            found += self.between
        return found

    @cached_property
    def link_ids(self) -> NDArray[np.int64]:
        """[K, K]: 0 where two devices of these classes can be joined, else −1."""
        ids = np.full((self.K, self.K), -1)
        for i, j in product(range(self.K), repeat=2):
            if self.joins(i, j):
                ids[i, j] = 0
        return ids

    def transfer(self, size: int) -> tuple[Array, Array]:
        """Least seconds that a boundary's transfer occupies its link, and least latency, [K, K, L + 1]."""
        if size not in self._links:
            occupied, latency = np.zeros((2, self.K, self.K, self.L + 1))
            bytes_of = self.problem.profile.output_bytes * size
            for i, j in zip(*np.nonzero(self.link_ids >= 0), strict=True):
                links = self.joins(int(i), int(j))
                latency[i, j, 1 : self.L] = min(link.seconds(0) for link in links)
                occupied[i, j, 1 : self.L] = [
                    min(max(0.0, link.seconds(float(x)) - link.seconds(0)) for link in links)
                    for x in bytes_of[:-1]
                ]
            self._links[size] = occupied, latency
        return self._links[size]

    @cache  # noqa: B019
    def sum_floor(self, k: int, R: int) -> Array:
        """Lower bound [lo, hi] on the seconds of the gradient sums of a stage in class k beside R − 1 or more
        other replicas, as in `Space.sum_floor`. It grows with R. More owners than any node has devices are on
        two nodes at least, and so the slowest link of their ring is no faster than the best between nodes."""
        size = span(self.untied)
        if R < 2:
            return np.zeros_like(size)
        links = self.between if self.largest_node < R else []
        if not links:
            links = [link for j in range(self.K) for link in self.joins(k, j)]
        if not links:
            return np.zeros_like(size)
        floors = [link_floor(link, size / R) for link in links]
        return np.where(size > 0, 2 * (R - 1) * np.minimum.reduce(floors), 0.0)
