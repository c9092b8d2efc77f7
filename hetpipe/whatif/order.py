"""Times of cards in the order of their rates: a card whose two rates are both higher than another's takes no longer than that.

Each card is scaled from the measurement that is nearest to it, and what a card reaches of its rates differs by a factor of two
and more; so two cards that were scaled from unlike ones may come out in the wrong order. For each micro-batch size, first a time
that was not measured is raised to what was measured on cards with higher rates; then each time is lowered to the least of the
cards with lower rates. The cards below a card are all below whatever is above it, so what is found last keeps the order, whatever
came in. A measured time stays as it is, unless what was measured on a card with lower rates is less: it is then taken for both.
A card has all micro-batch sizes of the cards below it: these have no plan that it has not, and what is interpolated between sizes
is in order, too. Above its own largest size it takes as long for each sample as at that."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.number_types import Precision
from hetpipe.whatif.cards import Card

Array = NDArray[np.float64]
CHANGED = 1.001  # from which a change is told


class Timed(NamedTuple):
    """Forward and backward seconds of some layers [sizes, layers], for each of these micro-batch sizes."""

    sizes: tuple[int, ...]
    forward: Array
    backward: Array

    def at(self, size: int) -> tuple[Array, Array]:
        """Seconds of so many samples: linear between the sizes, and on the last (first) slope beyond them, never below zero."""
        if len(self.sizes) == 1:
            return self.forward[0] * (size / self.sizes[0]), self.backward[0] * (size / self.sizes[0])
        right = min(max(int(np.searchsorted(self.sizes, size)), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        part = (size - low) / (high - low)
        forward, backward = (
            np.maximum(t[right - 1] + part * (t[right] - t[right - 1]), 0.0) for t in (self.forward, self.backward)
        )
        return forward, backward


def outdoes(card: Card, other: Card, precision: Precision) -> bool:
    """Whether both rates of the card are higher than the other's."""
    return card.flops(precision) > other.flops(precision) and card.bandwidth > other.bandwidth


def in_order(
    times: Mapping[str, Timed], measured: Collection[str], cards: Mapping[str, Card], precision: Precision
) -> dict[str, tuple[Timed, str]]:
    """The times of all cards, of which some were `measured`, in order; and how each was changed, in words, if it was."""
    below = {a: [b for b in times if outdoes(cards[a], cards[b], precision)] for a in times}
    found = dict[str, tuple[Timed, str]]()
    for name in sorted(times, key=lambda name: len(below[name])):  # those below a card come before it
        own = _with_sizes(times[name], {size for other in below[name] for size in found[other][0].sizes})
        above = [] if name in measured else [times[other] for other in measured if name in below[other]]
        raised = _bounded(own, above, np.maximum)
        lowered = _bounded(raised, [found[other][0] for other in below[name]], np.minimum)
        said = ""
        if _total(own) > CHANGED * _total(lowered):
            least = min(below[name], key=lambda other: _total_at(found[other][0], own.sizes))
            said = f"no slower than {least}, whose rates are lower"
        elif _total(lowered) > CHANGED * _total(own):
            said = "no faster than cards that were measured and whose rates are higher"
        found[name] = lowered, said
    return found


def _with_sizes(own: Timed, sizes: Collection[int]) -> Timed:
    """Times for these sizes, too; above the largest as long for each sample as at that."""
    last = own.sizes[-1]
    every = sorted({*own.sizes, *sizes})
    both = own.forward, own.backward
    rows = []
    for size in every:
        if size in own.sizes:
            rows.append(tuple(t[own.sizes.index(size)] for t in both))
        else:
            rows.append(own.at(size) if size < last else tuple(t[-1] * (size / last) for t in both))
    return Timed(tuple(every), *(np.array(column) for column in zip(*rows, strict=True)))


def _total_at(timed: Timed, sizes: Collection[int]) -> float:
    return sum(float(x.sum()) for size in sizes for x in timed.at(size))


def _total(timed: Timed) -> float:
    return float(timed.forward.sum() + timed.backward.sum())


def _bounded(own: Timed, others: list[Timed], by: np.ufunc) -> Timed:
    """Each time bounded by those of others for as many samples."""
    forward, backward = own.forward.copy(), own.backward.copy()
    for other in others:
        for row, size in enumerate(own.sizes):
            theirs = other.at(size)
            forward[row], backward[row] = by(forward[row], theirs[0]), by(backward[row], theirs[1])
    return Timed(own.sizes, forward, backward)
