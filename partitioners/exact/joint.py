"""Pipelines side by side: gradient sums and optimizers as in `hetpipe.predict.simulator`, of many plans at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import lcm

import numpy as np

from hetpipe.partitioners.exact.batch import Index, PricedPipelines
from hetpipe.partitioners.stage_kinds.space import Array, Space
from hetpipe.partitioners.stage_kinds.wires import link_seconds


class Joint:
    """The step of plans put together from pipelines, as `simulate` has it where nothing shares an adapter, gradient sums
    and optimizers included: else a lower bound. `free` is when each device has done the sums before, by replica [K, stages,
    devices of the stage]; those of one process begin all at once, after the last backward of them all."""

    def __init__(self, space: Space) -> None:
        self.space, self.one_process = space, space.problem.backend != "torch"
        self.costs = space.costs
        self.degrees = np.array([kind.degree for kind in space.kinds])
        self.most = np.inf if self.one_process else space.costs.bucket_bytes
        L = np.zeros((space.K, 1))
        self.prefix = np.concatenate([L, np.cumsum(space.shards, axis=1)], axis=1)  # [K, L + 1]
        self.tied_prefix = np.concatenate([[0.0], np.cumsum(space.problem.profile.tied_trained_bytes)])
        self.ties = space.problem.profile.ties

    def step(self, parts: list[PricedPipelines]) -> Array:
        """Step seconds of the plans whose replica r is row i of parts[r], [K]."""
        synced: Array = np.maximum.reduce([part.ready.max(axis=1) for part in parts])
        if len(parts) > 1 or self.ties:
            most = int(self.degrees.max())
            free = [np.zeros((*part.ready.shape, most)) for part in parts]
            if self.one_process:
                free = [own + part.ready.max(axis=1)[:, None, None] for own, part in zip(free, parts, strict=True)]
            holder = [part.holder for part in parts]  # [K, L]: layer's stage
            if len(parts) > 1:
                synced = self._segments(parts, holder, free, synced)
            for _, members, size in self.ties:
                synced = self._tied(parts, holder, free, synced, members, size)
        return synced

    def _segments(
        self, parts: list[PricedPipelines], holder: list[Index], free: list[Array], synced: Array
    ) -> Array:
        """Sums of the layers with the same owners in all replicas, from the last to the first, in buckets."""
        K, L = parts[0].number, self.space.L
        low, top = np.zeros(K, np.int64), np.zeros(K, np.int64)  # of the bucket that is open; none where top is 0

        def close(rows: Index) -> None:
            kinds = self._kinds(parts, holder, rows, low[rows])
            size = self._held(kinds, low[rows], top[rows])
            for at in self._alike(kinds, np.arange(len(rows))):
                some = rows[at]
                where = [(some, h[some, low[some]]) for h in holder]
                made = [part.made[some, low[some]] for part in parts]
                ends = self._sum([k[at] for k in kinds], where, free, made, size[at])
                synced[some] = np.maximum(synced[some], ends)
            top[rows] = 0

        for lo in range(L - 1, -1, -1):
            if lo < L - 1:
                cut = np.zeros(K, dtype=bool)
                for h in holder:
                    cut |= h[:, lo] != h[:, lo + 1]
                close(np.flatnonzero(cut & (top > 0)))
            rows = np.arange(K)
            kinds = self._kinds(parts, holder, rows, np.full(K, lo))
            some = self._held(kinds, np.full(K, lo), np.full(K, lo + 1)) > 0
            if not some.any():
                continue
            if self.most < self.prefix[:, -1].max():
                pieces = np.lcm.reduce([self.degrees[k] for k in kinds])
                over = some & (top > 0) & (self._held(kinds, np.full(K, lo), top) / pieces > self.most)
                close(np.flatnonzero(over))
            low[some], top[some & (top == 0)] = lo, lo + 1
        close(np.flatnonzero(top))
        return synced

    def _kinds(self, parts: list[PricedPipelines], holder: list[Index], rows: Index, layer: Index) -> list[Index]:
        """The kinds of the stages that hold a layer, in each of these rows."""
        return [part.kinds[rows, h[rows, layer]] for part, h in zip(parts, holder, strict=True)]

    def _held(self, kinds: list[Index], lo: Index, hi: Index) -> Array:
        """The bytes of layers [lo, hi) that stages of these kinds sum, as `Costs.summed_bytes` has them."""
        self.space.meter.count(2 * len(lo) * len(kinds))  # `_kinds` of them, too
        held = np.maximum.reduce([self.prefix[k, hi] - self.prefix[k, lo] for k in kinds])
        size: Array = held - (self.tied_prefix[hi] - self.tied_prefix[lo])
        return size

    def _alike(self, kinds: Sequence[Index], rows: Index) -> Iterator[Index]:
        """The rows by the degrees of their owners."""
        if self.degrees.max() == 1:
            yield rows
            return
        number, base = np.zeros(len(rows), np.int64), int(self.degrees.max()) + 1
        for k in kinds:
            number = number * base + self.degrees[k[rows]]
        for at in equal(number):
            yield rows[at]

    def _sum(
        self, kinds: list[Index], where: list[tuple[Index, Index]], free: list[Array], made: list[Array], size: Array
    ) -> Array:
        """Sum so many bytes over stages of these kinds, one (rows, stage) for each replica of `free`, which have `made` them; the
        shards apart (`hetpipe.spec.seats`). When the last sum ends, [rows]."""
        last = np.zeros(len(size))
        if not len(size):
            return last
        degrees = [int(self.degrees[k[0]]) for k in kinds]
        pieces, count = lcm(*degrees), len(kinds)
        self.space.meter.count(len(size) * (len(self.space.links) + count * pieces))
        seconds = np.where(size > 0, self._ring(kinds, size / pieces / count) * (2 * (count - 1)), 0.0)
        for j in range(pieces):
            shards = [j * t // pieces for t in degrees]
            start = np.maximum.reduce(made + [f[r, s, i] for f, (r, s), i in zip(free, where, shards, strict=True)])
            end = start + seconds
            for f, (r, s), i in zip(free, where, shards, strict=True):
                if self.one_process:
                    f[r] = end[:, None, None]
                else:
                    f[r, s, i] = end
            last = np.maximum(last, end)
        return last

    def _ring(self, owners: list[Index], size: Array) -> Array:
        """Seconds of one round over the slowest link of the owners' pairs, [rows]."""
        seconds = np.stack([link_seconds(link, size) for link in self.space.links])
        rows = np.arange(len(size))
        pairs = [seconds[self.space.link_ids[a, b], rows] for a, b in combinations(owners, 2)]
        slowest: Array = np.maximum.reduce(pairs)
        return slowest

    def _tied(
        self,
        parts: list[PricedPipelines],
        holder: list[Index],
        free: list[Array],
        synced: Array,
        members: Sequence[int],
        size: int,
    ) -> Array:
        """The sum of one tied parameter over all devices that hold a member: rows by which stages these are."""
        held = [np.zeros(part.kinds.shape, dtype=bool) for part in parts]
        for mask, h in zip(held, holder, strict=True):
            np.put_along_axis(mask, h[:, members], True, axis=1)
        patterns = np.hstack(held)
        places = [(r, s) for r, part in enumerate(parts) for s in range(part.kinds.shape[1])]
        for rows in equal(patterns @ (1 << np.arange(len(places)))):
            owners = [place for place, holds in zip(places, patterns[rows[0]].tolist(), strict=True) if holds]
            if len(owners) < 2:
                continue
            kinds = [parts[r].kinds[rows, s] for r, s in owners]
            for at in self._alike(kinds, np.arange(len(rows))):
                where = [(rows[at], np.full(len(at), s)) for _, s in owners]
                made = []
                for r, s in owners:
                    lowest = np.array(members)[(holder[r][rows[at]][:, members] == s).argmax(axis=1)]
                    made.append(parts[r].made[rows[at], lowest])
                ends = self._sum(
                    [k[at] for k in kinds], where, [free[r] for r, _ in owners], made, np.full(len(at), size)
                )
                synced[rows[at]] = np.maximum(synced[rows[at]], ends)
        return synced


def equal(numbers: Index) -> list[Index]:
    """Where each of the different numbers is."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
