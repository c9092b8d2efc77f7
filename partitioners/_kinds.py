"""A large cluster as classes of devices, one type in nodes of one shape, however many nodes there are; and the kinds
of stage that these offer: one device of a class, or a tensor-parallel group of them."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._wires import link_floor, link_seconds
from hetpipe.planning.partition import Problem
from hetpipe.predict.cost import Costs
from hetpipe.spec.cluster import Link, Node

Array = NDArray[np.float64]


class Class(NamedTuple):
    """Devices of one type in nodes of one shape: what else is in the node, and the link inside it."""

    type: str
    shape: frozenset[tuple[str, int]]
    inside: Link | None
    nodes: tuple[Node, ...]
    number: int
    limit: float
    price: float


class Kind(NamedTuple):
    """What a stage can be put on: `degree` devices of class `at` that split its tensors."""

    at: int
    type: str
    degree: int


def ring_floor(links: list[Link], size: Array, R: int) -> Array:
    """Lower bound on the seconds of the sums of pieces of `size` bytes in all by R owners, over the best of these links."""
    if R < 2 or not links:
        return np.zeros_like(size)
    least = np.minimum.reduce([link_floor(link, size / R) for link in links])
    return np.where(size > 0, 2 * (R - 1) * least, 0.0)


class Kinds:
    """The classes of a cluster that can have a stage, K of them, and the kinds of stage that they offer, V of them.

    **A relaxation.** Every pair of classes is given, apart, the least occupied seconds and the least latency
    of all links that could join a device of one to a device of the other; so every pipeline of the cluster is
    a pipeline of the classes, with transfers that take no longer, and bounds for classes hold for the
    cluster."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, Costs(problem.profile, problem.cluster)
        self.L = len(problem.profile.layers)
        grouped: dict[tuple[object, ...], list[Node]] = {}
        for node in problem.cluster.nodes:
            key = frozenset(node.devices.items()), self._inside(node)
            for kind in node.devices:
                grouped.setdefault((kind, *key), []).append(node)
        classes = [self._class(nodes, *key) for key, nodes in grouped.items()]  # type: ignore[arg-type]
        self.classes = [c for c in classes if self._degrees(c)]  # others cannot have a stage
        self.counts = tuple(c.number for c in self.classes)
        self.prices = np.array([c.price for c in self.classes])
        self.kinds = [
            Kind(k, c.type, degree) for k, c in enumerate(self.classes) for degree in self._degrees(c)
        ]
        self.at = np.array([kind.at for kind in self.kinds])
        self.degree = np.array([kind.degree for kind in self.kinds])
        self.largest_node = max(sum(node.devices.values()) for node in problem.cluster.nodes)

    def _class(
        self, nodes: list[Node], kind: str, shape: frozenset[tuple[str, int]], inside: Link | None
    ) -> Class:
        device, reserve = self.problem.cluster.device_types[kind], self.problem.memory_reserve
        count = sum(node.devices[kind] for node in nodes)
        limit = device.memory * (1 - reserve)
        return Class(kind, shape, inside, tuple(nodes), count, limit, device.price_per_hour)

    def _inside(self, node: Node) -> Link | None:
        cluster = self.problem.cluster
        return cluster.link_between(node.name, node.name) if sum(node.devices.values()) > 1 else None

    def _degrees(self, found: Class) -> list[int]:
        """Measured tensor-parallel degrees that fit in a node of the class."""
        most = found.nodes[0].devices[found.type]
        return sorted(
            m.tensor_parallel
            for m in self.problem.profile.measurements
            if m.device_type == found.type and m.tensor_parallel <= most
        )

    @property
    def most(self) -> int:
        """Replicas that there can be: each has a device and a sample."""
        return min(sum(self.counts), self.problem.global_batch)

    @property
    def K(self) -> int:  # noqa: N802
        """Number of classes."""
        return len(self.classes)

    @property
    def V(self) -> int:  # noqa: N802
        """Number of kinds."""
        return len(self.kinds)

    def sizes_of(self, kind: Kind) -> tuple[int, ...]:
        """Measured micro-batch sizes."""
        return self.problem.profile.measurement(kind.type, kind.degree).microbatch_sizes

    @cached_property
    def ids(self) -> dict[tuple[str, str], list[str]]:
        """Device ids of a type on a node, by (node, type)."""
        found: dict[tuple[str, str], list[str]] = {}
        for device in self.problem.cluster.devices:
            found.setdefault((device.node, device.type), []).append(device.id)
        return found

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

    @kept
    def joins(self, i: int, j: int) -> list[Link]:
        """Links that could join a device of class i to another of class j."""
        a, b = self.classes[i], self.classes[j]
        found = []
        if a.inside is not None and a[1:3] == b[1:3] and (i != j or a.nodes[0].devices[a.type] > 1):
            found.append(a.inside)
        if len({node.name for node in (*a.nodes, *b.nodes)}) > 1:
            found += self.between
        return found

    @kept
    def transfer(self, size: int) -> tuple[Array, Array]:
        """Least seconds that a transfer of each boundary's output for `size` samples occupies its link
        [K, K, L + 1], and least latency [K, K]; infinite where no two devices can be joined. Between
        tensor-parallel groups it goes over up to as many links as the smaller degree."""
        occupied, latency = np.full((self.K, self.K, self.L + 1), np.inf), np.full((self.K, self.K), np.inf)
        most = [max(kind.degree for kind in self.kinds if kind.at == k) for k in range(self.K)]
        bytes_of = np.concatenate([[0.0], self.problem.profile.output_bytes * size])
        parts = bytes_of / np.arange(1, max(most) + 1)[:, None]
        seconds: dict[int, Array] = {}  # by link: with up to so many parts
        for i, j in product(range(self.K), repeat=2):
            for link in self.joins(i, j):
                if id(link) not in seconds:
                    own = np.maximum(link_seconds(link, parts) - link.seconds(0), 0.0)
                    seconds[id(link)] = np.minimum.accumulate(own, axis=0)
                latency[i, j] = min(latency[i, j], link.seconds(0))
                occupied[i, j] = np.minimum(occupied[i, j], seconds[id(link)][min(most[i], most[j]) - 1])
        return occupied, latency

    def smaller_transfer(self, b: int) -> float:
        """The least of (seconds per sample of a transfer of q < b samples) / (seconds of one of b)."""
        links = {link for i, j in product(range(self.K), repeat=2) for link in self.joins(i, j)}
        if all(link.points is None for link in links):
            return 1 / b
        full = self.transfer(b)[0]
        parts = [self.transfer(q)[0] / q for q in range(1, b)]
        ok = np.isfinite(full) & (full > 0)
        return min([1 / b, *(float((part[ok] / full[ok]).min()) for part in parts if ok.any())])

    @cached_property
    def summed(self) -> Array:
        """Parameter bytes of each layer that are summed with their segment, [L]; tied ones are summed apart. The
        least over degrees of what all shards of the layer hold together."""
        profile, layers = self.problem.profile, self.problem.profile.layers
        tied = np.array([x.tied_parameter_bytes if x.tied else 0 for x in layers], dtype=np.float64)
        shards = [kind.degree * profile.parameter_bytes(kind.degree, kind.type) for kind in self.kinds]
        found: Array = np.maximum(np.min(shards, axis=0) - tied, 0.0)
        return found

    @cached_property
    def summed_before(self) -> Array:
        """Those of all layers before, [L + 1]."""
        found: Array = np.concatenate([[0.0], np.cumsum(self.summed)])
        return found

    @kept
    def sum_floor(self, R: int) -> Array:
        """Lower bound [V, lo, hi] on the seconds of the gradient sums of a stage beside R − 1 or more other
        replicas: its segments have R owners each and run one after the other; over a link of latency a and rate
        w they take 2(R − 1)(j·a + size / (R·w)) for j ≥ 1 segments. It grows with R. A device of a group of t
        holds a t-th. More owners than any node has devices are on two nodes at least, and so the slowest link of
        their ring is no faster than the best between nodes; else than the best that joins the class to any."""
        size = np.triu(self.summed_before[None, :] - self.summed_before[:, None])
        floors = np.zeros((self.V, *size.shape))
        for v, kind in enumerate(self.kinds):
            links = self.between if self.largest_node < R else []
            links = links or [link for j in range(self.K) for link in self.joins(kind.at, j)]
            floors[v] = ring_floor(links, size / kind.degree, R)
        return floors

    @kept
    def sums(self, R: int, cuts: tuple[int, ...], common: tuple[int, ...]) -> Array:
        """Seconds [lo, hi] from the end of a stage's backward to that of its gradient sums, beside R − 1 other replicas
        that are all cut at layers of `cuts` only, and at all of `common`; over the slowest link between nodes.

        Between two common cuts every other one is inside a stage of some replica, whose device sums the layers above
        before those below: all sums there are one chain, the last layers first. So if the whole chain ends at the end of
        the step, those of a stage begin as long before as all sums of layers below it in its chain take, and its own:
        replicas that keep to that never wait for each other. Groups that split tensors are taken to sum as single
        devices do, for which they have to wait."""
        links = self.between or [link for link in [c.inside for c in self.classes] if link is not None]
        ends = np.zeros(self.L + 1)
        for lo, hi in pairwise(cuts):
            size = (self.summed_before[hi] - self.summed_before[lo]) / R
            ends[hi:] += 2 * (R - 1) * max((x.seconds(size) for x in links), default=0.0) if size > 0 else 0.0
        chain = np.array([0, *common])  # where each begins
        start = ends[chain[np.searchsorted(chain, np.arange(self.L + 1), side="right") - 1]]
        found: Array = np.triu(ends[None, :] - start[:, None], 1)
        return found
