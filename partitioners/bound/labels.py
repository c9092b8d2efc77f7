"""Labels of relaxed stages: those that are alike are kept as one, and those that a stage can have behind it are listed. See
`relaxed`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.compiled import compiled, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Origins = NDArray[np.int32]
LABELS = 64  # of a first layer and a number of stages, by the time that they leave
PLACES = 16  # stages that are counted


class LabelSpace(NamedTuple):
    """Where labels are kept, by first layer, stages and time left [L + 1, PLACES, LABELS]: the least `cost`, the most `slack`,
    and of the least the kind of its first stage, where that ends, and the stages and the place of the label behind it (`origin`).
    And what stages that end at a layer can have behind them, by stages: how `many` [L + 1, PLACES], their prices and rooms, and
    the places of their labels."""

    cost: Array
    slack: Array
    origin: Origins
    many: Index
    prices: Array
    rooms: Array
    places: Origins


def label_space(L: int) -> LabelSpace:
    """Room for the labels of so many layers."""
    shape = L + 1, PLACES, LABELS
    return LabelSpace(
        np.zeros(shape),
        np.zeros(shape),
        np.zeros((*shape, 4), np.int32),
        np.zeros(shape[:2], np.int64),
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(shape, np.int32),
    )


@inlined
def _class_of(room: float) -> int:
    """The class of a label with this part of all room, in classes. Where room has no end, a part of it is no number: the last."""
    return int(room) if room < LABELS - 1 else LABELS - 1


@inlined
def put_label(
    labels: LabelSpace, lo: int, p: int, left: float, total: float, scale: float, v: int, hi: int, behind: int, k: int
) -> None:
    """Keep one more label of p + 1 stages, with so much more room than the layers before need: of those with about as much the
    least cost and the most room are kept, apart. The labels of whole pipelines are all at (0, 0, 0). Its first stage is on kind v
    and ends at hi; behind it is label k of those with `behind` + 1 stages."""
    if lo > 0:
        x, p = _class_of(left * scale), min(p, PLACES - 1)
    else:
        x = p = 0
    if total < labels.cost[lo, p, x]:
        labels.cost[lo, p, x] = total
        found = labels.origin[lo, p, x]
        found[0], found[1], found[2], found[3] = v, hi, behind, k
    labels.slack[lo, p, x] = max(labels.slack[lo, p, x], left)


@compiled
def list_labels(labels: LabelSpace, hi: int, hop: float, scale: float) -> None:
    """List what a stage that ends at hi can have behind it, by stages: the labels there, less the transfer to them (`hop`), that
    no other of more room and as few stages undercuts. Into `prices` and `rooms` [hi, p] both of each, into `places` which it
    is."""
    undercut = np.full(LABELS, np.inf)
    most, left, place = np.empty(LABELS), np.empty(LABELS), np.empty(LABELS, np.int64)
    for p in range(PLACES):
        most[:] = np.inf
        left[:] = -np.inf
        for k in range(LABELS):
            free = labels.slack[hi, p, k] - hop
            if labels.cost[hi, p, k] < np.inf and free >= 0:
                x = _class_of(free * scale)
                left[x] = max(left[x], free)
                if labels.cost[hi, p, k] < most[x]:
                    most[x], place[x] = labels.cost[hi, p, k], k
        least, found = np.inf, 0
        for x in range(LABELS - 1, -1, -1):
            least = min(least, undercut[x])
            if most[x] < least:
                least = labels.prices[hi, p, found] = most[x]
                labels.rooms[hi, p, found] = left[x]
                labels.places[hi, p, found] = place[x]
                found += 1
            undercut[x] = least
        labels.many[hi, p] = found
