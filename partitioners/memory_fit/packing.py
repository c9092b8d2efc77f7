"""Pipelines side by side that the memory of a cluster holds, whatever the time they take. What is found fits; what is not found
may still fit (`obstacle.certain` proves that nothing does).

The smallest micro-batches and the shallowest warm-up need the least memory, so nothing else is looked at. A pipeline is made from
its last stage to its first: of the stages taken so far it is known which layers they can begin with. Only the `BEAM` takes that
leave the least memory unused are kept of each number of stages. For R replicas, each in turn may take an R-th of the devices, and
holds as many samples as these can; then R − 1 share the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Node
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.plan_class import allowed_families, cluster_sizes
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.partition import Problem
from hetpipe.predict.cost import peak_of

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Tables = dict[tuple[str, int, bool], Array]  # of `memory_tables`, by type, degree and offload; nothing else changes them
BEAM = 64  # takes of each number of stages
WIDER = 1.25  # times the stages of one number of replicas: those of the next that is tried


class Packed(NamedTuple):
    """Stages of each kind that hold the layers from `first` on, for so many samples in micro-batches of b. Where these are all
    layers, the kind of each stage, where it ends, and whether it recomputes."""

    take: tuple[int, ...]
    samples: int
    b: int
    first: int
    stages: tuple[tuple[int, int, bool], ...] = ()


class Packer:
    """What the memory of one problem's cluster holds. There are V kinds of stage, L layers, and N things that stages take."""

    def __init__(self, problem: Problem, tables: Tables | None = None) -> None:
        self.problem, self.types = problem, Types(problem)
        self.L, self.V, self.kinds = self.types.L, self.types.V, self.types.kinds
        self.gpipe, self.batch = allowed_families(problem) == ("gpipe",), problem.global_batch
        self.limits = [self.types.limit[kind.at] for kind in self.kinds]
        prices = [self.types.prices[kind.at] * kind.degree for kind in self.kinds]
        self.takes = np.vstack([self.types.limits[0][: self.V], prices])
        self.tables = {} if tables is None else tables
        nodes, split = problem.cluster.nodes, problem.backend == "torch"
        self.pools = [self._there(x) for x in ([nodes] if split else [[node] for node in nodes])]  # each pipeline is within one
        self.usable = [v for v, kind in enumerate(self.kinds) if split or kind.degree == 1]
        self.sizes = list[tuple[int, list[int]]]()  # of micro-batches, and the kinds measured at each that are at no smaller one
        for b in cluster_sizes(problem):
            measured = [v for v in self.usable if b in self.types.sizes_of(self.kinds[v])]
            if measured and not any(set(measured) <= set(others) for _, others in self.sizes):
                self.sizes.append((b, measured))
        least = np.min([self.least(v) * self.kinds[v].degree for v in self.usable], axis=0)
        self.behind = np.append(np.cumsum(least[::-1])[::-1], 0.0)  # bytes of all layers from each on

    def packing(self, one_pipeline: bool = False, whole: bool = False) -> list[Packed]:
        """Pipelines side by side, or one, that do the batch, or the most samples that were found to fit; or fewer, if only the
        `whole` batch is of interest."""
        money, found, least = self._money(), list[list[Packed]](), self.batch if whole and len(self.pools) == 1 else 1
        for there in self.pools:
            need = self.batch - (0 if one_pipeline else sum(samples_of(pipelines) for pipelines in found))
            found.append(self._side_by_side(np.append(there, money), need, 1 if one_pipeline else self.types.most, least))
            money -= 0.0 if one_pipeline else self.price(found[-1])
        return max(found, key=samples_of) if one_pipeline else [x for pipelines in found for x in pipelines]

    def longest(self, samples: int) -> Packed:
        """The stages on any devices that hold the most layers at the end of the model, with so many samples."""
        return min((self.farthest((*x, self._money()), samples) for x in self.pools), key=lambda found: found.first)

    def _there(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        """The groups of each kind [V] that fit into these nodes."""
        return tuple(self.types.groups(kind, nodes) for kind in self.kinds)

    def _money(self) -> float:
        most = self.problem.max_price_per_hour
        return math.inf if most is None else most * (1 + 1e-12)

    def price(self, pipelines: list[Packed]) -> float:
        """Price per hour of their devices."""
        return float(sum(self.takes[-1] @ np.array(x.take) for x in pipelines))

    def _side_by_side(self, there: Array, need: int, most: int, least: int) -> list[Packed]:
        """Pipelines of these devices for as many samples as are needed, in up to so many replicas; fewer than the `least` samples
        are not of interest."""
        single, best = self.largest(tuple(there.tolist()), need), list[Packed]()
        for R in self._numbers(there[:-1], most) if single is not None else ():
            if single is not None and R * single.samples < least:
                continue
            found, left, r = list[Packed](), there.copy(), R
            while samples_of(found) < need and len(found) < most:
                pipeline = self.largest((*np.ceil(left[:-1] / r).tolist(), float(left[-1])), need - samples_of(found))
                if pipeline is None and (r == 1 or (r == R and not found)):
                    break
                if pipeline is not None:
                    found.append(pipeline)
                    left -= self.takes @ np.array(pipeline.take)
                r = max(1, r - 1)
            best = max(best, found, key=samples_of)
            if samples_of(best) >= need or not found:
                break  # fewer devices for each replica hold no more
        return best

    def _numbers(self, there: Array, most: int) -> list[int]:
        """Numbers of replicas, up to the most, that share what there is of some kind in pieces of 1, 2, … stages."""
        stages = {round(WIDER**n) for n in range(1 + math.ceil(math.log(self.L, WIDER)))}
        return sorted({1} | {min(most, int(count) // n) for count in there for n in stages if count >= n})

    @memoized
    def largest(self, each: tuple[float, ...], need: int) -> Packed | None:
        """The pipeline that holds most samples, up to what is needed, and takes no more than `each` [N]; None if none does."""
        best, low, high = None, 0, need
        for samples in (need, 1):
            found = self.farthest(each, samples)
            if found.first == 0:
                best, low = found, samples
                break
        while best is not None and high - low > 1:
            middle = max(low + 1, math.isqrt(low * high))
            found = self.farthest(each, middle)
            best, low, high = (found, middle, high) if found.first == 0 else (best, low, middle)
        return best

    @memoized
    def farthest(self, each: tuple[float, ...], samples: int) -> Packed:
        """The stages that hold most layers at the end of the model with so many samples, and take no more than `each` [N]; the
        fewest that hold all."""
        best, room = Packed((0,) * self.V, samples, self.sizes[0][0], self.L), np.array(each)
        size = np.array([limit * kind.degree for limit, kind in zip(self.limits, self.kinds, strict=True)])
        for b, kinds in self.sizes:
            takes, begins = np.zeros((1, self.V), dtype=np.int64), np.eye(1, self.L + 1, self.L, dtype=np.float32)
            behind = [(takes, begins)]
            for place in range(1, self.L + 1):
                window, some = self.window(samples, b, place), begins.any(axis=0)
                longer, held = list[Index](), list[NDArray[np.float32]]()
                for v in kinds:
                    longer.append(takes + np.eye(1, self.V, v, dtype=np.int64))
                    fits = self.fits(v, samples, window, min(b, samples))
                    held.append(np.einsum("nh,hl->nl", begins[:, some], fits[some]))  # small, so without BLAS and its threads
                every, begins = np.concatenate(longer), np.concatenate(held)
                there = (every @ self.takes.T <= room).all(axis=1) & begins.any(axis=1)
                takes, same = np.unique(every[there], axis=0, return_inverse=True)
                order = np.argsort(same.ravel())
                begins = np.add.reduceat(begins[there][order], np.searchsorted(same.ravel()[order], np.arange(len(takes))))
                begins = np.minimum(begins, 1)
                if not len(takes):
                    break
                first = begins.argmax(axis=1)
                unused = takes @ size - self.behind[first]
                i = int(np.lexsort((unused, first))[0])
                if first[i] < best.first:
                    best = Packed(tuple(takes[i].tolist()), samples, b, int(first[i]))
                if best.first == 0:
                    return best._replace(stages=self._stages(best, behind))
                kept = np.argsort(unused, kind="stable")[:BEAM]
                takes, begins = takes[kept], begins[kept]
                behind.append((takes, begins))
        return best

    def _stages(self, found: Packed, behind: list[tuple[Index, NDArray[np.float32]]]) -> tuple[tuple[int, int, bool], ...]:
        """Stages in an order in which they hold all layers; the takes of so many stages `behind`, and where they can begin."""
        lo, left, stages, largest = 0, np.array(found.take), list[tuple[int, int, bool]](), min(found.b, found.samples)
        one = np.eye(self.V, dtype=np.int64)
        for place in range(len(behind), 0, -1):
            takes, begins = behind[place - 1]
            window = self.window(found.samples, found.b, place)
            rest = {v: begins[(takes == left - one[v]).all(axis=1)].any(axis=0) for v in np.flatnonzero(left).tolist()}
            fits = {v: self.fits(v, found.samples, window, largest)[:, lo] > 0 for v in rest}
            ends = {v: np.flatnonzero(rest[v] & fits[v]) for v in rest}
            v = next(v for v in ends if len(ends[v]))  # the take was made of one of these
            hi = int(ends[v][len(ends[v]) // 2])
            again = self.peak(v, found.samples, window, largest, again=False)[lo, hi] > self.limits[v]
            stages.append((v, hi, bool(again)))
            lo, left = hi, left - one[v]
        return tuple(stages)

    def window(self, samples: int, b: int, place: int) -> int:
        """Samples in flight in the stage that is `place` stages from the end (the last: 1)."""
        return samples if self.gpipe else min(samples, place * b)

    @memoized
    def fits(self, v: int, samples: int, window: int, largest: int) -> NDArray[np.float32]:
        """Where a stage on kind v holds layers [lo, hi), 1 or 0 [hi, lo]."""
        return (self.peak(v, samples, window, largest) <= self.limits[v]).T.astype(np.float32)

    def peak(self, v: int, samples: int, window: int, largest: int, *, again: bool = True) -> Array:
        """Least bytes of a stage on kind v [lo, hi], with `window` of its samples in flight and micro-batches of at most
        `largest`, which may compute `again` if the problem allows it; infinite where there is no layer."""
        key = self.kinds[v][1:]
        if key not in self.tables:
            self.tables[key] = self.types.tables(self.kinds[v])
        static, boundary, held, transient, less, layer = self.tables[key]
        with np.errstate(invalid="ignore"):
            found = peak_of(static, boundary, held, transient, samples, window, largest)
            if again and self.problem.allow_recompute:
                found = np.minimum(found, peak_of(static, boundary, less, layer, samples, window, largest))
        return np.where(np.isfinite(static), found, np.inf)

    def least(self, v: int) -> Array:
        """The least bytes that a stage with each layer [L] takes on kind v, with one sample: of the layer alone, or where others
        spare it a boundary, or the room of a stage that only runs forward, of it with them."""
        peak = np.minimum.accumulate(np.minimum.accumulate(self.peak(v, 1, 1, 1), axis=0)[:, ::-1], axis=1)[:, ::-1]
        return peak[np.arange(self.L), np.arange(1, self.L + 1)]


def samples_of(pipelines: list[Packed]) -> int:
    """All samples that these hold."""
    return sum(x.samples for x in pipelines)
