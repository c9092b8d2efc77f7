"""Where this rank is, what it is doing, and from where its run can go on: what messages about a run that ends badly say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

Figures = Mapping[str, tuple[float | None, int | None]]  # device → (share of a step in which it works, most bytes held)


class Doing(NamedTuple):
    """What a rank is doing (empty where nobody said), whether that is to wait for other ranks, and for how long it has been seen
    to do so."""

    text: str
    waits: bool
    seconds: float


_place = ""
_doing: Callable[[], str] | None = None
_waits: Callable[[], bool] | None = None
_needed = True
_tasks: list[str] = []  # of `during`, the innermost last
_activities: list[Callable[[], str]] = []  # what is shown to people, the innermost last
_waiting = 0  # how many `waiting` there are
_seen: tuple[tuple[str, bool] | None, float] = None, 0.0  # what `now` found last, and since when
_resume = ""
_figures: Callable[[], Figures] | None = None
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Call this when the place or what a run goes on from is another."""
    _listeners[:] = [listener]


def describe_with(
    described_place: str, doing: Callable[[], str] | None = None, waits: Callable[[], bool] | None = None, *, needed: bool = True
) -> None:
    """Say, from now on, where this rank is ("replica 0 stage 1, device n0/1"), what it is doing ("1F3 of step 7") and whether it
    waits for other ranks. `needed`: whether these need it; else it may end before them."""
    global _place, _doing, _waits, _needed
    _place, _doing, _waits, _needed = described_place, doing, waits, needed
    _tasks.clear()
    _changed()


@contextmanager
def during(what: str) -> Iterator[None]:
    """Say that this rank does this, whatever else was said, and does not wait meanwhile. What an error ends stays said."""
    global _waiting
    depth, before, _waiting = len(_tasks), _waiting, 0
    _tasks.append(what)
    try:
        yield
    finally:
        _waiting = before
    del _tasks[depth:]


@contextmanager
def waiting() -> Iterator[None]:
    """Say that this rank waits for others."""
    global _waiting
    _waiting += 1
    try:
        yield
    finally:
        _waiting -= 1


def begin_activity(text: Callable[[], str]) -> None:
    """Say what is shown to people, where nothing else is said of what this rank does."""
    _activities.append(text)


def end_activity(text: Callable[[], str]) -> None:
    """It is over."""
    if text in _activities:
        _activities.remove(text)


def resumes_from(text: str) -> None:
    """Say what the run goes on from when it is started again ("step 40, checkpoints/demo/step-00000040")."""
    global _resume
    _resume = text
    _changed()


def figures_from(look: Callable[[], Figures] | None) -> None:
    """Say, from now on, how this rank's devices fare; `look` is called in another thread."""
    global _figures
    _figures = look


def _changed() -> None:
    for listener in _listeners:
        listener()


def described_place() -> str:
    """Where this rank is; empty as long as that is open."""
    return _place


def needed() -> bool:
    """Whether the other ranks need this one."""
    return _needed


def now() -> Doing:
    """What this rank is doing. It may be looked at in another thread, again and again."""
    global _seen
    tasks, activities = _tasks[-1:], _activities[-1:]
    text = tasks[0] if tasks else _doing() if _doing is not None else activities[0]() if activities else ""
    waits = _waiting > 0 or (not tasks and _waits is not None and _waits())
    if _seen[0] != (text, waits):
        _seen = (text, waits), time.monotonic()
    return Doing(text, waits, time.monotonic() - _seen[1])


def figures() -> Figures:
    """How this rank's devices fare; empty where nobody said."""
    return _figures() if _figures is not None else {}


def resume() -> str:
    """What the run goes on from; empty where nobody said."""
    return _resume


def whereabouts(rank: int) -> str:
    """`rank 1, replica 0 stage 1, device n0/1, in 1F3 of step 7`."""
    doing = now().text
    return ", ".join(part for part in (f"rank {rank}", _place, f"in {doing}" if doing else "") if part)
