"""Where rules bring their drafts: bounded, least bound first, only those that could be the fastest are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import NamedTuple, Protocol

from hetpipe.partitioners.step_times.appraisal import Appraiser
from hetpipe.partitioners.step_times.drafts import Draft
from hetpipe.partitioners.step_times.steps import Steps
from hetpipe.planning.partition import Problem

PLAYED = 100_000  # tasks that are simulated of a rule's drafts where adapters are shared
LEAST_DRAFTS, MOST_DRAFTS = 2, 40  # drafts of which that is at least, and at most
HUGE, EFFORT = 5_000_000, 2e7  # tasks, and speeds of flows, of a draft that is not simulated if another is
OFFERS = 500  # drafts of a rule that are looked at one after the other
LOOKS = 500_000  # devices of a rule's drafts whose step is computed as if nothing was shared


class Candidate(NamedTuple):
    """Drafts that are bounded, and need memory, alike: one, and the same with its devices moved on by each of `starts`. In the
    rule's order the first of them comes at (starts[0], *order)."""

    bound: float
    order: tuple[int, ...]
    draft: Draft
    starts: Sequence[int] = (0,)

    @property
    def place(self) -> tuple[int, ...]:
        """Where the first of them comes in the rule's order."""
        return self.starts[0], *self.order


class Entry(NamedTuple):
    """A candidate, and of its drafts perhaps one, with its devices moved on by `start`, which takes `least` or more."""

    candidate: Candidate
    draft: Draft | None = None
    start: int = 0
    least: float = 0.0


