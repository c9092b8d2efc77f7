"""Kinds of stage by type and node, each of interchangeable devices, and every stage's time and memory as matrices [lo, hi].

**The plan class** that `auto` and `exhaustive` search. Any set of devices is split into ordered pipelines
(replicas) with any cuts. A stage is on one device, or on t of one type and node (tensor parallel) where the
profile measured that type at degree t (back end torch only). Replica r is given n_r ≥ 1 samples, Σ n_r = B, and
a micro-batch size b_r that the profile measured on every type and degree that it uses, at most B or the next
above: it does ⌊n_r / b_r⌋ micro-batches of b_r samples and a last one of the remainder, if there is one (so
n_r < b_r is one micro-batch of n_r). Each stage recomputes or not. Each replica has one family of warm-up
depths: n − s ("1f1b"), 2(n − s) − 1 ("deep"), 3(n − s) − 2 ("deeper") or m ("gpipe"); a plan whose replicas are all
"gpipe" is stored with that schedule, others store what differs from 1F1B as `warmup`. (While a micro-batch is away
on n − s − 1 balanced stages, a stage has time for that many forwards and backwards; where a backward takes twice as
long, for three times as many forwards.) Peak memory is at most memory × (1 − reserve). The back ends fairscale and
torchgpipe: gpipe only, all devices of a replica on one node. The objective is `simulate`'s step.

Recompute never shortens a step (the simulated time is a longest path, monotone in every duration), and a stage
that recomputes takes no memory from another, so a stage recomputes only if it does not fit otherwise: this
loses no optimum and halves each stage's choices. Likewise of two pipelines with the same samples, devices and
cuts, of which one is ready no later at any stage, and has made no layer's gradients later, the other can be left
out: gradient sums and optimizers depend on nothing else, and the step is monotone in all these times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.files.messages import InputError
from hetpipe.partitioners.stage_kinds.limit import Meter
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.memory import memory_tables, span
from hetpipe.partitioners.stage_kinds.wires import link_floor
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.predict.cost import Costs
from hetpipe.spec.cluster import Link

Array = NDArray[np.float64]
Family = Literal["1f1b", "deep", "deeper", "gpipe", "any"]  # "any": a relaxation of all that are allowed
FORWARDS: dict[Family, int] = {"1f1b": 1, "deep": 2, "deeper": 3}  # that a stage does more than the next, before a backward
Counts = tuple[int, ...]


class NodeKind(NamedTuple):
    """Interchangeable devices, one type on one node, of which a stage takes `degree`."""

    node: str
    type: str
    devices: tuple[str, ...]
    degree: int = 1


class Load(NamedTuple):
    """What a replica is given: `m` micro-batches of `b` samples, the last of `q` instead if q > 0."""

    b: int
    m: int
    q: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes in order."""
        return (self.b,) * self.m if self.q == 0 else (self.b,) * (self.m - 1) + (self.q,)

    @property
    def last(self) -> int:
        """Samples of the last micro-batch."""
        return self.q or self.b

    @property
    def samples(self) -> int:
        """Samples in all."""
        return sum(self.sizes)

    @property
    def full(self) -> int:
        """Micro-batches of b samples."""
        return self.m - (self.q > 0)


