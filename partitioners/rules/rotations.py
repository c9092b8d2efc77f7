"""Grids on a ring of devices, from any device on: which of them are alike to a rule that looks at the types of each stage and the
links between two stages. A stage of a grid is a window of the ring, so all are described at once, by the sets of types and links
of every window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.rules.grids import Layout
from hetpipe.partitioners.step_times.appraisal import Appraiser
from hetpipe.partitioners.step_times.drafts import Index
from hetpipe.partitioners.step_times.sets import unlike_rows, windows_alike


class AlikeGrids(NamedTuple):
    """U kinds of grid of n stages. The grids of a kind begin at each of `starts` [U]; each stage has devices of the same types in
    the rows with a sample more, and in the others [U, n], and each boundary the same links [U, n − 1], by the numbers of these
    sets; and a stage's devices are on several nodes or not [U, n]."""

    starts: list[list[int]]
    more: Index
    others: Index
    links: Index
    spread: NDArray[np.bool_]


def alike_grids(appraiser: Appraiser, layout: Layout, more: int, starts: Sequence[int]) -> AlikeGrids:
    """The grids of this layout from the given devices on, of which the first `more` rows have a sample more. Of those that only
    differ in the order of their rows, the first."""
    devices, n, R = len(appraiser.ids), layout.n, layout.R
    here, windows = np.arange(devices), appraiser.type_sets.windows
    joins = appraiser.links.numbers(here, (here + layout.stage) % devices)
    each = (
        windows(appraiser.type_of, layout.row, more),
        windows(appraiser.type_of, layout.row, R - more)[(here + more * layout.row) % devices],
        ~windows_alike(appraiser.links.node, layout.row, R),
        appraiser.link_sets.windows(joins, layout.row, R),
    )
    stages = (np.array(starts)[:, None] + np.arange(n) * layout.stage) % devices
    table: Index = np.hstack([*(column[stages].astype(np.int64) for column in each[:3]), each[3][stages[:, :-1]]])
    first, where = unlike_rows(table)
    same = n if layout.row == n and not more else devices  # so far on, the same rows come in another order
    members: list[dict[int, int]] = [{} for _ in first]
    for start, j in zip(starts, where.tolist(), strict=True):
        members[j].setdefault(start % same, start)
    found = table[first]
    spread = found[:, 2 * n : 3 * n].astype(bool)
    return AlikeGrids([list(own.values()) for own in members], found[:, :n], found[:, n : 2 * n], found[:, 3 * n :], spread)
