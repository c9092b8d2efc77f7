"""What is going on, for people, on standard error: on a terminal a line that is kept up to date; elsewhere (a pipe, nohup, SLURM)
a line every few seconds, so that a log can be followed."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

FIRST_SECONDS = 1.0  # what is over sooner is not mentioned in a log
OFTEN_SECONDS, SELDOM_SECONDS = 5.0, 60.0  # between the lines of a log: at first, and when hours have passed


def say(message: str, style: str = "") -> None:
    """One line on standard error."""
    Console(stderr=True).print(message, style=style, markup=False, highlight=False, soft_wrap=True)


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
    `shown`: false on ranks that leave speaking to another."""

    def __init__(
        self, title: str, total: int | None = None, *, done: int = 0, lasting: bool = False, shown: bool = True
    ) -> None:
        self.title, self.total, self.start, self.done = title, total, done, done
        self.text = ""
        self._lasting, self._began = lasting, time.monotonic()
        self._bar = self._log = None
        if shown and sys.stderr.isatty():
            self._bar = _bar(total is not None, lasting)
            self._task = self._bar.add_task(title, total=total, completed=done, text="")
        elif shown:
            self._log = _Log(self)

    def __enter__(self) -> Activity:
        self._began = time.monotonic()
        for shown in (self._bar, self._log):
            if shown is not None:
                shown.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._log is not None:
            self._log.stop(last_line=kind is None and self._lasting)

    def say(self, text: str) -> None:
        """What is being done now, or what is known so far."""
        self.text = text
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, text=text)

    def advance(self, text: str = "") -> None:
        """One part more is done."""
        self.done += 1
        self.say(text)

    def line(self) -> str:
        """All of it in a line: `measuring fast: 13 of 40, layer 3 of 10, 2 samples; 12 s so far, about 25 s left`."""
        passed, parts = time.monotonic() - self._began, self.done - self.start
        counted = f"{self.done} of {self.total}" if self.total is not None else ""
        what = ", ".join(part for part in (counted, self.text) if part)
        times = f"{duration(passed)} so far"
        if self.total is not None and parts and self.done < self.total:
            times += f", about {duration(passed / parts * (self.total - self.done))} left"
        return f"{self.title}{f': {what}' if what else ''}; {times}"


def _bar(counted: bool, lasting: bool) -> Progress:
    columns: list[ProgressColumn] = [TextColumn("{task.description}", table_column=Column(no_wrap=True))]
    if counted:
        columns += [BarColumn(bar_width=20), MofNCompleteColumn(table_column=Column(no_wrap=True))]
    else:
        columns.append(SpinnerColumn())
    columns.append(TimeElapsedColumn(table_column=Column(no_wrap=True)))
    if counted:
        columns.append(TimeRemainingColumn(table_column=Column(no_wrap=True)))
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns.append(TextColumn("{task.fields[text]}", table_column=text, markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=not lasting, expand=True)


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
        while not self._over.wait(pause):
            say(self.activity.line())
            pause = min(SELDOM_SECONDS, max(OFTEN_SECONDS, (time.monotonic() - began) / 20))
