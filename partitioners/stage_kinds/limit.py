"""When a search has to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hetpipe.planning.partition import Problem, never

PER_SECOND = 3_700_000  # partial pipelines (of the compiled loops, or what takes as long) in a second of one core
CALL, NUMBERS = 400, 11  # what work on arrays takes, in partial pipelines: each time, and so many numbers as one


class Meter:
    """How much a search did with arrays, in partial pipelines that take as long."""

    def __init__(self) -> None:
        self.done = 0.0

    def count(self, numbers: float) -> None:
        """Count one operation more, on so many numbers."""
        self.done += CALL + numbers / NUMBERS


class Limit:
    """A limit of about so many seconds: by the clock, where somebody asked for it; or by what was `done`, in partial pipelines,
    so that the load of the machine does not decide what is found. Where somebody `stopped` it, it is over."""

    def __init__(
        self, seconds: float = math.inf, done: Callable[[], float] | None = None, stopped: Callable[[], bool] = never
    ) -> None:
        self.seconds, self.done, self.stopped = seconds, done, stopped
        self.began = self._now()

    @classmethod
    def of(cls, problem: Problem) -> Limit:
        """The time limit of the problem, by the clock; infinite where it has none."""
        return cls(problem.time_limit_seconds or math.inf, stopped=problem.stopped)

    def _now(self) -> float:
        return time.monotonic() if self.done is None else self.done() / PER_SECOND

    def left(self) -> float:
        """Seconds left; below zero when the time is over."""
        return self.seconds - (self._now() - self.began)

    def late(self, grace: float = 0.0) -> bool:
        """Whether the time is over, by more than so many seconds."""
        return self.stopped() or self.left() < -grace

    def half_over(self) -> bool:
        """Whether half of the time is over."""
        return self.late(-self.seconds / 2)
