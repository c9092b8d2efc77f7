"""How many samples of a step the memory of a cluster holds, whatever the time they take.

A pipeline is described by its composition: how many stages it has on each kind (a device type, and over how many
devices a stage of it is split). It holds n samples if its stages can be put in some order, with some cuts, each within
its device's memory. Micro-batches as small as all of its kinds were measured at and the shallowest warm-up need the
least memory, so nothing else is looked at; more samples never need less, so every composition has a largest number,
its capacity. A plan is a set of pipelines side by side: the most samples of the cluster are an integer program over
compositions (HiGHS). Devices of one type are counted over all nodes. Groups fit into the nodes exactly if, for each
degree t, the groups of t or more, counted in pieces of t, are no more than the nodes hold pieces of t (largest first;
degrees must divide each other, as powers of two do).

**Exact** while there are at most `COMPOSITIONS` compositions and `LOOKS` changes of capacity; beyond that only pipelines
of fewer stages (or of the largest groups of each type) and smaller capacities are counted, so what is said to fit does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.memory import memory_tables
from hetpipe.partitioners.stage_kinds.plan_class import allowed_families, cluster_sizes
from hetpipe.planning.partition import Problem
from hetpipe.planning.programs import Program
from hetpipe.predict.cost import Costs

Array = NDArray[np.float64]
Index = NDArray[np.int64]
COMPOSITIONS = 2_000
MANY = 200  # compositions
LOOKS, FEW_LOOKS = 60, 16  # numbers of samples tried at most; of many compositions


class StageKind(NamedTuple):
    """What a stage can be put on, wherever it is: `degree` devices of one type."""

    type: str
    degree: int


class Level(NamedTuple):
    """Compositions of one number of stages, [C, V]; `parents`: for each kind, which of them (rows) come from which
    composition of one stage less."""

    rows: Index
    parents: list[tuple[Index, Index]]


class Packing(NamedTuple):
    """Samples that fit, and in how many replicas."""

    samples: int
    replicas: int


class Bytes:
    """What stages [lo, hi) need, for each kind of stage."""

    def __init__(self, problem: Problem) -> None:
        self.costs = Costs(problem.profile, problem.cluster)
        self.L = len(problem.profile.layers)

    @memoized
    def tables(self, stage_kind: StageKind) -> Array:
        """The bytes that layers need on a kind of stage, as `memory_tables` has them."""
        return memory_tables(self.costs, self.L, stage_kind.type, stage_kind.degree)

    def peak(self, stage_kind: StageKind, samples: int, window: int, largest: int, *, recompute: bool) -> Array:
        """Least bytes [lo, hi] with `window` samples in flight and micro-batches of at most `largest`."""
        static, boundary, held, transient, less, layer = self.tables(stage_kind)
        with np.errstate(invalid="ignore"):
            base = static + samples * boundary
            found = np.rint(base + held * window + transient * largest)
            if recompute:
                found = np.minimum(found, np.rint(base + less * window + layer * largest))
        return np.where(np.isfinite(static), found, np.inf)


class Yard:
    """Devices among which a pipeline may take its own: all of the cluster, or those of one node."""

    def __init__(self, devices: Mapping[str, list[int]], stage_kinds: list[StageKind], most_stages: int) -> None:
        self.stage_kinds, self.devices = stage_kinds, {kind: sum(sizes) for kind, sizes in devices.items()}
        rows, limits = [], []
        for kind, degree in sorted({(s.type, s.degree) for s in stage_kinds} | {(s.type, 1) for s in stage_kinds}):
            rows.append([s.degree // degree if s.type == kind and s.degree >= degree else 0 for s in stage_kinds])
            limits.append(sum(size // degree for size in devices.get(kind, [])))
        self.takes, self.there = np.array(rows), np.array(limits)
        self.complete = self._grow(range(len(stage_kinds)), most_stages)
        largest = [
            v for v, s in enumerate(stage_kinds) if s.degree == max(x.degree for x in stage_kinds if x.type == s.type)
        ]
        if not self.complete and len(largest) < len(stage_kinds):
            self._grow(largest, most_stages)
        self.comps = np.concatenate([x.rows for x in self.levels]) if self.levels else self.takes[:0]

    def _grow(self, stage_kinds: Sequence[int], most_stages: int) -> bool:
        """List the compositions of these kinds of stage, fewest stages first; whether these are all."""
        self.levels: list[Level] = []
        level, total = np.zeros((1, len(self.stage_kinds)), dtype=np.int64), 0
        for _ in range(most_stages):
            found = self._longer(level, stage_kinds)
            total += len(found.rows)
            if not len(found.rows) or total > COMPOSITIONS:
                return not len(found.rows)
            self.levels.append(found)
            level = found.rows
        return True

    def _longer(self, level: Index, stage_kinds: Sequence[int]) -> Level:
        """All compositions of one stage more that the devices allow."""
        number: dict[tuple[int, ...], int] = {}
        links: list[list[tuple[int, int]]] = [[] for _ in self.stage_kinds]
        for parent, row in enumerate(level.tolist()):
            for v in stage_kinds:
                c = (*row[:v], row[v] + 1, *row[v + 1 :])
                if (self.takes @ np.array(c) <= self.there).all():
                    links[v].append((number.setdefault(c, len(number)), parent))
        parents = [np.array(x, dtype=np.int64).reshape(-1, 2).T for x in links]
        return Level(
            np.array(list(number), dtype=np.int64).reshape(-1, len(self.stage_kinds)),
            [(x[0], x[1]) for x in parents],
        )


class Capacity:
    """The samples that a problem's cluster holds in plans of the class in `plan_class`, or in one pipeline only."""

    def __init__(self, problem: Problem, *, one_pipeline: bool = False, bytes_: Bytes | None = None) -> None:
        self.problem, self.one_pipeline = problem, one_pipeline
        self.bytes = bytes_ or Bytes(problem)
        self.gpipe = allowed_families(problem) == ("gpipe",)
        nodes = [node.devices for node in problem.cluster.nodes]
        most = Counter[str]()
        for node in nodes:
            most |= Counter(node)
        split = problem.backend == "torch"
        self.stage_kinds = sorted(
            StageKind(x.device_type, x.tensor_parallel)
            for x in problem.profile.measurements
            if x.tensor_parallel <= (most[x.device_type] if split else min(1, most[x.device_type]))
        )
        if split:
            together = [({kind: [node.get(kind, 0) for node in nodes] for kind in most}, 1)]
        else:
            shapes = Counter(tuple(sorted(node.items())) for node in nodes)
            together = [({kind: [n] for kind, n in shape}, copies) for shape, copies in shapes.items()]
        self.yards = [
            (Yard(devices, self.stage_kinds, self.bytes.L), copies) for devices, copies in together if self.stage_kinds
        ]
        self.limits = self.limits_with({})
        self.exact = self.complete  # whether what was found not to fit so far does not for certain
        types = problem.cluster.device_types
        self.prices = np.array([types[s.type].price_per_hour * s.degree for s in self.stage_kinds])

    @property
    def complete(self) -> bool:
        """Whether every pipeline was looked at."""
        return all(yard.complete for yard, _ in self.yards)

    def certain(self) -> bool:
        """Whether what was found not to fit so far does not: all of it was counted, or the least share fits nowhere, or no yard
        has as many bytes as the stages of one pipeline take at least, with one sample, or no device holds a layer."""
        return self.exact or self.impossible() or self._least_bytes() > max(
            sum(count * self.limits[kind] for kind, count in yard.devices.items()) for yard, _ in self.yards
        )

    def _least_bytes(self) -> float:
        """The least bytes of all stages of a pipeline with one sample, wherever they are; infinite where a layer fits no
        device."""
        L, least = self.bytes.L, np.full((self.bytes.L, self.bytes.L + 1), math.inf)
        for b, stage_kinds in self.sizes():
            for v in stage_kinds:
                peak = self.peak(v, 1, b, 1)[:L]
                size = np.where(peak <= self.limits[self.stage_kinds[v].type], peak * self.stage_kinds[v].degree, math.inf)
                least = np.minimum(least, size)
        behind = np.append(np.full(L, math.inf), 0.0)
        for lo in reversed(range(L)):
            behind[lo] = (least[lo, lo + 1 :] + behind[lo + 1 :]).min()
        return float(behind[0])

    def limits_with(self, more: Mapping[str, int]) -> dict[str, float]:
        """Bytes that plans may use on a device of each type, with so many more in it."""
        types, reserve = self.problem.cluster.device_types, self.problem.memory_reserve
        return {name: (kind.memory + more.get(name, 0)) * (1 - reserve) for name, kind in types.items()}

    def sizes(self) -> list[tuple[int, list[int]]]:
        """Micro-batch sizes, and the kinds of stage (by number) that were measured at each; those that add none are left out."""
        batch = self.problem.global_batch
        found: list[tuple[int, list[int]]] = []
        for b in cluster_sizes(self.problem):
            stage_kinds = [v for v, s in enumerate(self.stage_kinds)
                     if b in self.problem.profile.measurement(s.type, s.degree).microbatch_sizes]  # fmt: skip
            if stage_kinds and not any(set(stage_kinds) <= set(others) for _, others in found):
                found.append((b, stage_kinds))
            if b >= batch:
                break
        return found

    def fits(
        self, v: int, place: int, b: int, samples: int, limits: Mapping[str, float]
    ) -> NDArray[np.bool_]:
        """Whether a stage of kind v, `place` stages from the end, holds the layers [lo, hi)."""
        return self.peak(v, place, b, samples) <= limits[self.stage_kinds[v].type]

    def peak(self, v: int, place: int, b: int, samples: int) -> Array:
        """Least bytes [lo, hi] of a stage."""
        window = samples if self.gpipe else min(samples, place * b)
        return self.bytes.peak(
            self.stage_kinds[v], samples, window, min(b, samples), recompute=self.problem.allow_recompute
        )

    def reaches(
        self, yard: Yard, b: int, stage_kinds: list[int], samples: int, limits: Mapping[str, float]
    ) -> list[NDArray[np.bool_]]:
        """For each level and composition, from which layers on it can hold all, [C, L + 1]."""
        before = np.zeros((1, self.bytes.L + 1), dtype=np.float32)
        before[0, -1] = 1
        levels = []
        tables: dict[tuple[int, int], NDArray[np.float32]] = {}
        for place, level in enumerate(yard.levels, 1):
            after = np.zeros((len(level.rows), self.bytes.L + 1), dtype=np.float32)
            for v in stage_kinds:
                key = v, 0 if self.gpipe else min(place * b, samples)
                if key not in tables:
                    tables[key] = self.fits(v, place, b, samples, limits).T.astype(np.float32)
                own, parent = level.parents[v]
                after[own] += before[parent] @ tables[key]
            before = np.minimum(after, 1.0)
            levels.append(before > 0)
        return levels

    def holds(
        self, yard: Yard, b: int, stage_kinds: list[int], samples: int, limits: Mapping[str, float]
    ) -> NDArray[np.bool_]:
        """Whether each composition holds all layers with so many samples, [C]."""
        levels = self.reaches(yard, b, stage_kinds, samples, limits)
        return np.concatenate([x[:, 0] for x in levels]) if levels else np.zeros(0, dtype=bool)

    def capacities(self, yard: Yard, limits: Mapping[str, float], *, all_of_them: bool = False) -> Index:
        """Most samples of each composition, at most the batch, [C]; unless `all_of_them` are wanted, only lower bounds
        where one composition holds the whole batch."""
        batch = self.problem.global_batch
        found = np.zeros(len(yard.comps), dtype=np.int64)
        for b, stage_kinds in self.sizes():
            first, last = (self.holds(yard, b, stage_kinds, n, limits) for n in (1, batch))
            found = np.maximum(found, np.where(last, batch, first))
            spans, looks = [(1, first, batch, last)], LOOKS if len(found) <= MANY else FEW_LOOKS
            while spans and (all_of_them or not (found >= batch).any()):
                low, at_low, high, at_high = spans.pop(0)
                found = np.maximum(found, low * at_low)
                if high - low > 1 and (at_low != at_high).any():
                    if not looks:
                        self.exact = False
                        continue
                    middle, looks = max(low + 1, math.isqrt(low * high)), looks - 1
                    between = self.holds(yard, b, stage_kinds, middle, limits)
                    spans += [(middle, between, high, at_high), (low, at_low, middle, between)]
        return found

    def enough(self, more: Mapping[str, int] | None = None) -> bool:
        """Whether the whole batch fits, with `more` bytes on some types."""
        return (
            self._least_share(self.limits_with(more or {}))
            and self.most(more).samples >= self.problem.global_batch
        )

    def impossible(self) -> bool:
        """Whether it is certain, at a glance, that no plan fits: no pipeline holds the least share that the largest of
        so many replicas as there are devices must have. (Sizes below the measured ones are in no plan of the class.)"""
        return self.complete and cluster_sizes(self.problem)[0] == 1 and not self._least_share(self.limits)

    def _least_share(self, limits: Mapping[str, float]) -> bool:
        batch = self.problem.global_batch
        least = batch if self.one_pipeline else -(-batch // len(self.problem.cluster.devices))
        return any(
            self.holds(yard, b, stage_kinds, least, limits).any()
            for yard, _ in self.yards
            for b, stage_kinds in self.sizes()
        )

    def most(self, more: Mapping[str, int] | None = None) -> Packing:
        """The most samples that fit, up to the global batch, with `more` bytes on some types."""
        limits, batch = self.limits_with(more or {}), self.problem.global_batch
        found = [self.capacities(yard, limits) for yard, _ in self.yards]
        if self.problem.max_price_per_hour is not None:
            within = self.problem.max_price_per_hour * (1 + 1e-12)
            found = [
                np.where(yard.comps @ self.prices <= within, own, 0)
                for (yard, _), own in zip(self.yards, found, strict=True)
            ]
        largest = max((int(own.max()) for own in found if len(own)), default=0)
        if self.one_pipeline or largest >= batch or largest == 0:
            return Packing(largest, int(largest > 0))
        if self.problem.max_price_per_hour is not None:
            return self._side_by_side([(y, c, own) for (y, c), own in zip(self.yards, found, strict=True)])
        parts = [
            (self._side_by_side([(y, 1, own)]), copies)
            for (y, copies), own in zip(self.yards, found, strict=True)
            if own.any()
        ]
        samples, replicas = (sum(part[i] * copies for part, copies in parts) for i in (0, 1))
        return Packing(min(samples, batch), replicas)

    def _side_by_side(self, yards: list[tuple[Yard, int, Index]]) -> Packing:
        """The most samples in pipelines side by side, in so many copies of each yard."""
        rows, there, capacity, price = self._program(yards)
        most = math.inf if self.problem.max_price_per_hour is None else self.problem.max_price_per_hour * (1 + 1e-12)
        y, best = _whole(-capacity, np.vstack([rows, price]), 0.0, np.append(there, most))
        self.exact = self.exact and best
        return Packing(int(capacity.max()), 1) if y is None else Packing(int(capacity @ y), int(y.sum()))

    def least_price(self) -> float | None:
        """Price per hour of the cheapest devices that hold the batch; None if none do."""
        yards = [(y, c, self.capacities(y, self.limits, all_of_them=True)) for y, c in self.yards]
        rows, there, capacity, price = self._program(yards)
        batch = self.problem.global_batch
        if self.one_pipeline:
            return min(price[capacity >= batch].tolist(), default=None)
        low = np.append(np.zeros_like(there), batch)
        y, _ = _whole(price, np.vstack([rows, capacity]), low, np.append(there, np.inf))
        return None if y is None else float(price @ y)

    def _program(self, yards: list[tuple[Yard, int, Index]]) -> tuple[Array, Array, Index, Array]:
        """The rows of devices, how many there are, and the capacity and price of every column: a composition in a copy of a
        yard."""
        blocks, there, capacity, price = [], [], [], []
        for yard, copies, own in yards:
            useful = self._useful(yard, own)
            for _ in range(copies):
                blocks.append(yard.takes @ yard.comps[useful].T)
                there.append(yard.there)
                capacity.append(own[useful])
                price.append(yard.comps[useful] @ self.prices)
        rows, at = np.zeros(np.sum([block.shape for block in blocks], axis=0)), np.zeros(2, dtype=np.int64)
        for block in blocks:
            end = at + block.shape
            rows[at[0] : end[0], at[1] : end[1]], at = block, end
        return rows, np.concatenate(there), np.concatenate(capacity), np.concatenate(price)

    @staticmethod
    def _useful(yard: Yard, capacity: Index) -> NDArray[np.bool_]:
        """Compositions that hold more than those with one stage less."""
        best, at = capacity > 0, 0
        before = np.zeros(1, dtype=np.int64)
        for level in yard.levels:
            own = capacity[at : at + len(level.rows)]
            for children, parents in level.parents:
                worse = own[children] <= before[parents]
                best[at + children[worse]] = False
            at, before = at + len(level.rows), own
        return best


def _whole(cost: Array | Index, rows: Array, low: ArrayLike, high: Array) -> tuple[Index | None, bool]:
    """Whole numbers of least cost, None if there are none, or none were found; and whether that is certain."""
    program = Program(rows, low, high, whole=True, mip_rel_gap=1e-9)
    found = program.least(cost)
    return None if found is None else np.rint(found.x).astype(np.int64), program.known
