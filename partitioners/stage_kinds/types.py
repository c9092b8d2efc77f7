"""A cluster as numbers of devices of each type, and the kinds of stage that they offer: one device, or a tensor-parallel
group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Link, Node
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.memory import memory_tables, span
from hetpipe.partitioners.stage_kinds.wires import link_floor, link_seconds
from hetpipe.planning.partition import Problem
from hetpipe.predict.cost import Costs, peak_of

Array = NDArray[np.float64]


class TypeKind(NamedTuple):
    """What a stage can be put on: `degree` devices of type number `at` that split its tensors, and whether it offloads what it
    saves to their host. A stage of any other kind keeps it, or recomputes."""

    at: int
    type: str
    degree: int
    offload: bool = False


def _peak(tables: Array, samples: int) -> Array:
    """The bytes of stages that have so many samples in flight, in one micro-batch, and do not recompute [lo, hi]."""
    static, boundary, held, transient, _, _ = tables
    with np.errstate(invalid="ignore"):
        return peak_of(static, boundary, held, transient, samples, samples, samples)


class Types:
    """The kinds of stage of one problem: K types, V kinds, L layers.

    **A relaxation.** Every pair of types is given, apart, the least occupied seconds and the least latency of all links that
    could join them (`transfer`), and gradients are summed over the best links there are (`sums`): what is shown impossible with
    these is impossible on the cluster."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.cluster = problem, problem.cluster
        self.costs, self.L = Costs(problem.profile, problem.cluster), len(problem.profile.layers)
        nodes, kinds = self.cluster.nodes, self.cluster.device_types
        self.types = list(dict.fromkeys(device.type for device in self.cluster.devices))
        self.limit = [kinds[name].memory * (1 - problem.memory_reserve) for name in self.types]
        self.prices = [kinds[name].price_per_hour for name in self.types]
        self.node_size = [max(node.devices.get(name, 0) for node in nodes) for name in self.types]
        self.kinds = [
            TypeKind(i, name, x.tensor_parallel)
            for i, name in enumerate(self.types)
            for x in problem.profile.measurements
            if x.device_type == name and x.tensor_parallel <= self.node_size[i]
        ]
        self.K = len(self.types)
        self.kinds += [away for kind in self.kinds if self._is_of_use(away := kind._replace(offload=True))]
        self.V = len(self.kinds)
        self.at = np.array([kind.at for kind in self.kinds])
        self.most = min(len(self.cluster.devices), problem.global_batch)
        self.optimizer = np.stack([span(np.array(self._measured(v).optimizer_seconds)) for v in range(self.V)])

    @cached_property
    def limits(self) -> tuple[Array, Array]:
        """What stages of each kind take [N, V] of what there is [N]: of each type, in pieces of each degree, the groups that
        fit into its nodes; and money, if there is a limit."""
        takes, there = list[list[float]](), list[float]()
        for kind in self.kinds:
            same = [x.at == kind.at and x.degree >= kind.degree and x.offload >= kind.offload for x in self.kinds]
            takes.append([x.degree // kind.degree if there else 0 for x, there in zip(self.kinds, same, strict=True)])
            there.append(float(self.groups(kind, self.cluster.nodes)))
        if self.problem.max_price_per_hour is not None:
            takes.append([self.prices[kind.at] * kind.degree for kind in self.kinds])
            there.append(self.problem.max_price_per_hour * (1 + 1e-12))
        return np.array(takes, dtype=np.float64), np.array(there)

    @property
    def ways(self) -> float:
        """Kinds of stage for each that does not offload: 1 where none does, 2 where all can."""
        return self.V / sum(not kind.offload for kind in self.kinds)

    def offloads(self, take: Sequence[int]) -> bool:
        """Whether some of so many stages of each kind offload."""
        return any(count and kind.offload for count, kind in zip(take, self.kinds, strict=True))

    def groups(self, kind: TypeKind, nodes: Iterable[Node]) -> int:
        """The groups of a kind that fit into these nodes: to offload, a host has to lend memory."""
        some = (node for node in nodes if node.host_memory is not None or not kind.offload)
        return sum(node.devices.get(kind.type, 0) // kind.degree for node in some)

    def _is_of_use(self, away: TypeKind) -> bool:
        """Whether some stage fits if it offloads, and may not fit as it is."""
        if not self.problem.allow_offload or self.costs.copies(away.type, away.degree) is None:
            return False
        if not self.groups(away, self.cluster.nodes):
            return False
        return bool((_peak(self._useful(away), 1) <= self.limit[away.at]).any())

    def _useful(self, away: TypeKind) -> Array:
        """The bytes of stages that offload, as `tables`; infinite for those that fit as they are, whatever is in flight, so that
        they never offload: it makes no action shorter."""
        plain, found, batch = self.tables(away._replace(offload=False)), self.tables(away).copy(), self.problem.global_batch
        found[2, _peak(plain, batch) <= self.limit[away.at]] = np.inf
        return found

    def sizes_of(self, kind: TypeKind) -> tuple[int, ...]:
        """Micro-batch sizes that were measured."""
        return self.problem.profile.measurement(kind.type, kind.degree).microbatch_sizes

    def _measured(self, v: int) -> Measurement:
        return self.problem.profile.measurement(self.kinds[v].type, self.kinds[v].degree)

    @memoized
    def times(self, v: int, size: int) -> Array:
        """Forward and backward of all layers before each [2, L + 1], of a micro-batch; of a stage that offloads at most, as if
        copies were hidden layer by layer."""
        found, (copying, hidden) = self.computing(v, size), self._copies(v)
        if not self.kinds[v].offload:
            return found
        each, copied = np.diff(found), np.diff(copying) * size
        return np.pad(np.cumsum(each + copied - hidden * np.minimum(each, copied), axis=1), ((0, 0), (1, 0)))

    def computing(self, v: int, size: int) -> Array:
        """Forward and backward of all layers before each [2, L + 1], of a micro-batch, without copies."""
        kind = self.kinds[v]
        return np.stack(self.costs.time_prefix(kind.type, size, kind.degree))

    @memoized
    def layer_times(self, v: int, size: int, largest: int) -> Array:
        """The least forward and backward of each layer [2, L] of a micro-batch of `size` to `largest` samples. (Between measured
        sizes times are linear; below the first size this follows the line where the profile's times end at zero.)"""
        measurement = self._measured(v)
        sizes = [size, largest, *(x for x in measurement.microbatch_sizes if size < x < largest)]
        first = measurement.microbatch_sizes[0]

        def at(x: int) -> Array:
            if x >= first:
                return np.array(measurement.times(x))
            here, after = np.array(measurement.times(first)), np.array(measurement.times(first + 1))
            return here - (first - x) * (after - here)

        copying, hidden = self._copies(v)
        found: Array = np.minimum.reduce([at(x) + (1 - hidden) * x * np.diff(copying) for x in dict.fromkeys(sizes)])
        return found

    def copied(self, v: int) -> Array:
        """Seconds that copies of a sample take, one way, for all layers before each [L + 1]: none of kinds that do not
        offload."""
        return self._copies(v)[0]

    def hidden(self, v: int) -> float:
        """The part of the shorter of copying and computing that is hidden."""
        return self._copies(v)[1]

    def _copies(self, v: int) -> tuple[Array, float]:
        kind = self.kinds[v]
        found = self.costs.copies(kind.type, kind.degree) if kind.offload else None
        return (np.zeros(self.L + 1), 0.0) if found is None else found

    @memoized
    def memory(self, v: int) -> Array:
        """The bytes that layers need on kind v, as `memory_tables` has them; infinite for stages that need not offload."""
        kind = self.kinds[v]
        return self._useful(kind) if kind.offload else self.tables(kind)

    @memoized
    def tables(self, kind: TypeKind) -> Array:
        """The bytes that layers need on a kind, as `memory_tables` has them; whole and as built, the same on all types."""
        alike = (
            other for other in self.kinds if other.offload == kind.offload and self._as_built(other) and self._as_built(kind)
        )
        same = next(alike, kind)
        if same != kind:
            return self.tables(same)
        return memory_tables(self.costs, self.L, kind.type, kind.degree, kind.offload)

    def _as_built(self, kind: TypeKind) -> bool:
        own = self.problem.profile.measurement(kind.type, kind.degree)
        return own.tensor_parallel == 1 and own.saved_bytes_per_sample is None and own.cast_bytes is None

    @cached_property
    def _names(self) -> list[set[str]]:
        return [{node.name for node in self.cluster.nodes if node.devices.get(name, 0)} for name in self.types]

    @cached_property
    def between(self) -> list[Link]:
        """The different links between nodes."""
        if len(self.cluster.nodes) < 2:
            return []
        found = [] if self.cluster.link is None else [self.cluster.link]
        found += [Link(**x.model_dump(exclude={"between"})) for x in self.cluster.links if len(set(x.between)) > 1]
        if not found:
            self.cluster.link_between(*(node.name for node in self.cluster.nodes[:2]))  # says what is missing
        return list(dict.fromkeys(found))

    @cached_property
    def inside(self) -> dict[tuple[int, int], list[Link]]:
        """The different links inside of nodes that have devices of both types, or two of the one."""
        found: dict[tuple[int, int], dict[Link, None]] = {}
        for node in self.cluster.nodes:
            here = [(i, node.devices[name]) for i, name in enumerate(self.types) if node.devices.get(name, 0)]
            if sum(count for _, count in here) > 1:
                link = self.cluster.link_between(node.name, node.name)
                for i, count in here:
                    for j, _ in here:
                        if i != j or count > 1:
                            found.setdefault((i, j), {})[link] = None
        return {pair: list(links) for pair, links in found.items()}

    @memoized
    def joins(self, i: int, j: int) -> list[Link]:
        """All links that could join a device of one type to one of the other."""
        apart = len(self._names[i] | self._names[j]) > 1
        return self.inside.get((i, j), []) + (self.between if apart else [])

    @memoized
    def _occupied(self, link: Link, size: int) -> Array:
        """Seconds that each boundary's transfer holds a link, in up to so many parts [parts, L + 1]."""
        most = max(kind.degree for kind in self.kinds)
        bytes_of = np.concatenate([[0.0], self.problem.profile.output_bytes * size])
        parts = bytes_of / np.arange(1, most + 1)[:, None]
        own = np.maximum(link_seconds(link, parts) - link.seconds(0), 0.0)
        found: Array = np.minimum.accumulate(own, axis=0)
        return found

    @memoized
    def transfer(self, size: int) -> tuple[Array, Array]:
        """The least seconds that a transfer of each boundary's output for `size` samples holds its link, and the least latency,
        between two nodes [2, L + 1], and on one [2, K, K, L + 1]; infinite where no two devices can be joined."""
        most = max(kind.degree for kind in self.kinds)
        inside = np.full((2, self.K, self.K, self.L + 1), np.inf)
        for (i, j), links in self.inside.items():
            inside[:, i, j] = self._fastest(links, size, most)
        return self._fastest(self.between, size, most), inside

    def _fastest(self, links: list[Link], size: int, parts: int) -> Array:
        """The least occupied seconds and the least latency of these links, apart [2, L + 1]."""
        if not links:
            return np.full((2, self.L + 1), np.inf)
        occupied = np.minimum.reduce([self._occupied(link, size)[parts - 1] for link in links])
        return np.stack([occupied, np.full(self.L + 1, min(link.seconds(0) for link in links))])

    @cached_property
    def summed(self) -> Array:
        """Least gradient bytes of layers [lo, hi) that are summed with their segments [L + 1, L + 1]; tied ones are summed
        apart."""
        profile = self.problem.profile
        shards = [kind.degree * profile.trained_bytes(kind.degree, kind.type) for kind in self.kinds]
        return span(np.maximum(np.min(shards, axis=0) - profile.tied_trained_bytes, 0.0))

    @memoized
    def sums(self, R: int) -> Array:
        """Lower bound [V, lo, hi] on the seconds of a stage's gradient sums beside R − 1 or more other replicas, wherever they
        are."""
        found: Array = np.minimum(self.sums_over(R, False), self.sums_over(R, True))
        return np.where(np.isfinite(found), found, 0.0)

    @memoized
    def sums_over(self, R: int, inside: bool) -> Array:
        """Lower bound [V, lo, hi] on the seconds of a stage's gradient sums over R owners that are all on one node, if `inside`,
        or not all on one; infinite where the cluster has no place for them. A stage's segments have R owners each and run one
        after the other; over a link of latency a and rate w they take 2(R − 1)(j·a + size / (R·w)) for j ≥ 1 segments (Patarasu
        and Yuan 2009), which grows with R. A device of a group of t holds a t-th. The slowest link of a ring over several nodes
        is no faster than the best between nodes."""
        found = np.full((self.V, self.L + 1, self.L + 1), np.inf)
        for v, kind in enumerate(self.kinds):
            here = [link for j in range(self.K) for link in self.inside.get((kind.at, j), [])]
            links = (here if self.nodes[kind.at] >= R else []) if inside else self.between
            size = self.summed / kind.degree
            if R == 1:
                found[v] = np.inf if inside else 0.0
            elif links:
                least = np.minimum.reduce([link_floor(link, size / R) for link in links])
                found[v] = np.where(size > 0, 2 * (R - 1) * least, 0.0)
        return found

    @cached_property
    def nodes(self) -> list[int]:
        """For each type, the most devices of any node that has it."""
        every = self.cluster.nodes
        return [max(sum(node.devices.values()) for node in every if node.devices.get(name, 0)) for name in self.types]

    @cached_property
    def lone_rates(self) -> Array:
        """The most bytes/s out of and into a node that has a device of each type and no other [K, 2]; infinite where some node
        with the type has several devices, so that neighbours in a pipeline may be on one node."""
        found, rates = np.full((self.K, 2), np.inf), self.cluster.adapter_rates
        for i, names in enumerate(self._names):
            if self.nodes[i] == 1 and len(self.cluster.nodes) > 1:
                found[i] = np.max([rates[name] for name in names], axis=0)
        return found

    @property
    def largest_node(self) -> int:
        """Most devices of any node."""
        return max(self.nodes)

    @memoized
    def insides(self, line: tuple[int, ...]) -> tuple[bool, ...]:
        """Whether each stage and the next are on one node, if stages of a type fill nodes one after the other."""
        found, taken = list[bool](), self.kinds[line[0]].degree
        for a, b in pairwise(line):
            here, after = self.kinds[a], self.kinds[b]
            room = here.at == after.at and taken + after.degree <= self.node_size[here.at]
            found.append(room)
            taken = taken + after.degree if room else after.degree
        return tuple(found)

    @memoized
    def sent(self, a: int, b: int, size: int, inside: bool) -> Array:
        """The time, about, of a transfer of each boundary's output between stages of these kinds: seconds that it holds its link
        [L + 1], and then its latency; infinite where no link joins them."""
        i, j = self.at[a], self.at[b]
        links = (self.inside.get((i, j), []) if inside else self.between) or self.joins(i, j)
        parts = min(self.kinds[a].degree, self.kinds[b].degree)
        each = [np.append(self._occupied(link, size)[parts - 1], link.seconds(0)) for link in links]
        return min(each, key=lambda x: float(x.sum()), default=np.full(self.L + 2, np.inf))
