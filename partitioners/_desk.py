"""Where the simple rules bring their drafts: bounded, least bound first, only those that could be the fastest are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from hetpipe.partitioners._appraisal import Appraiser, Sketch
from hetpipe.partitioners._drafts import Draft
from hetpipe.partitioners._steps import Steps
from hetpipe.planning.partition import Problem


class Candidate(NamedTuple):
    """Drafts that are bounded, and need memory, alike: one, and the same with its devices moved on by each of `starts`. In the
    rule's order the first of them comes at (starts[0], *order)."""

    bound: float
    order: tuple[int, ...]
    draft: Draft
    sketch: Sketch
    starts: Sequence[int]

    @property
    def place(self) -> tuple[int, ...]:
        """Where the first of them comes in the rule's order."""
        return self.starts[0], *self.order


class Desk:
    """What a problem's drafts are computed with, and whom to tell how far that is."""

    def __init__(
        self,
        problem: Problem,
        late: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] | None = None,
        *,
        bounding: bool = True,
    ) -> None:
        self.problem, self.late, self.bounding = problem, late, bounding
        self.below = math.inf  # slower plans are of no use
        self.appraiser = Appraiser(problem)
        self.steps = Steps(self.appraiser)
        self.say = say or problem.progress or (lambda _: None)

    def candidate(self, place: int, draft: Draft) -> Candidate:
        """One draft, bounded, unless only its memory is asked for."""
        sketch = self.appraiser.sketch(draft)
        return Candidate(self.bound(draft, sketch) if self.bounding else 0.0, (place,), draft, sketch, (0,))

    def bound(self, draft: Draft, sketch: Sketch) -> float:
        """No draft of which this is the sketch has a shorter step."""
        return self.appraiser.bound(sketch, len(draft.rows), draft.schedule)

    def moved(self, draft: Draft, start: int) -> Draft:
        """The draft with its devices moved on."""
        return draft._replace(rows=(draft.rows + start) % len(self.appraiser.ids)) if start else draft

    def fits(self, candidate: Candidate) -> bool:
        """Whether no device lacks memory."""
        return not self.missing(candidate)

    def missing(self, candidate: Candidate) -> dict[int, float]:
        """The most bytes that are missing on a device of each type, where any are."""
        return self.appraiser.missing(candidate.sketch, candidate.draft.schedule)

    def quickest(self, candidates: Iterable[Candidate], below: float = math.inf) -> tuple[float, Draft] | None:
        """Of the drafts that fit and have a smaller step than `below` the quickest, of equals the first in the rule's order; and
        its step. Least bound first, until the next is above the step in hand. When it is late, no more once there is one."""
        best: tuple[float, tuple[int, ...], Draft] | None = None
        some = takewhile(lambda _: math.isinf(below) or not self.late(), candidates)
        ordered = sorted(some, key=lambda c: (c.bound, c.place))
        for number, candidate in enumerate(ordered):
            if candidate.bound >= below or (best is not None and candidate.bound > best[0]):
                break
            if (best is not None or math.isfinite(below)) and self.late():
                break
            if number % 50 == 49:
                self.say(f"{candidate.draft.name}, {number + 1} of {len(ordered)} plans")
            if not self.fits(candidate):
                continue
            for start in candidate.starts:
                draft = self.moved(candidate.draft, start)
                sketch = self.appraiser.sketch(draft)
                if best is not None and self.bound(draft, sketch) > best[0]:
                    continue
                least = below if best is None else min(below, best[0] * (1 + 1e-12))  # of equals the first is the best
                step, place = self.steps.step(draft, sketch, least), (start, *candidate.order)
                if step < below and (best is None or (step, place) < best[:2]):
                    best = step, place, draft
        return None if best is None else (best[0], best[2])


class Best:
    """The best of the drafts that are offered, one after the other: its step, and how many were the best so far."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.step, self.count = desk, desk.below, 0

    def offer(self, draft: Draft) -> Iterator[Candidate]:
        """The draft, if it fits and is better than those before it."""
        candidate = self.desk.candidate(self.count, draft)
        if candidate.bound >= self.step or not self.desk.fits(candidate):
            return
        step = self.desk.steps.step(draft, candidate.sketch, self.step)
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
        """All that are tried, or PartitionError or InputError where there is none."""
        ...
