"""What every stage would cost on every kind of device, as tables over its layers [lo, hi)."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._kinds import Array, Kinds
from hetpipe.partitioners._space import allowed_families, measured_sizes, memory_tables
from hetpipe.spec.profile import Measurement

MASKS = 6  # classes up to which it is told apart which of them are behind a stage


def sizes_of_use(kinds: Kinds) -> list[int]:
    """Measured micro-batch sizes. With those of the whole batch or more it is one micro-batch: of these, one is left out
    where one before was measured on all of its kinds."""
    batch, found = kinds.problem.global_batch, list[int]()
    large: list[set[int]] = []
    for b in measured_sizes(kinds.problem):
        there = {v for v, kind in enumerate(kinds.kinds) if b in kinds.sizes_of(kind)}
        if b < batch or not any(there <= others for others in large):
            found.append(b)
            large += [there] * (b >= batch)
    return found


class Stages:
    """Tables [sizes, V, L + 1, L + 1] of a micro-batch of b samples, infinite where hi ≤ lo or b was not measured.

    `work` is forward + backward, `forward` alone; `longest_forward` and `longest_backward` that of any micro-batch
    of at most b samples. `smaller` [knots, V, L + 1, L + 1, 2] is the least forward and backward of any micro-batch of at least
    `knots` samples; between two of them it is linear. A stage with `depth` micro-batches in flight of a replica of n samples
    fits if its samples in flight are at most

        room − n · boundary − min(b, n) · transient        ([2] first: without and with recompute).

    `least` [sizes, L + 1, 2]: the least time once through layers [0, lo) on any kinds, forward and backward; `least_smaller`
    [knots, L + 1, 2] that of at least so many samples.
    `shorter` [sizes]: the least part, per sample, of a transfer that one of fewer samples takes.
    `hop` and `wire` [sizes, K, masks, L + 1]: both ways of a transfer, and how long it occupies the link one way,
    from a stage of a class to the nearest class of those in a mask."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, problem = kinds, kinds.problem
        self.L, self.overhead = kinds.L, problem.cluster.runtime_overhead.action_seconds
        self.families = allowed_families(problem)
        self.sizes = sizes_of_use(kinds)
        self.above = np.triu(np.ones((self.L + 1, self.L + 1), dtype=bool), 1)
        shape = (len(self.sizes), kinds.V, self.L + 1, self.L + 1)
        self.work, self.forward, self.backward = np.full((3, *shape), np.inf)
        self.longest_forward, self.longest_backward = np.full(shape, np.inf), np.full(shape, np.inf)
        measured = {x for kind in kinds.kinds for x in kinds.sizes_of(kind)}
        self.knots = sorted(x for x in {1, *measured} if x <= self.sizes[-1])
        self.smaller = np.full((len(self.knots), *shape[1:], 2), np.inf)
        self.optimizer = np.zeros(shape[1:])
        for v in range(kinds.V):
            self._times(v)
        self.room, self.boundary, self.transient = self._memory()
        self.least = self._through(np.stack([self.forward, self.backward], axis=-1))
        self.least_smaller = self._through(self.smaller)
        self.shorter = np.array([kinds.smaller_transfer(b) for b in self.sizes])
        self.masked = kinds.K <= MASKS
        self.hop, self.wire = self._hops()

    def _span(self, values: Array, overhead: float = 0.0) -> Array:
        prefix = np.concatenate([[0.0], np.cumsum(values)])
        found: Array = np.where(self.above, prefix[None, :] - prefix[:, None] + overhead, np.inf)
        return found

    def _times(self, v: int) -> None:
        kind = self.kinds.kinds[v]
        measurement = self.kinds.problem.profile.measurement(kind.type, kind.degree)
        measured = measurement.microbatch_sizes
        self.optimizer[v] = np.where(self.above, self._span(np.array(measurement.optimizer_seconds)), 0.0)
        for i, b in enumerate(self.sizes):
            if b not in measured:
                continue
            # Linear between measured sizes, so that the most is at one of them, or below the first.
            each = [measurement.times(x) for x in {1, *(x for x in measured if x <= b)}]
            forward, backward = (self._span(t, self.overhead) for t in measurement.times(b))
            self.forward[i, v], self.backward[i, v], self.work[i, v] = forward, backward, forward + backward
            self.longest_forward[i, v] = self._span(np.max([f for f, _ in each], axis=0), self.overhead)
            self.longest_backward[i, v] = self._span(np.max([g for _, g in each], axis=0), self.overhead)
        known = [x for x in self.knots if x <= measured[-1]]
        for side in (0, 1):
            layers = np.array([self._linear(measurement, x)[side] for x in known])
            for i, row in enumerate(np.minimum.accumulate(layers[::-1])[::-1]):
                self.smaller[i, v, :, :, side] = self._span(row, self.overhead)

    @staticmethod
    def _linear(measurement: Measurement, size: int) -> tuple[Array, Array]:
        """Forward and backward seconds of each layer or less: below the first size also where the line is below zero, since a
        sum of lines is one."""
        first = measurement.microbatch_sizes[0]
        if size >= first:
            return measurement.times(size)
        (f, g), (f_next, g_next) = measurement.times(first), measurement.times(first + 1)
        return f - (first - size) * (f_next - f), g - (first - size) * (g_next - g)

    def _through(self, stages: Array) -> Array:
        """[N, L + 1, 2] of [N, V, L + 1, L + 1, 2]: the least time once through layers [0, lo) on any kinds."""
        layers = np.stack([stages[:, :, l, l + 1] for l in range(self.L)], axis=2).min(axis=1)  # noqa: E741
        layers[:, 1:] -= self.overhead  # one stage may have all of them
        return np.concatenate([np.zeros((len(stages), 1, 2)), np.cumsum(layers, axis=1)], axis=1)

    def _memory(self) -> tuple[Array, Array, Array]:
        room, boundary, transient = np.zeros((3, 2, self.kinds.V, self.L + 1, self.L + 1))
        known: dict[tuple[str, int], Array] = {}
        for v, kind in enumerate(self.kinds.kinds):
            key = (kind.type if kind.degree > 1 else "", kind.degree)
            if key not in known:
                known[key] = memory_tables(self.kinds.costs, self.L, kind.type, kind.degree)
            limit = self.kinds.classes[kind.at].limit + 1.0  # peaks are whole bytes, rounded
            for r, (static, buffers, held, passing) in enumerate(known[key]):
                held = np.maximum(held, 1e-9)
                room[r, v] = np.where(self.above, (limit - static) / held, -np.inf)
                boundary[r, v], transient[r, v] = buffers / held, passing / held
        if not self.kinds.problem.allow_recompute:
            room[1] = -np.inf
        return room, boundary, transient

    def _hops(self) -> tuple[Array, Array]:
        K = self.kinds.K
        groups = [[k for k in range(K) if mask >> k & 1] for mask in range(2**K)] if self.masked else []
        groups = groups or [[], list(range(K))]
        hop, wire = np.zeros((2, len(self.sizes), K, len(groups), self.L + 1))
        for i, b in enumerate(self.sizes):
            occupied, latency = self.kinds.transfer(b)
            for mask, group in enumerate(groups):
                if group:
                    wire[i, :, mask] = occupied[:, group].min(axis=1)
                    hop[i, :, mask] = 2 * (occupied + latency[:, :, None])[:, group].min(axis=1)
        return hop, wire

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """Kinds measured at each size, [sizes, V]."""
        found: NDArray[np.bool_] = np.isfinite(self.work[:, :, 0, self.L])
        return found
