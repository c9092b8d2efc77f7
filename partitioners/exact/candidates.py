"""All pipelines of one composition that could be part of a plan faster than a threshold, priced exactly.

Stages are put on from the last to the first, all partial pipelines of all loads and depth families at once
(numpy rows), each with its bound g and round trip u (see `composition_bounds`). A row is dropped when what it has, and the
least that the layers and devices that are left must add, reaches the threshold. What is left after the first
stage is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.compositions.composition_bounds import Hops, first_sums, hops, idle, without
from hetpipe.partitioners.exact.batch import Index, PricedPipelines
from hetpipe.partitioners.exact.pricing import ROWS, simulated_pipelines
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Family, Load, Space, StageTables
from hetpipe.planning.partition import never

SMALL = np.int16  # of rows, of which there may be millions: kinds, layers and numbers of stages


class Variant(NamedTuple):
    """What a pipeline is given, and its family of warm-up depths."""

    family: Family
    load: Load


class Listing(NamedTuple):
    """Pipelines below the threshold; `dropped` is the least bound among rows given up for want of room (else
    infinite)."""

    pipelines: PricedPipelines
    dropped: float


class PartialPipelines(NamedTuple):
    """Partial pipelines: variant [N], kinds and cuts from the last stage backward, stages used [N, K], g, u, longest
    optimizer, bound."""

    variant: Index
    kinds: Index
    cuts: Index
    used: Index
    g: Array
    u: Array
    optimizer: Array
    bound: Array

    def pick(self, rows: Index | NDArray[np.bool_]) -> PartialPipelines:
        """The partial pipelines of some rows."""
        return PartialPipelines._make(column[rows] for column in self)

    def chunks(self, size: int) -> Iterator[PartialPipelines]:
        """The rows, least bound first, some at a time."""
        order = np.argsort(self.bound, kind="stable")
        for at in range(0, len(order), size):
            yield self.pick(order[at : at + size])


class Prefixes(NamedTuple):
    """Bounds on the first stages, by stages used (mixed-radix index), variant and end layer, [C, V, L + 1]: least time once
    through, and least bound from a stage's work, both with stage 0's gradient sums."""

    through: Array
    work: Array


class Enumeration:
    """One composition and replica count; `variants` in the order of their families."""

    def __init__(self, space: Space, comp: Counts, variants: Sequence[Variant], R: int) -> None:
        self.space, self.comp, self.R = space, comp, R
        self.variants = sorted(variants, key=lambda v: v.family)
        self.n = sum(comp)
        self.kinds = [int(k) for k in np.flatnonzero(comp)]
        self.m = np.array([v.load.m for v in self.variants], dtype=np.float64)
        if self.n > 1:
            self.links: Hops = hops(space, [v.load for v in self.variants])
            used = np.ix_(range(len(self.variants)), self.kinds, self.kinds)
            self.least_hop = self.links.each[used].min(axis=(1, 2))  # [V, L + 1]
        self.radix = np.cumprod([1, *(c + 1 for c in comp[:-1])])
        self._stages: dict[tuple[int, int], StageTables] = {}

    def families(self) -> list[tuple[Family, slice]]:
        """Each family with its variants."""
        found: list[tuple[Family, slice]] = []
        for i, variant in enumerate(self.variants):
            if found and found[-1][0] == variant.family:
                found[-1] = variant.family, slice(found[-1][1].start, i + 1)
            else:
                found.append((variant.family, slice(i, i + 1)))
        return found

    def stage(self, k: int, place: int) -> StageTables:
        """Tables of all variants, [V, lo, hi]."""
        if (k, place) not in self._stages:
            parts = []
            for family, rows in self.families():
                loads = [v.load for v in self.variants[rows]]
                tables = self.space.tables(k, place, family, loads)
                shape = (len(loads), *tables.work.shape[1:])
                parts.append([np.broadcast_to(table, shape) for table in tables])
            self._stages[k, place] = StageTables(*map(np.concatenate, zip(*parts, strict=True)))
        return self._stages[k, place]

    @memoized
    def sums(self, k: int) -> Array:
        """What the gradient sums of stages [0, hi) take after their last backward at least, without and with recompute [2, V,
        L + 1]."""
        sizes, which = np.unique([v.load.last for v in self.variants], return_inverse=True)
        rows = [[first_sums(self.space, k, self.R, size, again) for size in sizes.tolist()] for again in (False, True)]
        found: Array = np.array(rows)[:, which]
        return found

    def waits(self, k: int, place: int, u: Array, at: Index, starts: slice, hi: Index) -> Array:
        """Idle seconds of a stage on kind k [N, lo] for rows of variants `at` that wait for u seconds [N]."""
        stage = self.stage(k, place)
        found = np.empty((len(at), len(range(self.space.L + 1)[starts])))
        for family, variants in self.families():
            rows = np.flatnonzero((at >= variants.start) & (at < variants.stop))
            v, ends = at[rows], hi[rows]
            tables = stage._replace(
                forward=stage.forward[v, starts, ends], backward=stage.backward[v, starts, ends]
            )
            returns = self.space.returns[ends, None]
            found[rows] = idle(self.space, family, u[rows, None], tables, place, self.m[v, None], returns)
        return found

    def prefixes(self) -> Prefixes:
        """Bounds on the stages before a suffix, for every part of the composition."""
        shape = (int(self.radix[-1]) * (self.comp[-1] + 1), len(self.variants), self.space.L + 1)
        through, work = np.full(shape, np.inf), np.full(shape, np.inf)
        parts = sorted(np.ndindex(*(c + 1 for c in self.comp)), key=sum)
        for part in parts[1:-1] if self.n > 1 else []:
            row, place = int(np.dot(part, self.radix)), self.n - sum(part) + 1
            for k in (k for k in self.kinds if part[k]):
                stage = self.stage(k, place)
                self.space.meter.count(stage.work.size)
                if place == self.n:
                    plain, again = self.sums(k)
                    sums = np.where(stage.recompute[:, 0], again, plain)
                    t, w = stage.through[:, 0] + sums, stage.work[:, 0] + sums
                else:
                    before = int(np.dot(without(part, k), self.radix))
                    start = (through[before] + self.least_hop)[:, :, None]
                    t = (start + stage.through).min(axis=1)
                    w = np.maximum(work[before][:, :, None], start + stage.work).min(axis=1)
                through[row], work[row] = np.minimum(through[row], t), np.minimum(work[row], w)
        return Prefixes(through, work)

    def rows(self, threshold: float, limit: int, late: Callable[[], bool] = never) -> tuple[PartialPipelines, float]:
        """Complete pipelines with a bound below the threshold, at most `limit` partial ones at a time; none when it is
        `late`."""
        K, L, V = self.space.K, self.space.L, len(self.variants)
        prefixes = self.prefixes()
        rows = PartialPipelines(
            np.arange(V),
            np.zeros((V, 0), SMALL),
            np.full((V, 1), L, SMALL),
            np.zeros((V, K), SMALL),
            *(np.zeros(V) for _ in range(4)),
        )
        dropped = np.inf
        for place in range(1, self.n + 1):
            if late():
                return rows.pick(np.zeros(0, np.int64)), min(dropped, float(rows.bound.min()))
            parts = [self._grow(rows, k, place, threshold, prefixes) for k in self.kinds]
            rows = PartialPipelines._make(np.concatenate(column) for column in zip(*parts, strict=True))
            if len(rows.g) > limit:
                order = np.argpartition(rows.bound, limit)
                dropped = min(dropped, float(rows.bound[order[limit]]))
                rows = rows.pick(np.sort(order[:limit]))
            if not len(rows.g):
                break
        return rows, dropped

    def _grow(self, rows: PartialPipelines, k: int, place: int, threshold: float, prefixes: Prefixes) -> PartialPipelines:
        """The rows with one more stage on kind k before them."""
        space, last = self.space, place == self.n
        rows = rows.pick(rows.used[:, k] < self.comp[k])
        v, hi = rows.variant, rows.cuts[:, -1]
        space.meter.count(len(v) * space.L)
        stage = self.stage(k, place)
        starts = slice(0, 1) if last else slice(1, space.L)
        work, through = stage.work[v, starts, hi], stage.through[v, starts, hi]  # [N, lo]
        g, u = work, through
        if place > 1:
            j = rows.kinds[:, -1]
            both = self.links.each[v, k, j, hi]
            away = both + rows.u
            onward = np.maximum(both + rows.g, self.links.all[v, k, j, hi] + rows.u)
            waited = self.waits(k, place, away, v, starts, hi)
            g, u = np.maximum(work + waited, through + onward[:, None]), through + away[:, None]
        optimizer = np.maximum(rows.optimizer[:, None], space.optimizer(k).T[hi, starts])
        if last:
            sums = self.sums(k)[stage.recompute[v, 0, hi].astype(int), v, hi]
            bound = g + sums[:, None] + optimizer
        else:
            bound = self._completed(g, v, rows.used, k, prefixes) + optimizer
        bound = np.maximum(bound, rows.bound[:, None])
        i, lo = np.nonzero(bound < threshold)
        start = lo + (0 if last else 1)
        used = rows.used[i]
        used[:, k] += 1
        kinds = np.column_stack([rows.kinds[i], np.full(len(i), k, SMALL)])
        return PartialPipelines(
            v[i],
            kinds,
            np.column_stack([rows.cuts[i], start.astype(SMALL)]),
            used,
            g[i, lo],
            u[i, lo],
            optimizer[i, lo],
            bound[i, lo],
        )

    def _completed(self, g: Array, v: Index, used: Index, k: int, prefixes: Prefixes) -> Array:
        """What the stages before must add at least to suffixes of g seconds [N, lo ≥ 1] that begin on kind k."""
        used = used.copy()
        used[:, k] += 1
        left, starts = (np.array(self.comp) - used) @ self.radix, slice(1, self.space.L)
        after = g + prefixes.through[left, v, starts] + self.least_hop[v, starts]
        whole: Array = np.maximum(after, prefixes.work[left, v, starts])
        return whole

    def price(self, rows: PartialPipelines) -> PricedPipelines:
        """Simulate complete rows."""
        parts = []
        for family, variants in self.families():
            mine = rows.pick((rows.variant >= variants.start) & (rows.variant < variants.stop))
            if not len(mine.g):
                continue
            recompute = np.zeros(mine.kinds.shape, dtype=bool)
            for k in self.kinds:
                for place in range(1, self.n + 1):
                    at = np.flatnonzero(mine.kinds[:, place - 1] == k)
                    where = mine.variant[at], mine.cuts[at, place], mine.cuts[at, place - 1]
                    recompute[at, place - 1] = self.stage(k, place).recompute[where]
            loads = [self.variants[v].load for v in mine.variant.tolist()]
            kinds, cuts = (x[:, ::-1].astype(np.int64) for x in (mine.kinds, mine.cuts))
            parts.append(simulated_pipelines(self.space, family, loads, kinds, cuts, recompute[:, ::-1], self.R))
        return concatenated(parts, self.n)


def concatenated(parts: Sequence[PricedPipelines], n: int) -> PricedPipelines:
    """All pipelines of these lists, one list after the other."""
    some = [part for part in parts if part.number]
    return PricedPipelines(*map(np.concatenate, zip(*some, strict=True))) if some else empty(n)


def priced(
    space: Space,
    comp: Counts,
    variants: Sequence[Variant],
    R: int,
    threshold: float,
    limit: int,
    late: Callable[[], bool] = never,
) -> Listing:
    """All pipelines of these variants whose bound is below the threshold, simulated; least bound first. Rows that one
    could leave out are kept only if there is room."""
    if not variants:
        return Listing(empty(sum(comp)), np.inf)
    enumeration = Enumeration(space, comp, variants, R)
    rows, dropped = enumeration.rows(threshold, limit, late)
    found = concatenated([enumeration.price(chunk) for chunk in rows.chunks(ROWS)], enumeration.n)
    found = found.pick(found.bound < threshold)
    return Listing(found.pick(np.argsort(found.bound, kind="stable")), dropped)


def empty(n: int) -> PricedPipelines:
    """No pipelines of n stages."""
    whole, flags, real = np.zeros((0, n), np.int64), np.zeros((0, n), bool), np.zeros((0, n))
    load, ends = np.zeros((0, 2), np.int64), np.zeros((0, n + 1), np.int64)
    return PricedPipelines(load, whole, ends, whole, flags, real, np.zeros((0, 0)), np.zeros(0))
