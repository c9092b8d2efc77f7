"""What the searches share: interchangeable devices, and every stage's time and memory as matrices [lo, hi].

**The plan class** that `auto` and `exhaustive` search. Any set of devices is split into ordered pipelines
(replicas) with any cuts. One micro-batch size b serves all replicas: a size that the profile measured on
every type used, at most the global batch B. M = ⌈B / b⌉ micro-batches are dealt to the replicas in any whole
numbers, at least one each; a remainder B mod b is the last micro-batch of one of them. Each stage recomputes
or not. Each replica has one family of warm-up depths: n − s ("1f1b"), 2(n − s) − 1 ("deep") or m ("gpipe"); a
plan whose replicas are all "gpipe" is stored with that schedule, others store what differs from 1F1B as
`warmup`. Peak memory is at most memory × (1 − reserve). The back ends fairscale and torchgpipe: gpipe only,
all devices of a replica on one node. The objective is `simulate`'s step.

Recompute never shortens a step (the simulated time is monotone in every duration), so a stage recomputes only
if it does not fit otherwise: this loses no optimum and halves each stage's choices."""

from __future__ import annotations

import math
from functools import cache, cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.cluster import Link
from hetpipe.cost import Costs
from hetpipe.formats import InputError
from hetpipe.partition import Problem

Array = NDArray[np.float64]
Family = Literal["1f1b", "deep", "gpipe"]
Counts = tuple[int, ...]


class Kind(NamedTuple):
    """Interchangeable devices: one type on one node."""

    node: str
    type: str
    devices: tuple[str, ...]


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
    def samples(self) -> int:
        """Samples in all."""
        return sum(self.sizes)


class StageTables(NamedTuple):
    """Of one device kind at one place in the pipeline, [G loads, lo, hi]; infinite where the stage does not
    fit. `work` is the time of all its actions; `through` what the first forward and the last backward take at
    least; `forward` [lo, hi] and `backward` the longest single actions; `recompute` where it fits only so."""

    work: Array
    through: Array
    forward: Array
    backward: Array
    recompute: NDArray[np.bool_]


