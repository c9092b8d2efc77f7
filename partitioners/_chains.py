"""Gradient sums that wait for each other, as far as a lower bound knows of them.

A **gap** is between a layer that has gradients to sum and the next one; they are numbered from 1. Pieces are summed from the
last layers to the first, each by all replicas, and each device sums its own one after the other (`simulator.sync_times`). So a
device that holds both layers of a gap makes the piece below wait for all that it sums above. Say that a gap is *covered* if one
device of some replica holds both its layers, not split with others.

**A chain.** Let a stage [lo, hi) have ended, and all gaps from the one below it down to a layer l be covered. Its own sums come
next. The device that covers the gap below it then sums layers below, which no other device sums sooner, since each piece is
summed by all replicas: all of them, not a part, as it splits none. So it goes on from gap to gap down to l, and takes at least
the seconds of the sums of [l, lo) in one piece. Where a gap is not covered, no device holds both its layers but in stages that
split tensors, so all others are cut there.

One or the other holds for each gap, so plans are told apart by the first gap that is not covered, then by the next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._kinds import Array, Kinds
from hetpipe.partitioners._loads import Index


class Gaps(NamedTuple):
    """Plans in which the gaps `open` are not covered, nor the next one from `low` to `high`, and all others before it are. The
    number of all gaps, and one, stands for none."""

    open: tuple[int, ...]
    low: int
    high: int


class Chains:
    """What follows for the stages of one problem."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.layers = np.flatnonzero(kinds.summed > 0)
        self.gap = np.searchsorted(self.layers, np.arange(kinds.L + 1))  # below a stage that begins there; 0: none
        self.single = kinds.degree == 1
        self.all = Gaps((), 1, max(1, len(self.layers)))

    def parts(self, gaps: Gaps) -> list[Gaps]:
        """The same plans, told apart; none if they cannot be."""
        found, low, number = list[Gaps](), gaps.low, 1
        while gaps.low < gaps.high and low <= gaps.high and self.single.any():
            high = min(gaps.high, low + number - 1)
            known = low == high < self.all.high
            found.append(Gaps((*gaps.open, low), low + 1, self.all.high) if known else gaps._replace(low=low, high=high))
            low, number = high + 1, 2 * number
        return found

    def begin(self, gaps: Gaps) -> Index:
        """The first layer [V, hi] at which a stage may begin."""
        first = np.zeros(self.kinds.L + 1, dtype=np.int64)
        for low, high in [*zip(gaps.open, gaps.open, strict=True), gaps[1:]]:
            if high < self.all.high:
                first[self.layers[high] + 1 :] = self.layers[low - 1] + 1
        return np.where(self.single[:, None], first, 0)

    def below(self, gaps: Gaps) -> Index:
        """The first layer [hi] of the chain below hi; L + 1 where it is not known whether the gap there is covered."""
        first = np.zeros(self.kinds.L + 1, dtype=np.int64)
        for gap in gaps.open:
            first[self.gap >= gap] = self.layers[gap - 1] + 1
        return np.where((self.gap < gaps.low) & self.single.any(), first, self.kinds.L + 1)

    def seconds(self, R: int) -> Array:
        """Least seconds [hi, lo] of the sums of layers beside R − 1 other replicas, on a device that splits none of them."""
        single = self.kinds.sum_floor(R)[self.single]
        return np.ascontiguousarray(single.min(axis=0, initial=np.inf if len(single) else 0.0).T)
