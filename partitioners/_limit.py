"""When a search has to end."""

from __future__ import annotations

import time
from collections.abc import Callable

PER_SECOND = 3_700_000  # partial pipelines (of the compiled loops, or what takes as long) in a second of one core
CALL, NUMBERS = 400, 11  # what work on arrays takes, in partial pipelines: each time, and so many numbers as one
FAR = 6  # times as long by the clock, however slow or busy the machine is


def never() -> bool:
    """No time limit."""
    return False


class Meter:
    """What a search did with arrays, in partial pipelines that take as long."""

    def __init__(self) -> None:
        self.done = 0.0

    def count(self, numbers: float) -> None:
        """One more time so many numbers."""
        self.done += CALL + numbers / NUMBERS


class Limit:
    """Of about so many seconds. By the clock, if it is `timed`: where somebody asked for it. Else the load of the machine is not
    to decide what is found: by what was `done`, counted in partial pipelines, where that is known; or by the clock, but not
    before it had as much time of a processor."""

    def __init__(self, seconds: float, done: Callable[[], float] | None = None, *, timed: bool = True) -> None:
        self.seconds, self.timed, self.done = seconds, timed, done
        self.began, self.worked, self.counted = time.monotonic(), time.process_time(), 0.0 if done is None else done()

    def spent(self) -> float:
        """What of it is over, in seconds."""
        passed = time.monotonic() - self.began
        if self.timed:
            return passed
        if self.done is not None:
            return max((self.done() - self.counted) / PER_SECOND, passed / FAR)
        return max(min(passed, time.process_time() - self.worked), passed / FAR)

    def left(self) -> float:
        """Seconds left; below zero when it is over."""
        return self.seconds - self.spent()

    def late(self, grace: float = 0.0) -> bool:
        """Whether it is over, by more than so many seconds."""
        return self.left() < -grace
