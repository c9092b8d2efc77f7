"""How much `auto` tries. All of it is counted, so that the same input gives the same plan on any machine under any load."""

from __future__ import annotations

from typing import NamedTuple

from hetpipe.spec.options import EffortChoice


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


EFFORTS: dict[EffortChoice, Effort] = {
    "quick": Effort(2e6, 0.0, 8, 20, 30, 20, 1, 40, 1, 150, 3e5, 0.5),
    "normal": Effort(8e6, 20e6, 24, 50, 60, 40, 5, 120, 3, 1000, 2e6, 3.0),
    "long": Effort(30e6, 180e6, 60, 150, 120, 80, 10, 400, 10, 5000, 2e7, 15.0),
}