def span(values: Array) -> Array:
    """[lo, hi] sums of per-layer `values`; zero below the diagonal."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return np.triu(prefix[None, :] - prefix[:, None])


def depth_of(family: Family, place: int, m: int) -> int:
    """Warm-up depth of the stage that is `place` stages from the end (the last: 1)."""
    return max(1, min(m, {"1f1b": place, "deep": 2 * place - 1, "gpipe": m}[family]))


@lru_cache(maxsize=4096)
def families_of(allowed: tuple[Family, ...], n: int, m: int) -> tuple[Family, ...]:
    """The allowed families with different depths for n stages and m micro-batches, the shallowest of equals.
    One stage alone takes the same time at any depth, so the first (least memory) is enough."""
    seen: dict[tuple[int, ...], Family] = {}
    for family in allowed[:1] if n == 1 else allowed:
        seen.setdefault(tuple(depth_of(family, place, m) for place in range(1, n + 1)), family)
    return tuple(seen.values())


def microbatch_sizes(problem: Problem) -> list[int]:
    """Measured sizes that a plan may use: at most the global batch, on any type of the cluster."""
    kinds = {device.type for device in problem.cluster.devices}
    measured = sorted({b for kind in kinds for b in problem.profile.measurement(kind).microbatch_sizes})
    sizes = [b for b in measured if b <= problem.global_batch]
    if not sizes:
        raise InputError(
            f"the global batch of {problem.global_batch} samples is below the smallest measured micro-batch, "
            f"{measured[0]}; measure smaller ones with 'hetpipe profile'"
        )
    return sizes


def allowed_families(problem: Problem) -> tuple[Family, ...]:
    """What `schedule` and `backend` leave, the shallowest first."""
    if problem.backend != "torch":
        if problem.schedule == "1f1b":
            raise InputError(
                f"back end {problem.backend!r} runs gpipe only, but schedule '1f1b' is asked for"
            )
        return ("gpipe",)
    return {"auto": ("1f1b", "deep", "gpipe"), "1f1b": ("1f1b", "deep"), "gpipe": ("gpipe",)}[
        problem.schedule
    ]  # type: ignore[return-value]


class Space:
    """A problem as matrices. Device kinds are counted, never enumerated."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs = Costs(problem.profile, problem.cluster)
        self.L = len(problem.profile.layers)
        grouped: dict[tuple[str, str], list[str]] = {}
        for device in problem.cluster.devices:
            grouped.setdefault((device.node, device.type), []).append(device.id)
        self.kinds = [Kind(node, kind, tuple(ids)) for (node, kind), ids in grouped.items()]
        self.counts: Counts = tuple(len(kind.devices) for kind in self.kinds)
        self.families = allowed_families(problem)
        self.one_node = problem.backend != "torch"
        types = problem.cluster.device_types
        self.limits = [types[kind.type].memory * (1 - problem.memory_reserve) for kind in self.kinds]
        self.prices = [types[kind.type].price_per_hour for kind in self.kinds]
        self._memory: dict[str, tuple[Array, ...]] = {}
        self._stages: dict[object, StageTables] = {}
        self._links: dict[int, tuple[Array, Array]] = {}

    @property
    def states(self) -> int:
        """How many parts of the cluster there are, in counts of devices."""
        return math.prod(count + 1 for count in self.counts)

    @property
    def K(self) -> int:  # noqa: N802
        """Number of device kinds."""
        return len(self.kinds)

    def measured(self, k: int, b: int) -> bool:
        """Whether kind k was measured at micro-batch size b."""
        return b in self.problem.profile.measurement(self.kinds[k].type).microbatch_sizes

    def price(self, counts: Counts) -> float:
        """Price per hour of so many devices."""
        return sum(count * price for count, price in zip(counts, self.prices, strict=True))

    def seconds(self, k: int, b: int) -> tuple[Array, Array]:
        """Forward and backward seconds [lo, hi] of one micro-batch, as `Costs.stage_seconds` has them without
        recompute."""
        forward, backward = self.costs.time_prefix(self.kinds[k].type, b)
        extra = self.problem.cluster.runtime_overhead.action_seconds
        return forward[None, :] - forward[:, None] + extra, backward[None, :] - backward[:, None] + extra

    def again(self, k: int, b: int) -> Array:
        """Seconds [lo, hi] that recompute adds to a backward."""
        forward, _ = self.costs.time_prefix(self.kinds[k].type, b)
        return forward[None, :] - forward[:, None]

    def optimizer(self, k: int) -> Array:
        """Optimizer seconds [lo, hi]."""
        return span(np.array(self.problem.profile.measurement(self.kinds[k].type).optimizer_seconds))

    def peak(self, k: int, depth: int, load: Load, *, recompute: bool) -> Array:
        """Peak bytes [lo, hi], as `Costs.stage_memory(…).peak` has them."""
        static, boundary, *rest = self._memory_tables(self.kinds[k].type)
        held, transient = rest[2 * recompute : 2 * recompute + 2]
        samples = load.samples
        window = samples if depth >= load.m else depth * load.b
        return np.rint(
            static + samples * boundary + held * window + transient * max(load.sizes[0], load.sizes[-1])
        )

    def _memory_tables(self, kind: str) -> tuple[Array, ...]:
        if kind not in self._memory:
            tables = np.zeros((6, self.L + 1, self.L + 1))
            for lo in range(self.L):
                for hi in range(lo + 1, self.L + 1):
                    plain = self.costs.stage_memory(kind, lo, hi, samples=1)
                    less = self.costs.stage_memory(kind, lo, hi, samples=1, recompute=True)
                    tables[:, lo, hi] = (
                        plain.static,
                        plain.boundary,
                        plain.held_per_sample,
                        plain.transient_per_sample,
                        less.held_per_sample,
                        less.transient_per_sample,
                    )
            self._memory[kind] = tuple(tables)
        return self._memory[kind]

    def stage(self, k: int, place: int, family: Family, loads: tuple[Load, ...]) -> StageTables:
        """Tables of kind k, `place` stages from the end, for loads that share b and q."""
        key = (self.kinds[k].type, self.limits[k], place, family, loads)
        if key not in self._stages:
            if len(self._stages) > 4000:
                self.forget()
            self._stages[key] = self._stage(k, place, family, loads)
        return self._stages[key]

    def _stage(self, k: int, place: int, family: Family, loads: tuple[Load, ...]) -> StageTables:
        b, q = loads[0].b, loads[0].q
        (fb, bb), (fq, bq) = self.seconds(k, b), self.seconds(k, q or b)
        depths = [depth_of(family, place, load.m) for load in loads]
        fits = [
            np.array([self.peak(k, d, load, recompute=r) for d, load in zip(depths, loads, strict=True)])
            <= self.limits[k]
            for r in (False, True)
        ]
        recompute = ~fits[0] & fits[1] & self.problem.allow_recompute
        possible = (fits[0] | recompute) & np.triu(np.ones_like(fb, dtype=bool), 1)
        backward_b = bb + recompute * self.again(k, b)
        backward_q = bq + recompute * self.again(k, q or b)
        full = np.array([load.m - (q > 0) for load in loads], dtype=np.float64)[:, None, None]
        work = full * (fb + backward_b) + ((fq + backward_q) if q else 0.0)
        through = np.minimum(fb, fq) + np.minimum(backward_b, backward_q)
        return StageTables(
            np.where(possible, work, np.inf),
            np.where(possible, through, np.inf),
            np.maximum(fb, fq),
            np.maximum(backward_b, backward_q),
            recompute,
        )

    def forget(self) -> None:
        """Drop the stage tables kept so far; they are rebuilt when needed."""
        self._stages.clear()

    @cached_property
    def link_ids(self) -> NDArray[np.int64]:
        """[K, K] index into `links`; −1 where no two devices of these kinds exist."""
        ids = np.full((self.K, self.K), -1)
        for i, a in enumerate(self.kinds):
            for j, b in enumerate(self.kinds):
                if i != j or len(a.devices) > 1:
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
        """Seconds that a boundary's transfer occupies its link [K, K, L + 1], and the latency [K, K]."""
        if size not in self._links:
            occupied, latency = np.zeros((self.K, self.K, self.L + 1)), np.zeros((self.K, self.K))
            for i, j in zip(*np.nonzero(self.link_ids >= 0), strict=True):
                ends = self.kinds[i].devices[0], self.kinds[j].devices[-1]
                sent = [self.costs.transfer(*ends, hi, size) for hi in range(1, self.L)]
                occupied[i, j, 1 : self.L] = [seconds for seconds, _ in sent]
                latency[i, j] = sent[0][1] if sent else 0.0
            self._links[size] = occupied, latency
        return self._links[size]

    @cached_property
    def untied(self) -> Array:
        """Parameter bytes per layer that are summed with their segment, [L]; tied ones are summed apart."""
        layers = self.problem.profile.layers
        return np.array(
            [layer.parameter_bytes - (layer.tied_parameter_bytes if layer.tied else 0) for layer in layers],
            dtype=np.float64,
        )

    @cache  # noqa: B019
    def sum_floor(self, k: int, R: int) -> Array:
        """Lower bound [lo, hi] on the seconds that the gradient sums of a stage on kind k take beside R − 1
        other replicas.

        Its segments have R owners each and run one after the other; over a link of latency a and rate w they
        take 2(R − 1)(j·a + size / (R·w)) for j ≥ 1 segments. A measured link costs at least (its least
        seconds per byte) × bytes. The group's slowest link is no faster than the best link that joins this
        kind to any device."""
        size = span(self.untied)
        ids = {int(i) for i in self.link_ids[k] if i >= 0}
        if R < 2 or not ids:
            return np.zeros_like(size)
        floors = [link_floor(self.links[i], size / R) for i in ids]
        return np.where(size > 0, 2 * (R - 1) * np.minimum.reduce(floors), 0.0)


def link_floor(link: Link, size: Array) -> Array:
    """A lower bound on the sum of a link's seconds over any pieces of `size` bytes in all."""
    if link.points is None:
        assert link.bandwidth is not None
        return link.latency + size / link.bandwidth
    (x0, y0), (x1, y1) = link.points[-2:]
    rates = [y / x for x, y in link.points if x > 0] + [max(0.0, (y1 - y0) / (x1 - x0))]
    return size * min(rates)


def link_seconds(link: Link, size: Array) -> Array:
    """`Link.seconds` of many sizes at once."""
    if link.points is None:
        assert link.bandwidth is not None
        return link.latency + size / link.bandwidth
    sizes, seconds = (np.array(axis, dtype=np.float64) for axis in zip(*link.points, strict=True))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    beyond = seconds[-1] + max(slope, 0.0) * (size - sizes[-1])
    return np.where(size > sizes[-1], beyond, np.interp(size, sizes, seconds))
