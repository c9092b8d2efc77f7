"""How much `auto` tries. All of it is counted, so that the same input gives the same plan on any machine under any load."""

from __future__ import annotations

import math
from typing import NamedTuple

from hetpipe.documents.options import EffortChoice


class Effort(NamedTuple):
    """Of the bound: labels joined before there are plans (its pipelines are wishes, see `Planner.wishes`), and after that. Of
    plans: for how many numbers of replicas they are made; of how many pipelines of the bound, near an even split of the devices,
    and of one type; local search from so many, with so many neighbours each; last moves from so many, with so many neighbours in
    all, and so many tasks simulated. Of the exact search: its seconds, counted (see `limit`)."""

    before: float
    after: float
    numbers: int
    wishes: int
    even: int
    pure: int
    starts: int
    tries: int
    finalists: int
    moves: int
    tasks: float
    exact_seconds: float

    def times(self, factor: float) -> Effort:
        """So many times as much of all that is done for each kind of stage."""
        if factor == 1:
            return self
        counted = ("wishes", "pure", "tries", "moves")
        more = {name: math.ceil(getattr(self, name) * factor) for name in counted}
        seconds = {name: getattr(self, name) * factor for name in ("before", "after", "exact_seconds")}
        return self._replace(**more, **seconds)


EFFORTS: dict[EffortChoice, Effort] = {
    "quick": Effort(
        before=2e6,
        after=0.0,
        numbers=8,
        wishes=20,
        even=30,
        pure=20,
        starts=1,
        tries=40,
        finalists=1,
        moves=150,
        tasks=3e5,
        exact_seconds=0.5,
    ),
    "normal": Effort(
        before=8e6,
        after=20e6,
        numbers=24,
        wishes=50,
        even=60,
        pure=40,
        starts=5,
        tries=120,
        finalists=3,
        moves=1000,
        tasks=2e6,
        exact_seconds=3.0,
    ),
    "long": Effort(
        before=30e6,
        after=180e6,
        numbers=60,
        wishes=150,
        even=120,
        pure=80,
        starts=10,
        tries=400,
        finalists=10,
        moves=5000,
        tasks=2e7,
        exact_seconds=15.0,
    ),
}
