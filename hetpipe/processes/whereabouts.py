"""Where this rank is, what it is doing, and from where its run can go on: what messages about a run that ends badly say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Figures = Mapping[str, tuple[float | None, int | None]]  # device → (share of a step in which it works, most bytes held)

_place = ""
_doing: Callable[[], str] | None = None
_resume = ""
_figures: Callable[[], Figures] | None = None
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Call this when the place or what a run goes on from is another."""
    _listeners[:] = [listener]


def describe_with(place: str, doing: Callable[[], str] | None = None) -> None:
    """Say, from now on, where this rank is ("replica 0 stage 1, device n0/1") and what it is doing ("1F3 of step 7")."""
    global _place, _doing
    _place, _doing = place, doing
    _changed()


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


def place() -> str:
    """Where this rank is; empty as long as that is open."""
    return _place


def doing() -> str:
    """What this rank is doing; empty where nobody said."""
    return _doing() if _doing is not None else ""


def figures() -> Figures:
    """How this rank's devices fare; empty where nobody said."""
    return _figures() if _figures is not None else {}


def resume() -> str:
    """What the run goes on from; empty where nobody said."""
    return _resume


def whereabouts(rank: int) -> str:
    """`rank 1, replica 0 stage 1, device n0/1, in 1F3 of step 7`."""
    now = doing()
    return ", ".join(part for part in (f"rank {rank}", _place, f"in {now}" if now else "") if part)
