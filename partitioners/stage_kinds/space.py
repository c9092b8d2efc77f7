"""The seats of a problem by type and node: interchangeable devices, and what stages on them take. Times, bytes and optimizers are
those of `types`; links are those of the nodes."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Link
from hetpipe.partitioners.stage_kinds.limit import Meter
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.memory import span
from hetpipe.partitioners.stage_kinds.plan_class import Load, allowed_families, require_stage_kinds
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.stage_kinds.wires import link_floor
from hetpipe.planning.partition import Problem

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Counts = tuple[int, ...]


class NodeKind(NamedTuple):
    """Interchangeable devices, one type on one node, of which a stage takes `degree`; it is kind `at` of `types`."""

    node: str
    type: str
    devices: tuple[str, ...]
    degree: int
    at: int


class Loaded(NamedTuple):
    """What stages and transfers of one load take, `m` micro-batches of `b` samples, the last of them with as many or fewer, for
    compiled loops. By kind of `types`: `times` [V, 2, 3, L + 1] are the seconds of all layers before each, of a micro-batch of b
    and of the last: forward, backward, and forward once more under recompute; `copied` [V, 2, L + 1] those of copies, one way, of
    which a part of the shorter is `hidden` [V], both 0 where a kind does not offload; the bytes of layers (`memory_tables`), the
    limit and the optimizer [V, lo, hi]. By kind of a node: `at`, its kind of `types` [K]; `occupied` [2, K, K, L + 1] and the
    longer `latency` of each boundary's transfer, infinite where there is no link. Whether a gradient `returns` over each boundary
    [L + 1]; how many seconds `more` each action takes; whether stages may recompute, transfers block, and sums begin `early`."""

    b: int
    m: int
    samples: int
    times: Array
    copied: Array
    hidden: Array
    tables: Array
    limits: Array
    optimizer: Array
    at: Index
    occupied: Array
    latency: Array
    returns: NDArray[np.bool_]
    more: float
    recompute: bool
    blocking: bool
    early: bool


class Space:
    """A problem as matrices: K kinds of a node. Devices of a kind are counted, never enumerated."""

    def __init__(self, problem: Problem) -> None:
        require_stage_kinds(problem)
        self.problem, self.types = problem, Types(problem)
        self.costs, self.L = self.types.costs, self.types.L
        self.families, self.one_node = allowed_families(problem), problem.backend != "torch"
        self.hosts = {node.name: node.host_memory for node in problem.cluster.nodes if node.host_memory is not None}
        grouped: dict[tuple[str, str], list[str]] = {}
        for device in problem.cluster.devices:
            grouped.setdefault((device.node, device.type), []).append(device.id)
        self.devices: Counts = tuple(len(ids) for ids in grouped.values())
        found = [
            (group, NodeKind(node, name, tuple(ids), kind.degree, v))
            for group, ((node, name), ids) in enumerate(grouped.items())
            for v, kind in enumerate(self.types.kinds)
            if kind.type == name
            and kind.degree <= (1 if self.one_node else len(ids))
            and (not kind.offload or node in self.hosts)
        ]
        self.kinds = [kind for _, kind in found]
        self.groups = [group for group, _ in found]  # of each kind, which devices it takes: an index into `devices`
        self.K = len(self.kinds)
        self.counts: Counts = tuple(len(kind.devices) // kind.degree for kind in self.kinds)
        self.at = np.array([kind.at for kind in self.kinds], dtype=np.int64)
        self.meter = Meter()

    def used(self, counts: Counts) -> Counts:
        """Devices that so many stages of each kind take, by group of interchangeable devices."""
        found = [0] * len(self.devices)
        for count, group, kind in zip(counts, self.groups, self.kinds, strict=True):
            found[group] += count * kind.degree
        return tuple(found)

    def room(self, counts: Counts) -> bool:
        """Whether the cluster has the devices for so many stages of each kind."""
        return all(used <= there for used, there in zip(self.used(counts), self.devices, strict=True))

    def seat(self, k: int) -> tuple[int, int | None]:
        """The degree of kind k, and where it offloads the bytes that the host lends."""
        kind = self.kinds[k]
        return kind.degree, self.hosts[kind.node] if self.types.kinds[kind.at].offload else None

    def sizes_of(self, k: int) -> tuple[int, ...]:
        """Micro-batch sizes at which kind k was measured."""
        return self.types.sizes_of(self.types.kinds[self.kinds[k].at])

    def price(self, counts: Counts) -> float:
        """Price per hour of so many devices."""
        prices = (self.types.prices[self.types.kinds[kind.at].at] * kind.degree for kind in self.kinds)
        return sum(count * price for count, price in zip(counts, prices, strict=True))

    def loaded(self, load: Load) -> Loaded:
        """What stages and transfers of this load take."""
        overhead = self.problem.cluster.runtime_overhead
        return Loaded(
            load.b,
            load.m,
            load.samples,
            self._times(load.b, load.last),
            np.array([np.outer((load.b, load.last), self.types.copied(v)) for v in range(self.types.V)]),
            np.array([self.types.hidden(v) for v in range(self.types.V)]),
            *self._fixed,
            self.at,
            *self._sent(load.b, load.last),
            self.returns,
            overhead.action_seconds,
            self.problem.allow_recompute,
            not overhead.overlap_transfers,
            self.problem.sums_early,
        )

    @cached_property
    def _fixed(self) -> tuple[Array, Array, Array]:
        types = self.types
        limits = np.array([types.limit[kind.at] for kind in types.kinds])
        return np.stack([types.memory(v) for v in range(types.V)]), limits, types.optimizer

    @memoized
    def _times(self, size: int, last: int) -> Array:
        """The `times` of a micro-batch of each of these sizes."""
        types = self.types
        both = np.array([[types.computing(v, x) for x in (size, last)] for v in range(types.V)])
        return np.concatenate([both, self.costs.again(both[:, :, :1])], axis=2)

    @memoized
    def _sent(self, size: int, last: int) -> tuple[Array, Array]:
        """`occupied` and `latency` of transfers of each of these sizes."""
        (full, latency), (rest, other) = self.transfer(size), self.transfer(last)
        return np.stack([full, rest]), np.maximum(latency, other)

    @cached_property
    def returns(self) -> NDArray[np.bool_]:
        """Whether a gradient comes back over the boundary before each layer, so that a stage that ends there has a backward
        [L + 1]."""
        return np.array([self.costs.has_backward(hi) for hi in range(self.L + 1)])

    @cached_property
    def _joined(self) -> tuple[Index, list[Link]]:
        ids, links = np.full((self.K, self.K), -1), list[Link]()
        for i, a in enumerate(self.kinds):
            for j, b in enumerate(self.kinds):
                if self.groups[i] != self.groups[j] or len(a.devices) >= a.degree + b.degree:
                    link = self.problem.cluster.link_between(a.node, b.node)
                    if link not in links:
                        links.append(link)
                    ids[i, j] = links.index(link)
        return ids, links

    @property
    def link_ids(self) -> Index:
        """[K, K] index into `links`; −1 where no two stages of these kinds can be."""
        return self._joined[0]

    @property
    def links(self) -> list[Link]:
        """The different links of the cluster."""
        return self._joined[1]

    @memoized
    def transfer(self, size: int) -> tuple[Array, Array]:
        """Seconds that a boundary's transfer occupies its link, and its latency, [K, K, L + 1] both; infinite where there is no
        link."""
        occupied, latency = np.full((2, self.K, self.K, self.L + 1), np.inf)
        known: dict[object, Array] = {}
        for i, j in zip(*np.nonzero(self.link_ids >= 0), strict=True):
            a, b = self.kinds[i], self.kinds[j]
            key = self.link_ids[i, j], tuple((x.degree, x.node if x.degree > 1 else "") for x in (a, b))
            if key not in known:
                ends, degrees = (a.devices[0], b.devices[-1]), (a.degree, b.degree)
                sent = [self.costs.transfer(*ends, hi, size, degrees) for hi in range(1, self.L)]
                known[key] = np.array(sent, dtype=np.float64).reshape(-1, 2).T
            occupied[i, j, 1 : self.L], latency[i, j, 1 : self.L] = known[key]
        return occupied, latency

    @cached_property
    def shards(self) -> Array:
        """Gradient bytes of each layer in all shards of a stage of kind k, [K, L]; shards repeat what is not split."""
        profile = self.problem.profile
        return np.stack([kind.degree * profile.trained_bytes(kind.degree, kind.type) for kind in self.kinds])

    @memoized
    def sum_floors(self, R: int) -> Array:
        """Lower bounds [K, lo, hi] on the seconds that the gradient sums of a stage take beside R − 1 other replicas.

        Its segments have R owners each and run one after the other; over a link of latency a and rate w they
        take 2(R − 1)(j·a + size / (R·w)) for j ≥ 1 segments. A measured link costs at least (its least
        seconds per byte) × bytes. The group's slowest link is no faster than the best link that joins this
        kind to any device. Of a group of t devices, each holds a t-th of at least its own shards."""
        found = np.zeros((self.K, self.L + 1, self.L + 1))
        for k, kind in enumerate(self.kinds):
            size = np.maximum(span(self.shards[k] - self.problem.profile.tied_trained_bytes), 0.0) / kind.degree
            floors = [link_floor(self.links[i], size / R) for i in {int(i) for i in self.link_ids[k] if i >= 0}]
            if R > 1 and floors:
                found[k] = np.where(size > 0, 2 * (R - 1) * np.minimum.reduce(floors), 0.0)
        return found
