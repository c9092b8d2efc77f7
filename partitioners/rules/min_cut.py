"""A weighted graph in parts that are joined least: minimum cuts, one after the other."""

from __future__ import annotations

import math

import numpy as np

from hetpipe.partitioners.stage_kinds.wires import Array


def min_cut(weights: Array) -> tuple[float, list[int]]:
    """The least weight between two parts of a graph, [n, n] symmetric, n ≥ 2, and the vertices of one of them (Stoer and Wagner
    1997). O(n³).

    >>> min_cut(np.array([[0.0, 9, 1], [9, 0, 2], [1, 2, 0]]))
    (3.0, [2])
    """
    weights, groups = weights.copy(), [[i] for i in range(len(weights))]
    best = math.inf, list[int]()
    while len(groups) > 1:
        joined, last, before = weights[0].copy(), 0, 0
        joined[0] = -math.inf
        for _ in range(len(groups) - 1):
            before, last = last, int(joined.argmax())
            cut = float(joined[last])
            joined = np.where(joined == -math.inf, joined, joined + weights[last])
            joined[last] = -math.inf
        if cut < best[0]:
            best = cut, sorted(groups[last])
        weights[before] += weights[last]
        weights[:, before] = weights[before]
        weights[before, before] = 0.0
        weights = np.delete(np.delete(weights, last, 0), last, 1)
        groups[before] += groups[last]
        del groups[last]
    return best


def splits(weights: Array) -> list[list[list[int]]]:
    """The graph in 1, 2, …, n parts: of all parts the one with the least minimum cut is split next (SPLIT, Saran and Vazirani
    1995: at most 2 − 2/k times the least weight between k parts). O(n⁴) at most."""
    found, parts = [], [(list(range(len(weights))), _cut(weights, list(range(len(weights)))))]
    while True:
        found.append(sorted(part for part, _ in parts))
        i = min(range(len(parts)), key=lambda i: parts[i][1][0])
        whole, (value, side) = parts[i]
        if math.isinf(value):
            return found
        halves = [side, [x for x in whole if x not in side]]
        parts[i : i + 1] = [(half, _cut(weights, half)) for half in halves]


def _cut(weights: Array, part: list[int]) -> tuple[float, list[int]]:
    """The minimum cut of a part; infinite for one vertex."""
    if len(part) < 2:
        return math.inf, part
    value, side = min_cut(weights[np.ix_(part, part)])
    return value, [part[i] for i in side]
