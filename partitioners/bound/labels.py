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
Origin = tuple[int, int, int, int, int, int, int]
LABELS = 64  # of a first layer, a type and a number of devices on a node, by the time that they leave
NODE = 8  # devices on a node that are counted; on larger ones there may be any number
PLACES, SOME = 16, 4  # stages that are counted, and where nodes matter


class LabelSpace(NamedTuple):
    """Where labels are kept, by first layer, type, devices on a node, stages and time left: the least `cost`, the most `slack`,
    and the `origin` of the least; and whether there is any (`used`, without the last). And what stages that end at a layer can
    have behind them, on another node (0) or on theirs, by stages: how `many`, their prices and rooms, and the places of their
    labels."""

    cost: Array
    slack: Array
    origin: Origins
    used: Origins
    many: Index
    prices: Array
    rooms: Array
    places: Origins


def label_space(L: int, K: int, most: int) -> LabelSpace:
    """Room for labels, with nodes of so many devices."""
    shape = L + 1, K, min(most, NODE), PLACES if most == 1 else SOME, LABELS
    joined = L + 1, 1 + K * shape[2], shape[3], LABELS
    return LabelSpace(
        np.zeros(shape), np.zeros(shape), np.zeros((*shape, 7), np.int32), np.zeros(shape[:4], np.int32),
        np.zeros(joined[:3], np.int64), np.zeros(joined), np.zeros(joined), np.zeros((*joined, 3), np.int32),
    )  # fmt: skip


@inlined
def put_label(
    labels: LabelSpace, lo: int, i: int, c: int, p: int, left: float, total: float, scale: float, origin: Origin
) -> None:
    """Keep one more label of a type, so many devices on its node and so many stages, with so much more room than the layers
    before need: of those with about as much the least cost and the most room are kept, apart. The labels of whole pipelines are
    all at (0, 0, 0, 0, 0). `origin`: its stage's way, the label (hi, j, d, n, k) that it comes from, and how many devices of that
    are near."""
    if lo > 0:
        x, c, p = min(LABELS - 1, int(left * scale)), min(c, labels.cost.shape[2]) - 1, min(p, labels.cost.shape[3]) - 1
    else:
        i = c = p = x = 0
    if labels.used[lo, i, c, p] == 0:
        labels.used[lo, i, c, p] = 1
        labels.cost[lo, i, c, p] = np.inf
        labels.slack[lo, i, c, p] = -np.inf
    if total < labels.cost[lo, i, c, p, x]:
        labels.cost[lo, i, c, p, x] = total
        found = labels.origin[lo, i, c, p, x]
        found[0], found[1], found[2], found[3], found[4], found[5], found[6] = origin
    labels.slack[lo, i, c, p, x] = max(labels.slack[lo, i, c, p, x], left)


@compiled
def join_labels(
    labels: LabelSpace, hi: int, where: int, p: int, types: Index, counts: Index, hops: Array, sent: Array, scale: float,
    undercut: Array,
) -> int:  # fmt: skip
    """List what a stage that ends at hi can have behind it: labels of these types and counts, and of p + 1 stages, less the
    transfer to each type and with the price of what that sends back, that no other of more room and as few stages undercuts. Into
    `prices` and `rooms` [hi, where, p] both of each, into `places` where it is; how many."""
    cost, slack, used, some = labels.cost, labels.slack, labels.used, 0
    for j in types:
        for c in counts:
            some += used[hi, j, c, p]
    if some == 0:
        return 0
    most, left, found = np.full(LABELS, np.inf), np.full(LABELS, -np.inf), 0
    origin = np.zeros((LABELS, 3), np.int32)
    for j in types:
        for c in counts:
            for k in range(LABELS if hops[j] < np.inf and used[hi, j, c, p] else 0):
                free = slack[hi, j, c, p, k] - hops[j]
                if cost[hi, j, c, p, k] < np.inf and free >= 0:
                    x = min(LABELS - 1, int(free * scale))
                    left[x] = max(left[x], free)
                    if cost[hi, j, c, p, k] + sent[j] < most[x]:
                        most[x], origin[x, 0], origin[x, 1], origin[x, 2] = cost[hi, j, c, p, k] + sent[j], j, c, k
    least = np.inf
    for x in range(LABELS - 1, -1, -1):
        least = min(least, undercut[x])
        if most[x] < least:
            least = labels.prices[hi, where, p, found] = most[x]
            labels.rooms[hi, where, p, found] = left[x]
            labels.places[hi, where, p, found] = origin[x]
            found += 1
        undercut[x] = least
    return found
