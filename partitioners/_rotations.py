"""Grids on a ring of devices, from any device on: which of them are alike to a rule that looks at the types of each stage and the
links between two stages. A stage of a grid is a window of the ring, so all are described at once, by the sets of types and links
of every window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._appraisal import Appraiser, Set, unlike_rows
from hetpipe.partitioners._drafts import Index
from hetpipe.partitioners._grids import Layout


class Alike(NamedTuple):
    """Grids from these devices on, of which each stage has devices of the same types (in the rows with a sample more, and in
    the others), and each boundary the same links; and whether a stage's devices are on several nodes."""

    starts: list[int]
    more: tuple[Set, ...]
    others: tuple[Set, ...]
    links: tuple[Set, ...]
    spread: tuple[bool, ...]


class Sets:
    """Sets of numbers, by number: the same number, the same set."""

    def __init__(self) -> None:
        self.all: list[Set] = []
        self._number: dict[Set, int] = {}

    def number(self, found: Set) -> int:
        """That of a set."""
        if self._number.setdefault(found, len(self.all)) == len(self.all):
            self.all.append(found)
        return self._number[found]

    def windows(self, values: Index, step: int, length: int) -> Index:
        """For each place of a ring the set of the values at `length` places from it on, each `step` further. Of windows twice
        as long at a time: O(places log length), and a union for each pair of sets that differs."""
        places = np.arange(len(values))
        if length == 0:
            return np.full(len(values), self.number(frozenset()))
        unlike, where = np.unique(values, return_inverse=True)
        found = np.array([self.number(frozenset([value])) for value in unlike.tolist()])[where.reshape(-1)]
        width = 1
        while 2 * width <= length:
            found = self._united(found, found[(places + step * width) % len(values)])
            width *= 2
        return self._united(found, found[(places + step * (length - width)) % len(values)])

    def _united(self, a: Index, b: Index) -> Index:
        """The union of each set of a with that of b."""
        known = len(self.all)
        pairs, where = np.unique(a * known + b, return_inverse=True)
        united = [self.number(self.all[pair // known] | self.all[pair % known]) for pair in pairs.tolist()]
        found: Index = np.array(united)[where.reshape(-1)]
        return found


def together(values: Index, step: int, length: int) -> NDArray[np.bool_]:
    """For each place of a ring whether the values at `length` places from it on, each `step` further, are all the same."""
    places, found, width = np.arange(len(values)), np.ones(len(values), dtype=bool), 1
    while width < length:
        more = min(width, length - width)
        there = (places + step * more) % len(values)
        found, width = found & found[there] & (values == values[there]), width + more
    return found


def alike(appraiser: Appraiser, layout: Layout, more: int, starts: Sequence[int], sets: tuple[Sets, Sets]) -> Iterator[Alike]:
    """The grids of this layout from the given devices on, of which the first `more` rows have a sample more."""
    devices, n = len(appraiser.ids), layout.n
    here, (types, links) = np.arange(devices), sets
    joins = appraiser.links.numbers(here, (here + layout.stage) % devices)
    each = (
        types.windows(appraiser.type_of, layout.row, more),
        types.windows(appraiser.type_of, layout.row, layout.R - more)[(here + more * layout.row) % devices],
        links.windows(joins, layout.row, layout.R),
    )
    stages = (np.array(starts)[:, None] + np.arange(n) * layout.stage) % devices
    spread = ~together(appraiser.links.node, layout.row, layout.R)
    table = np.hstack([each[0][stages], each[1][stages], each[2][stages[:, :-1]], spread[stages]])
    same = n if layout.row == n and not more else devices  # so far on, the same rows come in another order
    first, where = unlike_rows(table)
    members: list[list[int]] = [[] for _ in first]
    for start, j in zip(starts, where.tolist(), strict=True):
        members[j].append(start)
    for j in np.argsort(first).tolist():
        row = table[first[j]].tolist()
        found = [types.all[x] for x in row[: 2 * n]]
        different = {start % same: start for start in reversed(members[j])}
        between = tuple(links.all[x] for x in row[2 * n : -n])
        yield Alike(sorted(different.values()), tuple(found[:n]), tuple(found[n:]), between, tuple(map(bool, row[-n:])))
