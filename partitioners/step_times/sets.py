"""Sets of numbers, of types or of links: by a number for each, and of windows of a ring."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.step_times.drafts import Index

Set = frozenset[int]


class NumberedSets:
    """Sets by number: the same number, the same set."""

    def __init__(self) -> None:
        self.all: list[Set] = []
        self._number: dict[Set, int] = {}

    def number(self, found: Iterable[int]) -> int:
        """The number of a set."""
        key = frozenset(found)
        if self._number.setdefault(key, len(self.all)) == len(self.all):
            self.all.append(key)
        return self._number[key]

    def singles(self, values: Index) -> Index:
        """The numbers of the sets that hold one of these values each."""
        unlike, where = np.unique(values, return_inverse=True)
        numbers: Index = np.array([self.number([value]) for value in unlike.tolist()], dtype=np.int64)
        return numbers[where.reshape(values.shape)]

    def members(self, numbers: Index) -> list[tuple[int, NDArray[np.bool_]]]:
        """Each member of any of these sets, and which of them have it."""
        unlike, where = np.unique(numbers, return_inverse=True)
        found = sorted(set[int]().union(*(self.all[number] for number in unlike.tolist())))
        has = np.array([[member in self.all[number] for member in found] for number in unlike.tolist()])
        return [(member, has[:, j][where.reshape(numbers.shape)]) for j, member in enumerate(found)]

    def windows(self, values: Index, step: int, length: int) -> Index:
        """For each place of a ring the set of the values at `length` places from it on, each `step` further. Of windows twice
        as long at a time: O(places log length), and a union for each pair of sets that differs."""
        places = np.arange(len(values))
        if length == 0:
            return np.full(len(values), self.number(()))
        found, width = self.singles(values), 1
        while 2 * width <= length:
            found = self._united(found, found[(places + step * width) % len(values)])
            width *= 2
        return self._united(found, found[(places + step * (length - width)) % len(values)])

    def _united(self, a: Index, b: Index) -> Index:
        """The union of each set of a with the set of b at the same place."""
        known = len(self.all)
        pairs, where = np.unique(a * known + b, return_inverse=True)
        united = [self.number(self.all[pair // known] | self.all[pair % known]) for pair in pairs.tolist()]
        found: Index = np.array(united)[where.reshape(-1)]
        return found


def windows_alike(values: Index, step: int, length: int) -> NDArray[np.bool_]:
    """For each place of a ring whether the values at `length` places from it on, each `step` further, are all the same."""
    places, found, width = np.arange(len(values)), np.ones(len(values), dtype=bool), 1
    while width < length:
        more = min(width, length - width)
        there = (places + step * more) % len(values)
        found, width = found & found[there] & (values == values[there]), width + more
    return found


def unlike_rows(table: Index) -> tuple[Index, Index]:
    """The first of each kind of equal rows, and of which kind every row is. By a number for each row; rows of the same number
    are compared."""
    weights = np.random.default_rng(0).integers(1, 2**62, table.shape[1])
    _, first, where = np.unique(table @ weights, return_index=True, return_inverse=True)
    if not (table == table[first[where]]).all():
        _, first, where = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, where.reshape(-1)