class Desk:
    """What a problem's drafts are computed with, and whom to tell how far that is."""

    def __init__(
        self, problem: Problem, late: Callable[[], bool] | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.problem, self.late = problem, late or problem.stopped
        self.below = math.inf  # slower plans are of no use
        self.appraiser = Appraiser(problem)
        self.steps = Steps(self.appraiser)
        self.say = say or problem.progress or (lambda _: None)

    def candidate(self, place: int, draft: Draft) -> Candidate:
        """The candidate of one draft."""
        return Candidate(self.appraiser.least(draft), (place,), draft)

    def in_all_ways(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """These candidates, and those in which all stages save memory also with offload, where the problem allows that."""
        problem = self.problem
        for candidate in candidates:
            yield candidate
            if problem.allow_offload and all(work.recompute is problem.allow_recompute for work in candidate.draft.works):
                away = self.appraiser.offloading(candidate.draft)
                if away is not None:
                    yield candidate._replace(bound=self.appraiser.least(away), order=(*candidate.order, 1), draft=away)

    def moved(self, draft: Draft, start: int) -> Draft:
        """The draft with its devices moved on."""
        return draft._replace(rows=(draft.rows + start) % len(self.appraiser.ids)) if start else draft

    def missing(self, candidate: Candidate) -> dict[int, float]:
        """The most bytes that are missing on a device of each type, where any are."""
        return self.appraiser.missing(self.moved(candidate.draft, candidate.starts[0]))

    def fits(self, draft: Draft) -> bool:
        """Whether devices and hosts have the memory for a draft."""
        return not self.appraiser.missing(draft) and self.appraiser.hosts_hold(draft)

    def step(self, draft: Draft, below: float, budget: Budget) -> float:
        """The step of a draft; infinite where it does not fit or is not `below` this."""
        if not self.fits(draft):
            return math.inf
        least = self.steps.least(draft, below)
        return budget.step(draft, least) if least < below else math.inf

    def quickest(self, candidates: Iterable[Candidate], below: float = math.inf) -> tuple[float, Draft] | None:
        """The quickest of the drafts that fit and have a smaller step than `below`, of equals the first in the rule's order; and
        its step. Least bound first, until the next is above the step in hand. When it is late, no more once there is one; nor
        after so many `LOOKS`. Where adapters are shared, only drafts are compared that the budget is enough for; where all take
        too long, it is the draft of the fewest tasks."""
        best: tuple[float, tuple[int, ...], Draft] | None = None
        some = takewhile(lambda _: math.isinf(below) or not self.late(), self.in_all_ways(candidates))
        waiting: list[tuple[float, tuple[int, ...], int, Entry]] = []
        for number, candidate in enumerate(some):
            waiting.append((candidate.bound, candidate.place, number, Entry(candidate)))
        heapify(waiting)
        looked, left, budget, number = 0, LOOKS, Budget(self.steps), len(waiting)
        while waiting and waiting[0][0] < below and (best is None or waiting[0][:2] < best[:2]):
            if (best is not None or math.isfinite(below)) and self.late():
                break
            _, place, _, entry = heappop(waiting)
            if entry.draft is None:
                looked += 1
                if looked % 50 == 0:
                    self.say(f"{entry.candidate.draft.name}, {looked} of {number} plans")
                if left <= 0 or self.missing(entry.candidate):
                    continue
                for more in self._entries(entry.candidate, below if best is None else best[0]):
                    heappush(waiting, (more.least, (more.start, *entry.candidate.order), number, more))
                    number, left = number + 1, left - more.candidate.draft.rows.size
                    if left <= 0:
                        break
                continue
            if budget.spent:
                break
            step = budget.step(entry.draft, entry.least)
            if step < below and (best is None or (step, place) < best[:2]):
                best = step, place, entry.draft
        if best is None and budget.huge is not None:
            step = self.steps.played(budget.huge)
            return (step, budget.huge) if step < below else None
        return None if best is None else (best[0], best[2])

    def _entries(self, candidate: Candidate, below: float) -> Iterator[Entry]:
        """Its drafts, and what each takes at least, if that could be `below` this."""
        for start in candidate.starts:
            draft = self.moved(candidate.draft, start)
            if self.appraiser.hosts_hold(draft):
                yield Entry(candidate, draft, start, self.steps.least(draft, below))


class Budget:
    """A budget of simulations in which transfers share adapters: so many tasks, of which each takes no fewer and no more than
    these. Without sharing the least seconds of a draft are its step."""

    def __init__(
        self, steps: Steps, tasks: float = PLAYED, fewest: float = PLAYED / MOST_DRAFTS, most: float = PLAYED / LEAST_DRAFTS
    ) -> None:
        self.steps, self.left, self.fewest, self.most = steps, tasks, fewest, most
        self.huge: Draft | None = None  # of those that take too long the one of the fewest tasks

    @property
    def spent(self) -> bool:
        """Whether the tasks are used up."""
        return self.left <= 0

    def step(self, draft: Draft, least: float) -> float:
        """Seconds; infinite where the simulation would take longer than any is worth, if there are others."""
        if not self.steps.shared:
            return least
        tasks, step = self.steps.tasks(draft), math.inf
        if tasks <= HUGE:
            self.left -= max(self.fewest, min(self.most, tasks))
            step = self.steps.played(draft, EFFORT)
        if math.isinf(step) and (self.huge is None or tasks < self.steps.tasks(self.huge)):
            self.huge = draft
        return step


class Best:
    """The best of the drafts that are offered, one after the other: its step, and how many were the best so far."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.step, self.count, self.budget = desk, desk.below, 0, Budget(desk.steps)
        self.left = OFFERS

    @property
    def spent(self) -> bool:
        """Whether no more drafts are looked at."""
        return self.left <= 0 or self.budget.spent

    def offer(self, draft: Draft) -> Iterator[Candidate]:
        """The draft, if it fits and is better than those before it."""
        if self.spent:
            return
        self.left -= 1
        candidate = self.desk.candidate(self.count, draft)
        step = self.desk.step(draft, self.step, self.budget) if candidate.bound < self.step else math.inf
        if step < self.step:
            self.step, self.count = step, self.count + 1
            yield candidate


class Rule(Protocol):
    """A partitioner that tries some plans."""

    @property
    def name(self) -> str:
        """What plans and commands call it."""
        ...

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """All drafts that the rule tries; PartitionError or InputError where it has none."""
        ...
