"""Pipelines side by side: gradient sums and optimizers as in `hetpipe.predict.simulator`, of many plans at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import lcm

import numpy as np

from hetpipe.partitioners._batch import Index, Pipelines
from hetpipe.partitioners._space import Array, Space
from hetpipe.partitioners._wires import link_seconds


class Joint:
    """The step of plans put together from pipelines, as `simulate` has it where nothing shares an adapter, gradient sums
    and optimizers included: else a lower bound. `free` is when each device can sum next, by replica [K, stages, devices of the
    stage]; those of one process all at once, after the last backward of them all."""

    def __init__(self, space: Space) -> None:
        self.space, self.one_process = space, space.problem.backend != "torch"
        self.costs = space.costs
        self.degrees = np.array([kind.degree for kind in space.kinds])
        L = np.zeros((space.K, 1))
        self.prefix = np.concatenate([L, np.cumsum(space.shards, axis=1)], axis=1)  # [K, L + 1]
        self.tied_prefix = np.concatenate([[0.0], np.cumsum(space.tied_bytes)])
        layers = space.problem.profile.layers
        names = sorted({layer.tied for layer in layers if layer.tied is not None})
        self.tied = [[l for l, layer in enumerate(layers) if layer.tied == name] for name in names]  # noqa: E741
        self.sizes = [float(layers[members[0]].tied_parameter_bytes) for members in self.tied]

    def step(self, parts: list[Pipelines]) -> Array:
        """Step seconds of the plans whose replica r is row i of parts[r], [K]."""
        self.space.meter.count(parts[0].number * self.space.L * len(parts))
        synced = np.maximum.reduce([part.ready.max(axis=1) for part in parts])
        if len(parts) > 1 or self.tied:
            most = int(self.degrees.max())
            ready = [part.ready for part in parts]
            if self.one_process:
                ready = [np.broadcast_to(own.max(axis=1, keepdims=True), own.shape) for own in ready]
            free = [np.repeat(own[:, :, None], most, axis=2) for own in ready]
            layers = np.arange(self.space.L)
            holder = [(part.cuts[:, 1:-1, None] <= layers).sum(axis=1) for part in parts]  # [K, L]: layer's stage
            if len(parts) > 1:
                synced = self._segments(parts, holder, free, synced)
            for members, size in zip(self.tied, self.sizes, strict=True):
                synced = self._tied(parts, holder, free, synced, members, size)
        step: Array = synced + np.maximum.reduce([part.optimizer for part in parts])
        return step

    def _segments(
        self, parts: list[Pipelines], holder: list[Index], free: list[Array], synced: Array
    ) -> Array:
        """Sums of the layers with the same owners in all replicas, from the last to the first."""
        K, L = parts[0].number, self.space.L
        end_of = np.full(K, L)
        for lo in range(L - 1, -1, -1):
            cut = np.zeros(K, dtype=bool) if lo else np.ones(K, dtype=bool)
            for h in holder if lo else []:
                cut |= h[:, lo] != h[:, lo - 1]
            rows = np.flatnonzero(cut)
            if not len(rows):
                continue
            stages = [h[rows, lo] for h in holder]
            kinds = [part.kinds[rows, s] for part, s in zip(parts, stages, strict=True)]
            hi = end_of[rows]
            held = np.maximum.reduce([self.prefix[k, hi] - self.prefix[k, lo] for k in kinds])
            size = held - (self.tied_prefix[hi] - self.tied_prefix[lo])
            end_of[rows] = lo
            some = np.flatnonzero(size > 0)
            for at in self._alike(kinds, some):
                where = [(rows[at], s[at]) for s in stages]
                ends = self._sum([k[at] for k in kinds], where, free, size[at])
                synced[rows[at]] = np.maximum(synced[rows[at]], ends)
        return synced

    def _alike(self, kinds: Sequence[Index], rows: Index) -> Iterator[Index]:
        """The rows by the degrees of their owners."""
        if self.degrees.max() == 1:
            yield rows
            return
        degrees = np.stack([self.degrees[k[rows]] for k in kinds], axis=1)
        unique, index = np.unique(degrees, axis=0, return_inverse=True)
        for i in range(len(unique)):
            yield rows[index.reshape(-1) == i]

    def _sum(
        self, kinds: list[Index], where: list[tuple[Index, Index]], free: list[Array], size: Array
    ) -> Array:
        """Sum so many bytes over stages of these kinds, one (rows, stage) for each replica of `free`; the shards apart
        (`hetpipe.predict.cost.shard_owners`). When the last sum ends, [rows]."""
        last = np.zeros(len(size))
        if not len(size):
            return last
        degrees = [int(self.degrees[k[0]]) for k in kinds]
        pieces, count = lcm(*degrees), len(kinds)
        seconds = np.where(size > 0, self._ring(kinds, size / pieces / count) * (2 * (count - 1)), 0.0)
        for j in range(pieces):
            shards = [j * t // pieces for t in degrees]
            start = np.maximum.reduce([f[r, s, i] for f, (r, s), i in zip(free, where, shards, strict=True)])
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
        parts: list[Pipelines],
        holder: list[Index],
        free: list[Array],
        synced: Array,
        members: list[int],
        size: float,
    ) -> Array:
        """The sum of one tied parameter over all devices that hold a member: rows by which stages these are."""
        held = [np.zeros(part.kinds.shape, dtype=bool) for part in parts]
        for mask, h in zip(held, holder, strict=True):
            np.put_along_axis(mask, h[:, members], True, axis=1)
        patterns, index = np.unique(np.hstack(held), axis=0, return_inverse=True)
        places = [(r, s) for r, part in enumerate(parts) for s in range(part.kinds.shape[1])]
        for i, pattern in enumerate(patterns):
            rows = np.flatnonzero(index.reshape(-1) == i)
            owners = [place for place, holds in zip(places, pattern.tolist(), strict=True) if holds]
            if len(owners) < 2:
                continue
            kinds = [parts[r].kinds[rows, s] for r, s in owners]
            for at in self._alike(kinds, np.arange(len(rows))):
                where = [(rows[at], np.full(len(at), s)) for _, s in owners]
                ends = self._sum(
                    [k[at] for k in kinds], where, [free[r] for r, _ in owners], np.full(len(at), size)
                )
                synced[rows[at]] = np.maximum(synced[rows[at]], ends)
        return synced
