"""Pipelines side by side: gradient sums and optimizers as in `hetpipe.simulator`, of many plans at once."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from hetpipe.partitioners._batch import Index, Pipelines
from hetpipe.partitioners._space import Array, Space, link_seconds


class Joint:
    """The step of plans put together from pipelines, as `simulate` has it: gradient sums and optimizers
    included."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.prefix = np.concatenate([[0.0], np.cumsum(space.untied)])
        layers = space.problem.profile.layers
        names = sorted({layer.tied for layer in layers if layer.tied is not None})
        self.tied = [[l for l, layer in enumerate(layers) if layer.tied == name] for name in names]  # noqa: E741
        self.tied_bytes = [float(layers[members[0]].tied_parameter_bytes) for members in self.tied]

    def step(self, parts: list[Pipelines]) -> Array:
        """Step seconds of the plans whose replica r is row i of parts[r], [K]."""
        free = [part.ready.copy() for part in parts]
        synced = np.maximum.reduce([part.ready.max(axis=1) for part in parts])
        layers = np.arange(self.space.L)
        holder = [(part.cuts[:, 1:-1, None] <= layers).sum(axis=1) for part in parts]  # [K, L]: layer's stage
        if len(parts) > 1:
            synced = self._segments(parts, holder, free, synced)
        for members, size in zip(self.tied, self.tied_bytes, strict=True):
            synced = self._tied(parts, holder, free, synced, members, size)
        step: Array = synced + np.maximum.reduce([part.optimizer for part in parts])
        return step

    def _segments(
        self, parts: list[Pipelines], holder: list[Index], free: list[Array], synced: Array
    ) -> Array:
        """Sums of the layers with the same owners in all replicas, from the last to the first."""
        K, L, R = parts[0].number, self.space.L, len(parts)
        end_of = np.full(K, L)
        for lo in range(L - 1, -1, -1):
            cut = np.zeros(K, dtype=bool) if lo else np.ones(K, dtype=bool)
            for h in holder if lo else []:
                cut |= h[:, lo] != h[:, lo - 1]
            size = self.prefix[end_of] - self.prefix[lo]
            end_of = np.where(cut, lo, end_of)
            rows = np.flatnonzero(cut & (size > 0))
            if not len(rows):
                continue
            stages = [h[rows, lo] for h in holder]
            start = np.maximum.reduce([f[rows, s] for f, s in zip(free, stages, strict=True)])
            owners = [part.kinds[rows, s] for part, s in zip(parts, stages, strict=True)]
            end = start + self._ring(owners, size[rows] / R) * (2 * (R - 1))
            for f, s in zip(free, stages, strict=True):
                f[rows, s] = end
            synced[rows] = np.maximum(synced[rows], end)
        return synced

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
        """The sum of one tied parameter over all devices that hold a member."""
        held = [np.zeros(part.kinds.shape, dtype=bool) for part in parts]
        for mask, h in zip(held, holder, strict=True):
            np.put_along_axis(mask, h[:, members], True, axis=1)
        mask, kinds = np.hstack(held), np.hstack([part.kinds for part in parts])
        count = mask.sum(axis=1)
        if count.max() < 2 or not self.space.links:
            return synced
        start = np.where(mask, np.hstack(free), -np.inf).max(axis=1)
        seconds = np.stack([link_seconds(link, size / np.maximum(count, 1)) for link in self.space.links])
        slowest, rows = np.zeros(len(count)), np.arange(len(count))
        for i, j in combinations(range(sum(part.kinds.shape[1] for part in parts)), 2):
            both = seconds[self.space.link_ids[kinds[:, i], kinds[:, j]], rows]
            slowest = np.where(mask[:, i] & mask[:, j], np.maximum(slowest, both), slowest)
        end = start + (2 * (count - 1) * slowest if size > 0 else 0.0)
        for f, part_mask in zip(free, held, strict=True):
            np.copyto(f, end[:, None], where=part_mask & (count > 1)[:, None])
        return np.where(count > 1, np.maximum(synced, end), synced)
