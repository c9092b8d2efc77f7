"""All pipelines of one composition and load that could be part of a plan faster than a threshold, priced
exactly.

Stages are put on from the last to the first, all partial pipelines at once (numpy rows), each with its bound
g and round trip u (see `_floors`). A row is dropped when what it has, and the least that the layers and
devices that are left must add, reaches the threshold. What is left after the first stage is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._batch import Durations, Index, Pipelines, ready_times
from hetpipe.partitioners._floors import Hops, hops, wait, without
from hetpipe.partitioners._space import Array, Counts, Family, Load, Space, StageTables, depth_of


class Found(NamedTuple):
    """Pipelines below the threshold; `dropped` is the least bound among rows given up for want of room (else
    infinite)."""

    pipelines: Pipelines
    dropped: float


class Rows(NamedTuple):
    """Partial pipelines: kinds and cuts from the last stage backward, devices used [N, K], g, u, longest
    optimizer, bound."""

    kinds: Index
    cuts: Index
    used: Index
    g: Array
    u: Array
    optimizer: Array
    bound: Array

    def chunks(self, size: int) -> Iterator[Rows]:
        """The rows, least bound first, some at a time."""
        order = np.argsort(self.bound, kind="stable")
        for at in range(0, len(order), size):
            yield Rows._make(column[order[at : at + size]] for column in self)


class Prefixes(NamedTuple):
    """Of the first stages, by devices used (mixed-radix index) and end layer, [C, L + 1]: least time once
    through, and least bound from a stage's work, both with stage 0's gradient sums."""

    through: Array
    work: Array


class Enumeration:
    """One composition, family, load and replica count."""

    def __init__(self, space: Space, comp: Counts, family: Family, load: Load, R: int) -> None:
        self.space, self.comp, self.family, self.load, self.R = space, comp, family, load, R
        self.n = sum(comp)
        self.kinds = [int(k) for k in np.flatnonzero(comp)]
        self.links: Hops = hops(space, (load,))
        self.both, self.queue = self.links.both, self.links.all[0]
        self.least_hop = (
            np.where(space.link_ids[:, :, None] >= 0, self.both, np.inf).min(axis=(0, 1))
            if self.n > 1
            else np.zeros(space.L + 1)
        )
        self.radix = np.cumprod([1, *(c + 1 for c in comp[:-1])])

    def stage(self, k: int, place: int) -> StageTables:
        """This load's tables, [1, lo, hi]."""
        return self.space.stage(k, place, self.family, (self.load,))

    def prefixes(self) -> Prefixes:
        """Bounds on the stages before a suffix, for every part of the composition."""
        shape = (int(self.radix[-1]) * (self.comp[-1] + 1), self.space.L + 1)
        through, work = np.full(shape, np.inf), np.full(shape, np.inf)
        parts = sorted(np.ndindex(*(c + 1 for c in self.comp)), key=sum)
        for part in parts[1:-1] if self.n > 1 else []:
            row, place = int(np.dot(part, self.radix)), self.n - sum(part) + 1
            for k in (k for k in self.kinds if part[k]):
                stage = self.stage(k, place)
                if place == self.n:
                    sums = self.space.sum_floor(k, self.R)[0]
                    t, w = stage.through[0, 0] + sums, stage.work[0, 0] + sums
                else:
                    before = int(np.dot(without(part, k), self.radix))
                    start = through[before] + self.least_hop
                    t = (start[:, None] + stage.through[0]).min(axis=0)
                    w = np.maximum(work[before][:, None], start[:, None] + stage.work[0]).min(axis=0)
                through[row], work[row] = np.minimum(through[row], t), np.minimum(work[row], w)
        return Prefixes(through, work)

    def rows(self, threshold: float, limit: int) -> tuple[Rows, float]:
        """Complete pipelines with a bound below the threshold, at most `limit` partial ones at a time."""
        K, L = self.space.K, self.space.L
        prefixes = self.prefixes()
        rows = Rows(
            np.zeros((1, 0), np.int64),
            np.full((1, 1), L),
            np.zeros((1, K), np.int64),
            *(np.zeros(1) for _ in range(4)),
        )
        dropped = np.inf
        for place in range(1, self.n + 1):
            parts = [self._grow(rows, k, place, threshold, prefixes) for k in self.kinds]
            rows = Rows._make(np.concatenate(column) for column in zip(*parts, strict=True))
            if len(rows.g) > limit:
                order = np.argsort(rows.bound, kind="stable")
                dropped = min(dropped, float(rows.bound[order[limit]]))
                rows = Rows._make(column[order[:limit]] for column in rows)
            if not len(rows.g):
                break
        return rows, dropped

    def _grow(self, rows: Rows, k: int, place: int, threshold: float, prefixes: Prefixes) -> Rows:
        """The rows with one more stage on kind k before them."""
        space, last = self.space, place == self.n
        rows = Rows._make(column[rows.used[:, k] < self.comp[k]] for column in rows)
        hi = rows.cuts[:, -1]
        stage = self.stage(k, place)
        starts = slice(0, 1) if last else slice(1, space.L)
        work, through = stage.work[0].T[hi, starts], stage.through[0].T[hi, starts]  # [N, lo]
        g, u = work, through
        if place > 1:
            j = rows.kinds[:, -1]
            away = self.both[k, j, hi] + rows.u
            onward = np.maximum(self.both[k, j, hi] + rows.g, self.queue[k, j, hi] + rows.u)
            depth = depth_of(self.family, place, self.load.m)
            idle = wait(
                away[:, None],
                stage.forward.T[hi, starts],
                stage.backward[0].T[hi, starts],
                depth,
                self.load.m,
            )
            g, u = np.maximum(work + idle, through + onward[:, None]), through + away[:, None]
        optimizer = np.maximum(rows.optimizer[:, None], space.optimizer(k).T[hi, starts])
        if last:
            bound = g + space.sum_floor(k, self.R).T[hi, starts] + optimizer
        else:
            bound = self._completed(g, rows.used, k, prefixes) + optimizer
        bound = np.maximum(bound, rows.bound[:, None])
        i, lo = np.nonzero(bound < threshold)
        start = lo + (0 if last else 1)
        used = rows.used[i]
        used[:, k] += 1
        kinds = np.column_stack([rows.kinds[i], np.full(len(i), k)])
        return Rows(
            kinds,
            np.column_stack([rows.cuts[i], start]),
            used,
            g[i, lo],
            u[i, lo],
            optimizer[i, lo],
            bound[i, lo],
        )

    def _completed(self, g: Array, used: Index, k: int, prefixes: Prefixes) -> Array:
        """What the stages before must add at least to suffixes of g seconds [N, lo ≥ 1] that begin on kind k."""
        used = used.copy()
        used[:, k] += 1
        left, starts = (np.array(self.comp) - used) @ self.radix, slice(1, self.space.L)
        after = g + prefixes.through[left, starts] + self.least_hop[starts]
        whole: Array = np.maximum(after, prefixes.work[left, starts])
        return whole

    def price(self, rows: Rows) -> Pipelines:
        """Simulate complete rows: [K, n] stages in order, first to last."""
        space, load, n = self.space, self.load, self.n
        kinds, cuts = rows.kinds[:, ::-1], rows.cuts[:, ::-1]
        lo, hi = cuts[:, :-1], cuts[:, 1:]
        recompute, sums = np.zeros(kinds.shape, dtype=bool), np.zeros(kinds.shape)
        for k in self.kinds:
            at = kinds == k
            sums[at] = space.sum_floor(k, self.R)[lo[at], hi[at]]
            for s in range(n):
                ends = lo[at[:, s], s], hi[at[:, s], s]
                recompute[at[:, s], s] = self.stage(k, n - s).recompute[0][ends]
        full, last = (self._durations(size, kinds, cuts, recompute) for size in (load.b, load.q or load.b))
        forward, backward, occupied = ((a, b) for a, b in zip(full[:3], last[:3], strict=True))
        times = Durations(forward, backward, occupied, full[3])
        depths = tuple(depth_of(self.family, n - s, load.m) for s in range(n))
        ready = ready_times(times, depths, load.m).T
        bound = (ready + sums).max(axis=1) + rows.optimizer
        return Pipelines(
            kinds, cuts, np.tile(depths, (len(kinds), 1)), recompute, ready, rows.optimizer, bound
        )

    def _durations(
        self, size: int, kinds: Index, cuts: Index, recompute: NDArray[np.bool_]
    ) -> tuple[Array, Array, Array, Array]:
        """Forward and backward [n, K], occupied links and latency [n − 1, K], for one size; summed in
        the order of `Costs.stage_seconds`: (backward + recomputed forward) + overhead."""
        space, n = self.space, self.n
        forward, backward = np.zeros((n, len(kinds))), np.zeros((n, len(kinds)))
        extra = space.problem.cluster.runtime_overhead.action_seconds
        for k in self.kinds:
            prefix_f, prefix_b = space.costs.time_prefix(space.kinds[k].type, size)
            at = (kinds == k).T
            lo, hi = cuts[:, :-1].T[at], cuts[:, 1:].T[at]
            f = prefix_f[hi] - prefix_f[lo]
            forward[at] = f + extra
            backward[at] = prefix_b[hi] - prefix_b[lo] + np.where(recompute.T[at], f, 0.0) + extra
        wire, delay = space.transfer(size)
        a, b = kinds[:, :-1].T, kinds[:, 1:].T
        occupied, latency = wire[a, b, cuts[:, 1:-1].T], delay[a, b]
        if space.problem.cluster.runtime_overhead.overlap_transfers:
            return forward, backward, occupied, latency
        taken = np.zeros_like(forward)  # where transfers block, they are part of the actions at both ends
        for s in range(n - 1):
            taken[s : s + 2] += occupied[s]
            taken[s : s + 2] += latency[s]
        return forward + taken, backward + taken, np.zeros_like(occupied), np.zeros_like(latency)


def priced(
    space: Space, comp: Counts, family: Family, load: Load, R: int, threshold: float, limit: int
) -> Found:
    """All pipelines whose bound is below the threshold, simulated; least bound first."""
    enumeration = Enumeration(space, comp, family, load, R)
    rows, dropped = enumeration.rows(threshold, limit)
    if not len(rows.g):
        return Found(empty(enumeration.n), dropped)
    chunks = [enumeration.price(chunk) for chunk in rows.chunks(4096)]
    found = Pipelines(*map(np.concatenate, zip(*chunks, strict=True)))
    found = found.pick(found.bound < threshold)
    return Found(found.pick(np.argsort(found.bound, kind="stable")), dropped)


def empty(n: int) -> Pipelines:
    """No pipelines of n stages."""
    whole, flags, real = np.zeros((0, n), np.int64), np.zeros((0, n), bool), np.zeros((0, n))
    return Pipelines(whole, np.zeros((0, n + 1), np.int64), whole, flags, real, np.zeros(0), np.zeros(0))
