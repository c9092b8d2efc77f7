"""Which samples share a row of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The numbers of the samples in each row, by best fit decreasing (Johnson et al. 1974): the longest first, each into the
    fullest row that has room for it, in O(n log n + n · capacities)."""
    rows, open_rows, rooms = list[list[int]](), dict[int, list[int]](), list[int]()  # rooms: sorted, each with open rows
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        assert 0 < length <= capacity
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        if left := room - length:
            if left not in open_rows:
                open_rows[left] = []
                insort(rooms, left)
            open_rows[left].append(row)
    return rows
