"""What a pipeline of so many samples takes at least, as the arrays of `_relaxed`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._relaxed import Load, Memory
from hetpipe.partitioners._space import allowed_families, measured_sizes
from hetpipe.partitioners._types import Types

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Demand:
    """Of the pipelines of one problem."""

    def __init__(self, types: Types) -> None:
        self.types, self.problem, self.L = types, types.problem, types.L
        runtime = self.problem.cluster.runtime_overhead
        self.more, self.blocking = runtime.action_seconds, not runtime.overlap_transfers
        self.gpipe = allowed_families(self.problem) == ("gpipe",)
        self.sizes, large = list[int](), list[set[int]]()
        for b in measured_sizes(self.problem):  # with those of the whole batch or more it is one micro-batch
            there = set(self.usable(b).tolist())
            if there and (b < self.problem.global_batch or not any(there <= others for others in large)):
                self.sizes.append(b)
                large += [there] * (b >= self.problem.global_batch)

    @kept
    def usable(self, b: int) -> Index:
        """Kinds that were measured at b."""
        return np.array(
            [v for v, kind in enumerate(self.types.kinds) if b in self.types.sizes_of(kind)], dtype=np.int64
        )

    @cached_property
    def _least(self) -> Array:
        """The least seconds of a sample in each layer on each kind [V, L], in micro-batches of any size."""
        kinds = enumerate(self.types.kinds)
        each = [[self.types.layer_times(v, x, x).sum(axis=0) / x for x in (1, *self.types.sizes_of(kind))] for v, kind in kinds]
        return np.array([np.min(rows, axis=0) for rows in each])

    def cheapest_sample(self, prices: Array) -> float:
        """The least price of all seconds that a sample takes, at a price for each kind's second [V]."""
        return float((prices[:, None] * self._least).min(axis=0).sum())

    @kept
    def _times(self, b: int, size: int) -> Array:
        """The least forward and backward of all layers before each [2, V, L + 1] of `size` to b samples, on kinds that were
        measured at b."""
        if not size:
            return np.zeros((2, len(self.usable(b)), self.L + 1))
        each = [self.types.layer_times(v, size, b) for v in self.usable(b).tolist()]
        return _prefixes(each)

    @kept
    def memory(self, b: int) -> Memory:
        """Of the kinds that were measured at b. (A peak is a whole number of bytes, rounded.)"""
        usable = self.usable(b).tolist()
        limits = np.array([self.types.limit[self.types.at[v]] + 1.0 for v in usable])
        tables = np.ascontiguousarray(np.stack([self.types.memory(v) for v in usable]).transpose(0, 2, 3, 1))
        return Memory(tables, limits, self.problem.allow_recompute)

    @kept
    def _longest(self, b: int) -> Array:
        """The most that a micro-batch of b samples or fewer takes, as `_times`."""
        kinds = [(v, self.types.sizes_of(self.types.kinds[v])) for v in self.usable(b).tolist()]
        layers = [[np.diff(self.types.times(v, x)) for x in sizes if x <= b] for v, sizes in kinds]
        each = [np.max(rows, axis=0) for rows in layers]
        return _prefixes(each)

    def load(self, b: int, low: int, high: int, nodes: bool) -> Load:
        """Pipelines of `low` to `high` samples in micro-batches of b: m = ⌊low / b⌋ full ones, and one of q = low mod b samples
        or more. The first forward is of b samples, or of q where m = 0; the last backward of q or more, and where `high` is not
        `low` and m > 0, of any number. If `nodes` do not matter, all goes over the best link there is."""
        m, q = divmod(low, b)
        first = b if m else q
        last = first if not m else (q or b) if low == high else 1
        full, rest, begin, end = (self._times(b, size) for size in (b, q, first, last))
        links = [self.types.transfer(size) for size in (first, last)]
        hops = [sum(link[where].sum(axis=0) for link in links) for where in (0, 1)]
        wires, actions = [np.zeros_like(hop) for hop in hops], m + (q > 0)
        for size, count in ((b, m), (q, 1)):
            for where, link in enumerate(self.types.transfer(size) if size and count else ()):
                wires[where] += count * (link.sum(axis=0) if self.blocking else link[0])
        if not nodes:
            hops, wires = ([np.minimum(x, y.min(axis=(0, 1))), np.full((1, 1, self.L + 1), np.inf)] for x, y in (hops, wires))
        work = m * full + rest
        beyond = [np.diff(x.sum(axis=0)).min(axis=0)[::-1].cumsum()[::-1] for x in (begin, end)]
        return Load(
            work=work.sum(axis=0), backward=work[1], again=work[0], once=begin[0] + end[1], once_again=end[0], ahead=begin[0],
            work_more=2 * self.more * actions, once_more=2 * self.more, behind=np.concatenate([beyond, np.zeros((2, 1))], axis=1),
            longest=self._longest(b), hiding=(rest if q else full) * self.problem.sums_early,
            hop=hops[0], wire=wires[0], hop_inside=hops[1], wire_inside=wires[1], b=b, samples=low,
        )  # fmt: skip


def _prefixes(each: Sequence[Array]) -> Array:
    """Sums of all layers before each [2, V, L + 1] of [V][2, L]."""
    found = np.concatenate([np.zeros((len(each), 2, 1)), np.cumsum(each, axis=2)], axis=2).swapaxes(0, 1)
    return np.ascontiguousarray(found)  # else loops are compiled once more
