"""Why runs end before their time: for a reason of all ranks, or because they are told to: SIGTERM (a scheduler's, with some
seconds left) and Ctrl-C end a run after the step in which it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn


class RunError(RuntimeError):
    """A run cannot go on, for a reason that all ranks know and that is not one's own: its message says all."""


class RunStopped(BaseException):
    """A run ended because signal `number` asked for it, after `step` (None: before its first). `resume` says what it goes on
    from; empty: nothing is saved. `lost`: which rank was lost meanwhile, so that nobody says after which step. Like
    KeyboardInterrupt it is nothing that `except Exception` means."""

    def __init__(self, number: int, step: int | None = None, resume: str = "", lost: str = "") -> None:
        super().__init__(number, step, resume, lost)
        self.number, self.step, self.resume, self.lost = number, step, resume, lost

    @property
    def exit_code(self) -> int:
        """As a shell gives it for a process that a signal ended."""
        return 128 + self.number

    def by(self, number: int) -> RunStopped:
        """The same, asked for by another signal."""
        return RunStopped(number, self.step, self.resume, self.lost)

    def __str__(self) -> str:
        if self.lost:
            return f"stopped by {signal.Signals(self.number).name}; {self.lost}"
        when = f"after step {self.step}" if self.step is not None else "before the first step"
        return f"stopped by {signal.Signals(self.number).name} {when}"


_told: int | None = None  # the signal that asked this process to stop


def heed_signals() -> None:
    """From now on SIGTERM raises RunStopped, and Ctrl-C, unless it is ignored, KeyboardInterrupt, in the main thread."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _stop)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    global _told
    _told = number
    raise KeyboardInterrupt if number == signal.SIGINT else RunStopped(number)


def forget_signals() -> None:
    """What they asked for is done."""
    global _told
    _told = None


def stop_if_told() -> None:
    """Raise it again: what a signal raises in a destructor, or while somebody's module is imported, may get lost there."""
    if _told is not None:
        _stop(_told, None)


class StopRequest:
    """A context in which signals of these `kinds` do not end the process but are remembered: `number` is the signal, None without
    one. The same signal a second time ends it as ever. (Ctrl-C in torchrun's terminal reaches a rank as both.)"""

    def __init__(self, *kinds: int) -> None:
        self.kinds = kinds or (signal.SIGTERM, signal.SIGINT)
        self.number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        stop_if_told()
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are somebody else's
        for kind in self.kinds:
            if (handler := signal.getsignal(kind)) != signal.SIG_IGN:  # the launcher takes Ctrl-C for its ranks
                self._before[kind] = handler  # before `_take` may be called
                signal.signal(kind, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.number is not None

    def _take(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number
        signal.signal(number, self._before[number])  # type: ignore[arg-type]


@contextmanager
def importing() -> Iterator[None]:
    """What a signal asks for waits until modules are imported: raised in the midst of one that is written in C++ it aborts the
    process (pybind11), or gets lost."""
    with StopRequest() as request:
        yield
    if request.number is not None:
        _stop(request.number, None)
