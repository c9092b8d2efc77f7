"""What is going on, for people: records of the logger "hetpipe", which go to standard error unless a program has given it
handlers of its own. What takes a while says so every few seconds, so that a log can be followed; on a terminal whoever runs the
program may show a bar instead (`show_with`)."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from hetpipe.files.messages import visible
from hetpipe.files.units import human_bytes
from hetpipe.processes.whereabouts import begin_activity, end_activity

FIRST_SECONDS = 1.0  # what is over sooner is not mentioned in a log
OFTEN_SECONDS, SELDOM_SECONDS = 5.0, 60.0  # between the lines of a log: at first, and when hours have passed
SOON_SECONDS = 0.1  # after which an activity is mentioned where nothing was for long
MOST_IN_LINE = 8  # devices
LOG = logging.getLogger("hetpipe")


class _StandardError(logging.Handler):
    """Standard error, whatever that is when something is said."""

    def emit(self, record: logging.LogRecord) -> None:
        """A line."""
        sys.stderr.write(f"{record.getMessage()}\n")


if not LOG.handlers:
    LOG.addHandler(_StandardError())
    LOG.propagate = False
if LOG.level == logging.NOTSET:
    LOG.setLevel(logging.INFO)


_said: float | None = None  # when something was said last
_shown: list[Activity] = []  # activities that are shown, the innermost last


def say(message: str, level: int = logging.INFO) -> None:
    """One message for people."""
    global _said
    _said = time.monotonic()
    LOG.log(level, "%s", visible(message))


def warn(message: str) -> None:
    """One message on what a user might not expect."""
    say(message, logging.WARNING)


class Bar(Protocol):
    """What shows an activity on a terminal."""

    def start(self) -> None:
        """It begins."""
        ...

    def update(self) -> None:
        """It has another text, or is further."""
        ...

    def stop(self) -> None:
        """It is over."""
        ...


class Seen(NamedTuple):
    """A device of a run as it is now: its stage and layers, what it does, the share of the last step in which it worked, the most
    bytes that it has held, and its memory. None: not known."""

    device: str
    stage: str
    layers: str
    doing: str
    busy: float | None
    peak_bytes: int | None
    memory_bytes: int | None


watched = False  # whether people want to see each device of a run
bars: Callable[[Activity], Bar] | None = None
display: Callable[[], None] | None = None  # what `show_with` was given, which ranks that are started call, too


def show_with(install: Callable[[], None]) -> None:
    """Let `install`, a function of a module, say how this process and the ranks that it starts show things."""
    global display
    display = install
    install()


def debugging() -> bool:
    """Whether errors are shown with all that Python knows of them (HETPIPE_LOG=debug)."""
    return os.environ.get("HETPIPE_LOG", "").lower() == "debug"


def duration(seconds: float) -> str:
    """
    >>> duration(7.4), duration(200), duration(7500)
    ('7 s', '3 min 20 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Activity:
    """Something that takes a while: a context. `total`: of how many parts (steps, layers), `done` of which were done before;
    without it nobody knows how long it takes. `lasting`: its last line stays on the screen, and is in a log however short it was.
    `shown`: false on ranks that leave speaking to another; these say it with their signs of life. `devices`: looks at the devices
    that are at work, for who watches. `inner`: within another that is shown, it is told as what that one does."""

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        done: int = 0,
        lasting: bool = False,
        shown: bool = True,
        devices: Callable[[], Sequence[Seen]] | None = None,
        inner: bool = False,
    ) -> None:
        self.title, self.total, self.start, self.done = title, total, done, done
        self.text, self.devices, self.shown = "", devices, shown
        self.lasting, self._began = lasting, time.monotonic()
        self._outer = _shown[-1] if shown and inner and _shown else None
        alone = shown and self._outer is None
        self._bar = bars(self) if alone and bars is not None and sys.stderr.isatty() else None
        self._log = _Log(self) if alone and self._bar is None else None

    def __enter__(self) -> Activity:
        self._began = time.monotonic()
        begin_activity(self.what)
        if self.shown:
            _shown.append(self)
        for shown in (self._bar, self._log):
            if shown is not None:
                shown.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end_activity(self.what)
        if self in _shown:
            _shown.remove(self)
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.stop(last_line=kind is None and self.lasting)

    def say(self, text: str) -> None:
        """What is being done now, or what is known so far."""
        self.text = text
        if self._bar is not None:
            self._bar.update()
        if self._outer is not None:
            self._outer.say(self.what())

    def advance(self, text: str = "") -> None:
        """One part more is done."""
        self.done += 1
        self.say(text)

    def what(self) -> str:
        """`measuring fast: 13 of 40, layer 3 of 10, 2 samples`."""
        counted = f"{self.done} of {self.total}" if self.total is not None else ""
        what = ", ".join(part for part in (counted, self.text) if part)
        return f"{self.title}{f': {what}' if what else ''}"

    def line(self) -> str:
        """All of it in a line: `measuring fast: 13 of 40, layer 3 of 10, 2 samples; 12 s so far, about 25 s left`."""
        passed, parts = time.monotonic() - self._began, self.done - self.start
        times = f"{duration(passed)} so far"
        if self.total is not None and parts and self.done < self.total:
            times += f", about {duration(passed / parts * (self.total - self.done))} left"
        return f"{self.what()}; {times}"


def seen_text(seen: Sequence[Seen]) -> str:
    """Devices in a line: `box/0 95% busy, 34.7 MiB of 48.0 MiB; …`. Of many, the least busy, the busiest and the fullest."""
    if len(seen) > MOST_IN_LINE:
        busy = sorted((s for s in seen if s.busy is not None), key=lambda s: s.busy or 0.0)
        full = max(seen, key=lambda s: (s.peak_bytes or 0) / (s.memory_bytes or math.inf))
        seen = list(dict.fromkeys([*busy[:1], *busy[-1:], full]))
    texts = []
    for s in seen:
        of = f" of {human_bytes(s.memory_bytes)}" if s.memory_bytes else ""
        parts = [f"{s.busy:.0%} busy"] if s.busy is not None else []
        parts += [f"{human_bytes(s.peak_bytes)}{of}"] if s.peak_bytes is not None else []
        texts += [f"{s.device} {', '.join(parts)}"] if parts else []
    return "; ".join(texts)


class _Log:
    """The lines of an activity where there is no terminal."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, last_line: bool) -> None:
        self._over.set()
        self._thread.join()
        if last_line:
            say(self.activity.line())

    def _run(self) -> None:
        began, pause = time.monotonic(), FIRST_SECONDS
        if _said is not None and began - _said > OFTEN_SECONDS:
            pause = min(pause, SOON_SECONDS)  # what is short one by one may be long in a row
        while not self._over.wait(pause):
            say(self.activity.line())
            if self.activity.devices is not None and (text := seen_text(self.activity.devices())):
                say(f"  {text}")
            pause = min(SELDOM_SECONDS, max(OFTEN_SECONDS, (time.monotonic() - began) / 20))