def load_of(samples: int, b: int) -> Load:
    """So many samples with a micro-batch size of b.

    >>> load_of(10, 4), load_of(3, 4)
    (Load(b=4, m=3, q=2), Load(b=3, m=1, q=0))
    """
    return Load(b, -(-samples // b), samples % b) if samples >= b else Load(samples, 1)


class StageTables(NamedTuple):
    """What a stage takes on one kind, at one place in the pipeline, [G loads, lo, hi]; infinite where the stage does not
    fit. `work` is the time of all its actions; `through` what the first forward and the last backward take at
    least; `forward` and `backward` the longest single actions ([1, lo, hi] if the same for all loads);
    `recompute` where it fits only so. A stage that only runs forward has backwards of 0."""

    work: Array
    through: Array
    forward: Array
    backward: Array
    recompute: NDArray[np.bool_]


def depth_of(family: Family, place: int, m: int) -> int:
    """Warm-up depth of the stage that is `place` stages from the end (the last: 1)."""
    return depth(FORWARDS.get(family, 0), place, m)


def depth(forwards: int, place: int, m: int) -> int:
    """Warm-up depth of the stage that is `place` stages from the end, where each does so many forwards more than the next one; 0:
    all."""
    return max(1, min(m, forwards * (place - 1) + 1)) if forwards else max(1, m)


@lru_cache(maxsize=4096)
def families_of(allowed: tuple[Family, ...], n: int, m: int) -> tuple[Family, ...]:
    """The allowed families with different depths for n stages and m micro-batches, the shallowest of equals.
    One stage alone takes the same time at any depth, so the first (least memory) is enough."""
    seen: dict[tuple[int, ...], Family] = {}
    for family in allowed[:1] if n == 1 else allowed:
        seen.setdefault(tuple(depth_of(family, place, m) for place in range(1, n + 1)), family)
    return tuple(seen.values())


def microbatch_sizes(problem: Problem) -> list[int]:
    """Measured sizes b that a plan may use, at most the global batch, on any type of the cluster. If there are none, other
    types of the profile may still have some, as for the rest of a cluster of which this is a part."""
    batch, measured = problem.global_batch, cluster_sizes(problem)
    if measured[0] > batch:
        other = any(b <= batch for x in problem.profile.measurements for b in x.microbatch_sizes)
        raise (PartitionError if other else InputError)(
            f"the global batch of {batch} samples is below the smallest micro-batch measured on the cluster's types, "
            f"{measured[0]}; measure smaller ones with 'hetpipe profile'"
        )
    return [b for b in measured if b <= batch]


def cluster_sizes(problem: Problem) -> list[int]:
    """All measured sizes of types of the cluster."""
    types = {device.type for device in problem.cluster.devices}
    return sorted({b for x in problem.profile.measurements if x.device_type in types for b in x.microbatch_sizes})


def allowed_families(problem: Problem) -> tuple[Family, ...]:
    """The families that `schedule` and `backend` leave, the shallowest first."""
    if problem.backend != "torch":
        if problem.schedule == "1f1b":
            raise InputError(
                f"back end {problem.backend!r} runs gpipe only, but schedule '1f1b' is asked for"
            )
        return ("gpipe",)
    found: dict[str, tuple[Family, ...]] = {"1f1b": ("1f1b", "deep", "deeper"), "gpipe": ("gpipe",)}
    found["auto"] = found["1f1b"] + found["gpipe"]
    return found[problem.schedule]


def require_stage_kinds(problem: Problem) -> None:
    """PartitionError where no device can have a stage, for want of a degree that was measured."""
    most = dict.fromkeys(sorted({device.type for device in problem.cluster.devices}), 0)
    for kind in most:
        most[kind] = max(node.devices.get(kind, 0) for node in problem.cluster.nodes)
    there = "the largest nodes have " + " and ".join(f"{count} {kind!r}" for kind, count in most.items())
    if problem.backend != "torch":
        most, there = dict.fromkeys(most, 1), f"the back end {problem.backend!r} runs a stage on one device"
    measured = [(m.device_type, m.tensor_parallel) for m in problem.profile.measurements if m.device_type in most]
    if all(degree > most[kind] for kind, degree in measured):
        raise PartitionError(
            f"the profile measures the cluster's types only at tensor-parallel degrees "
            f"{sorted({degree for _, degree in measured})}, and {there}; measure degree 1 with 'hetpipe profile'"
        )


class Space:
    """A problem as matrices. Devices of a kind are counted, never enumerated."""

    def __init__(self, problem: Problem) -> None:
        require_stage_kinds(problem)
        self.problem = problem
        self.costs = Costs(problem.profile, problem.cluster)
        self.L = len(problem.profile.layers)
        grouped: dict[tuple[str, str], list[str]] = {}
        for device in problem.cluster.devices:
            grouped.setdefault((device.node, device.type), []).append(device.id)
        self.families = allowed_families(problem)
        self.one_node = problem.backend != "torch"
        self.kinds: list[NodeKind] = []
        self.groups: list[int] = []  # of each kind, which devices it takes: an index into `devices`
        self.devices: Counts = tuple(len(ids) for ids in grouped.values())
        for group, ((node, kind), ids) in enumerate(grouped.items()):
            for degree in self._degrees(kind, len(ids)):
                self.kinds.append(NodeKind(node, kind, tuple(ids), degree))
                self.groups.append(group)
        self.counts: Counts = tuple(len(kind.devices) // kind.degree for kind in self.kinds)
        types = problem.cluster.device_types
        self.limits = [types[kind.type].memory * (1 - problem.memory_reserve) for kind in self.kinds]
        self.prices = [types[kind.type].price_per_hour * kind.degree for kind in self.kinds]
        self.above = np.triu(np.ones((self.L + 1, self.L + 1), dtype=bool), 1)
        self.meter = Meter()
        self._memory: dict[tuple[str, int], tuple[Array, ...]] = {}
        self._stages: dict[object, StageTables] = {}
        self._links: dict[int, tuple[Array, Array]] = {}

    def _degrees(self, kind: str, most: int) -> list[int]:
        """Measured tensor-parallel degrees that so many devices allow; back ends in one process have none but 1."""
        most = 1 if self.one_node else most
        measured = [m.tensor_parallel for m in self.problem.profile.measurements if m.device_type == kind]
        return sorted(degree for degree in measured if degree <= most)

    @property
    def states(self) -> int:
        """How many parts of the cluster there are, in counts of devices."""
        return math.prod(count + 1 for count in self.devices)

    @property
    def K(self) -> int:  # noqa: N802
        """Number of kinds of stage."""
        return len(self.kinds)

    def used(self, counts: Counts) -> Counts:
        """Devices that so many stages of each kind take, by group of interchangeable devices."""
        found = [0] * len(self.devices)
        for count, group, kind in zip(counts, self.groups, self.kinds, strict=True):
            found[group] += count * kind.degree
        return tuple(found)

    def room(self, counts: Counts) -> bool:
        """Whether the cluster has the devices for so many stages of each kind."""
        return all(used <= there for used, there in zip(self.used(counts), self.devices, strict=True))

    def measured(self, k: int, b: int) -> bool:
        """Whether kind k was measured at micro-batch size b."""
        return b in self.sizes_of(k)

    def sizes_of(self, k: int) -> tuple[int, ...]:
        """Micro-batch sizes at which kind k was measured."""
        kind = self.kinds[k]
        return self.problem.profile.measurement(kind.type, kind.degree).microbatch_sizes

    def price(self, counts: Counts) -> float:
        """Price per hour of so many devices."""
        return sum(count * price for count, price in zip(counts, self.prices, strict=True))

    def prefixes(self, k: int, sizes: Sequence[int]) -> tuple[Array, Array]:
        """Prefix sums of forward and backward seconds, [sizes, L + 1]."""
        kind = self.kinds[k]
        found = [self.costs.time_prefix(kind.type, b, kind.degree) for b in sizes]
        return np.stack([f for f, _ in found]), np.stack([b for _, b in found])

    @memoized
    def optimizer(self, k: int) -> Array:
        """Optimizer seconds [lo, hi]."""
        kind = self.kinds[k]
        return span(np.array(self.problem.profile.measurement(kind.type, kind.degree).optimizer_seconds))

    def _memory_tables(self, kind: str, degree: int) -> tuple[Array, ...]:
        own = self.problem.profile.measurement(kind, degree)
        alike = degree == 1 and own.saved_bytes_per_sample is None and own.cast_bytes is None
        key = "" if alike else kind, degree  # whole and as built, a stage needs the same on all types
        if key not in self._memory:
            self._memory[key] = tuple(memory_tables(self.costs, self.L, kind, degree))
        return self._memory[key]

    def stage(self, k: int, place: int, family: Family, loads: tuple[Load, ...]) -> StageTables:
        """Tables of kind k, `place` stages from the end; kept until `forget`."""
        key = (self.kinds[k].type, self.kinds[k].degree, self.limits[k], place, family, loads)
        if key not in self._stages:
            if len(self._stages) > 4000:
                self.forget()
            self._stages[key] = self.tables(k, place, family, loads)
        return self._stages[key]

    def tables(self, k: int, place: int, family: Family, loads: Sequence[Load]) -> StageTables:
        """The tables of `stage`, made anew. Family "any" has the memory of the shallowest allowed."""
        fb, bb, ab = self._of_sizes(k, [load.b for load in loads])
        held = self.families[0] if family == "any" else family
        possible, recompute = self._fits(k, [depth_of(held, place, load.m) for load in loads], loads)
        again = bool(recompute.any())
        if again:
            bb = bb + recompute * ab
        work = np.array([load.full for load in loads], dtype=np.float64)[:, None, None] * (fb + bb)
        through, forward, backward = fb + bb, fb, bb
        if any(load.q for load in loads):
            fq, bq, aq = self._of_sizes(k, [load.q or load.b for load in loads])
            if again:
                bq = bq + recompute * aq
            rest = np.array([load.q > 0 for load in loads])[:, None, None]
            work = work + np.where(rest, fq + bq, 0.0)
            through = np.minimum(fb, fq) + np.minimum(bb, bq)
            forward, backward = np.maximum(fb, fq), np.maximum(bb, bq)
        return StageTables(
            np.where(possible, work, np.inf), np.where(possible, through, np.inf), forward, backward, recompute
        )

    def _of_sizes(self, k: int, sizes: Sequence[int]) -> tuple[Array, Array, Array]:
        """Forward, backward and recompute seconds, [loads, lo, hi], or [1, lo, hi] if all sizes are the same."""
        unique, index = np.unique(np.array(sizes), return_inverse=True)
        forward, backward = self.prefixes(k, unique.tolist())
        extra = self.problem.cluster.runtime_overhead.action_seconds
        run, once_more = (x[:, None, :] - x[:, :, None] for x in (forward, self.costs.again(forward)))
        found = run + extra, backward[:, None, :] - backward[:, :, None] + extra * self.returns, once_more
        return found if len(unique) == 1 else (found[0][index], found[1][index], found[2][index])

    def _fits(
        self, k: int, depths: Sequence[int], loads: Sequence[Load]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Where the stage fits, and where only with recompute, [loads, lo, hi]; as `Costs.stage_memory(…).peak`."""
        kind = self.kinds[k]
        static, boundary, *rest = self._memory_tables(kind.type, kind.degree)
        each = [
            (x.samples, x.samples if depth >= x.m else depth * x.b, x.b)
            for depth, x in zip(depths, loads, strict=True)
        ]
        samples, window, largest = np.array(each, dtype=np.float64).T[:, :, None, None]
        base = static + samples * boundary
        plain = (np.rint(base + rest[0] * window + rest[1] * largest) <= self.limits[k]) & self.above
        if not self.problem.allow_recompute or (plain | ~self.above).all():
            return plain, np.zeros_like(plain)
        less = (np.rint(base + rest[2] * window + rest[3] * largest) <= self.limits[k]) & self.above
        return plain | less, less & ~plain

    @cached_property
    def returns(self) -> NDArray[np.bool_]:
        """Whether a gradient comes back over the boundary before each layer, so that a stage that ends there has a backward
        [L + 1]."""
        return np.array([self.costs.has_backward(hi) for hi in range(self.L + 1)])

    def forget(self) -> None:
        """Drop the stage tables kept so far; they are rebuilt when needed."""
        self._stages.clear()

    @cached_property
    def link_ids(self) -> NDArray[np.int64]:
        """[K, K] index into `links`; −1 where no two stages of these kinds can be."""
        ids = np.full((self.K, self.K), -1)
        for i, a in enumerate(self.kinds):
            for j, b in enumerate(self.kinds):
                if self.groups[i] != self.groups[j] or len(a.devices) >= a.degree + b.degree:
                    link = self.problem.cluster.link_between(a.node, b.node)
                    if link not in self._found_links:
                        self._found_links.append(link)
                    ids[i, j] = self._found_links.index(link)
        return ids

    @cached_property
    def _found_links(self) -> list[Link]:
        return []

    @property
    def links(self) -> list[Link]:
        """The different links of the cluster."""
        assert self.link_ids is not None
        return self._found_links

    def transfer(self, size: int) -> tuple[Array, Array]:
        """Seconds that a boundary's transfer occupies its link, and its latency, [K, K, L + 1] both."""
        if size not in self._links:
            occupied, latency = np.zeros((2, self.K, self.K, self.L + 1))
            known: dict[object, NDArray[np.float64]] = {}
            for i, j in zip(*np.nonzero(self.link_ids >= 0), strict=True):
                a, b = self.kinds[i], self.kinds[j]
                groups = tuple((x.degree, x.node if x.degree > 1 else "") for x in (a, b))
                key = self.link_ids[i, j], groups
                if key not in known:
                    ends, degrees = (a.devices[0], b.devices[-1]), (a.degree, b.degree)
                    sent = [self.costs.transfer(*ends, hi, size, degrees) for hi in range(1, self.L)]
                    known[key] = np.array(sent, dtype=np.float64).reshape(-1, 2).T
                occupied[i, j, 1 : self.L], latency[i, j, 1 : self.L] = known[key]
            self._links[size] = occupied, latency
        return self._links[size]

    @cached_property
    def shards(self) -> Array:
        """Gradient bytes of each layer in all shards of a stage of kind k, [K, L]; shards repeat what is not split."""
        profile = self.problem.profile
        return np.stack([kind.degree * profile.trained_bytes(kind.degree, kind.type) for kind in self.kinds])

    @memoized
    def sum_floor(self, k: int, R: int) -> Array:
        """Lower bound [lo, hi] on the seconds that the gradient sums of a stage on kind k take beside R − 1
        other replicas.

        Its segments have R owners each and run one after the other; over a link of latency a and rate w they
        take 2(R − 1)(j·a + size / (R·w)) for j ≥ 1 segments. A measured link costs at least (its least
        seconds per byte) × bytes. The group's slowest link is no faster than the best link that joins this
        kind to any device. Of a group of t devices, each holds a t-th of at least its own shards."""
        kind = self.kinds[k]
        size = np.maximum(span(self.shards[k] - self.problem.profile.tied_trained_bytes), 0.0) / kind.degree
        ids = {int(i) for i in self.link_ids[k] if i >= 0}
        if R < 2 or not ids:
            return np.zeros_like(size)
        floors = [link_floor(self.links[i], size / R) for i in ids]
        return np.where(size > 0, 2 * (R - 1) * np.minimum.reduce(floors), 0.0)
