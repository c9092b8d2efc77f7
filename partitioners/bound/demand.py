"""What a pipeline of so many samples takes at least, as the arrays of `relaxed`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.bound.relaxed import Memory, PipelineDemand
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.plan_class import allowed_families, cluster_sizes
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.stage_kinds.wires import link_seconds

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Demand:
    """What the pipelines of one problem take at least."""

    def __init__(self, types: Types) -> None:
        self.types, self.problem, self.L = types, types.problem, types.L
        runtime = self.problem.cluster.runtime_overhead
        self.more, self.blocking = runtime.action_seconds, not runtime.overlap_transfers
        self.gpipe = allowed_families(self.problem) == ("gpipe",)
        self.sizes, large = list[int](), list[set[int]]()
        for b in cluster_sizes(self.problem):  # with those of the whole batch or more it is one micro-batch
            there = set(self.usable(b).tolist())
            if there and (b < self.problem.global_batch or not any(there <= others for others in large)):
                self.sizes.append(b)
                large += [there] * (b >= self.problem.global_batch)

    @memoized
    def usable(self, b: int) -> Index:
        """Kinds that were measured at b."""
        return np.array([v for v, kind in enumerate(self.types.kinds) if b in self.types.sizes_of(kind)], dtype=np.int64)

    @cached_property
    def _least(self) -> Array:
        """The least seconds of a sample in each layer on each kind [V, L], in micro-batches of any size."""
        kinds = enumerate(self.types.kinds)
        each = [[self.types.layer_times(v, x, x).sum(axis=0) / x for x in (1, *self.types.sizes_of(kind))] for v, kind in kinds]
        return np.array([np.min(rows, axis=0) for rows in each])

    def cheapest_sample(self, prices: Array) -> float:
        """The least price of all seconds that a sample takes, at a price for each kind's second [V]."""
        return float((prices[:, None] * self._least).min(axis=0).sum())

    @memoized
    def _times(self, b: int, size: int) -> Array:
        """The least forward and backward of all layers before each [2, V, L + 1] of `size` to b samples, on kinds that were
        measured at b."""
        if not size:
            return np.zeros((2, len(self.usable(b)), self.L + 1))
        each = [self.types.layer_times(v, size, b) for v in self.usable(b).tolist()]
        return _prefixes(each)

    @memoized
    def memory(self, b: int) -> Memory:
        """The bytes that layers need on the kinds that were measured at b. (A peak is a whole number of bytes, rounded.)"""
        usable = self.usable(b).tolist()
        limits = np.array([self.types.limit[self.types.at[v]] + 1.0 for v in usable])
        tables = np.ascontiguousarray(np.stack([self.types.memory(v) for v in usable]).transpose(0, 2, 3, 1))
        return Memory(tables, limits, self.problem.allow_recompute)

    @memoized
    def _longest(self, b: int) -> Array:
        """The most that a micro-batch of b samples or fewer takes, as `_times`."""
        kinds = [(v, self.types.sizes_of(self.types.kinds[v])) for v in self.usable(b).tolist()]
        layers = [[np.diff(self.types.times(v, x)) for x in sizes if x <= b] for v, sizes in kinds]
        each = [np.max(rows, axis=0) for rows in layers]
        return _prefixes(each)

    def load(self, b: int, low: int, high: int, R: int) -> PipelineDemand:
        """Pipelines of `low` to `high` samples, beside R − 1 or more others, in micro-batches of b: m = ⌊low / b⌋ full ones, and
        one of q = low mod b samples or more. The first forward is of b samples, or of q where m = 0; the last backward of q or
        more, and where `high` is not `low` and m > 0, of any number. All goes over the best link that the stage's type can
        have."""
        m, q = divmod(low, b)
        first = b if m else q
        last = first if not m else (q or b) if low == high else 1
        full, rest = self._times(b, b), self._times(b, q)
        work, actions = m * full + rest if m else rest, m + (q > 0)
        wires = m * self._held(b) + (self._held(q) if q else 0.0) if m else self._held(q)
        at = self.types.at[self.usable(b)]
        return PipelineDemand(
            work=work.sum(axis=0),
            backward=work[1],
            again=self.types.costs.again(work[0]),
            work_more=2 * self.more * actions,
            once_more=2 * self.more,
            longest=self._longest(b),
            hiding=self._hiding(b, rest if q else full),
            wire=wires.min(axis=1)[at],
            sums=self._sums(b, R),
            b=b,
            samples=low,
            frozen=self.types.costs.first_trained,
            **self._ends(b, first, last),
            **self._crossing(b, m, q),
        )

    def _hiding(self, b: int, last: Array) -> Array:
        """What of the last micro-batch can hide sums: what it runs again, and its backward, with copies at most."""
        more = [b * self.types.copied(v) for v in self.usable(b).tolist()]
        return np.stack([self.types.costs.again(last[0]), last[1] + more]) * self.problem.sums_early

    @memoized
    def _ends(self, b: int, first: int, last: int) -> dict[str, Array]:
        """The parts of a demand that depend only on the samples of the first micro-batch and of the last one."""
        begin, end = (self._times(b, size) for size in (first, last))
        beyond = [np.diff(x.sum(axis=0)).min(axis=0)[::-1].cumsum()[::-1] for x in (begin, end)]
        back = np.arange(self.L + 1) > self.types.costs.first_trained
        links = self._links(first).sum(axis=0) + np.where(back, self._links(last).sum(axis=0), 0.0)
        at = self.types.at[self.usable(b)]
        return {
            "once": begin[0] + end[1],
            "once_again": self.types.costs.again(end[0]),
            "ahead": begin[0],
            "hop": links.min(axis=1)[at],
            "behind": np.concatenate([beyond, np.zeros((2, 1))], axis=1),
        }

    @memoized
    def _links(self, size: int) -> Array:
        """`Types.transfer` by the type of one end: between nodes, then to each type inside one [2, K, 1 + K, L + 1]."""
        between, inside = self.types.transfer(size)
        apart = np.broadcast_to(between[:, None, None], (2, self.types.K, 1, self.L + 1))
        return np.concatenate([apart, inside], axis=2)

    @memoized
    def _held(self, size: int) -> Array:
        """How long a transfer holds its link, or its devices where it blocks them [K, 1 + K, L + 1]."""
        links = self._links(size)
        found: Array = links.sum(axis=0) if self.blocking else links[0]
        return found

    def _crossing(self, b: int, m: int, q: int) -> dict[str, Array]:
        """What the adapters of nodes with one device need for all micro-batches of each boundary: `arrive` into the node and
        `leave` out of it, seconds [V, L + 1], 0 for kinds on larger nodes; and `counted`, the most seconds of one transfer
        between nodes [L + 1]. Transfers that block compute share no adapter."""
        rates = self.types.lone_rates[self.types.at[self.usable(b)]]
        moved, counted = np.zeros(self.L + 1), np.zeros(self.L + 1)
        if not self.blocking and np.isfinite(rates).any():
            each, counted = self._carried(b)
            rest = 0.0 if any(link.points for link in self.types.between) else q / b  # a part of a measured transfer: unknown
            moved = (m + rest) * each
        return {"arrive": moved / rates[:, 1:], "leave": moved / rates[:, :1], "counted": counted}

    @memoized
    def _carried(self, b: int) -> tuple[Array, Array]:
        """The least bytes of a transfer of b samples between nodes, as `contention` has them, and its most seconds, by boundary
        [L + 1]; nothing before the first layer and after the last."""
        sizes = np.concatenate([[0.0], self.problem.profile.output_bytes[:-1] * b, [0.0]])
        seconds = [link_seconds(link, sizes) for link in self.types.between]
        held = [np.maximum(0.0, x - link.seconds(0)) for x, link in zip(seconds, self.types.between, strict=True)]
        moved = [np.minimum(sizes, x * link.peak) for x, link in zip(held, self.types.between, strict=True)]
        return np.minimum.reduce(moved), np.maximum.reduce(seconds)

    @memoized
    def _sums(self, b: int, R: int) -> Array:
        """The least seconds of gradient sums on the kinds that were measured at b [V, lo, hi]."""
        return np.ascontiguousarray(self.types.sums(R)[self.usable(b)])


def _prefixes(each: Sequence[Array]) -> Array:
    """Sums of all layers before each [2, V, L + 1] of [V][2, L]."""
    found = np.concatenate([np.zeros((len(each), 2, 1)), np.cumsum(each, axis=2)], axis=2).swapaxes(0, 1)
    return np.ascontiguousarray(found)  # else loops are compiled once more
