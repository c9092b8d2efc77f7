"""How the command shows things on standard error: colours, and a bar for what takes a while. And what several commands are told
of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
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
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from hetpipe.files.screen import Screen
from hetpipe.files.units import human_bytes
from hetpipe.processes import progress
from hetpipe.processes.progress import LOG, Activity, Seen

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print what each device did in a step, and the memory of each.")
]
STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red"}


@contextmanager
def nothing_else(wanted: bool) -> Iterator[None]:
    """While JSON is `wanted` on standard output, what ranks and libraries write there (gloo's connections in torch 2.8) goes to
    standard error."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def install_bars() -> None:
    """Show records of the logger in colour, and activities as bars."""
    LOG.handlers[:] = [Coloured()]
    progress.bars = ActivityBar


def install_watching() -> None:
    """Show records in colour, activities as bars, and every device of a run."""
    install_bars()
    progress.watched = True


class Coloured(logging.Handler):
    """Prints each record in the colour of its level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        console, style = Screen(stderr=True), STYLES.get(record.levelno, "")
        console.print(record.getMessage(), style=style, highlight=False, soft_wrap=True)


class ActivityBar:
    """A line that is kept up to date; it stays at the end where the activity is `lasting`."""

    def __init__(self, activity: Activity) -> None:
        self._activity, counted = activity, activity.total is not None
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
        self._progress = Progress(*columns, console=Screen(stderr=True), transient=not activity.lasting, expand=True)
        self._task = self._progress.add_task(activity.title, total=activity.total, completed=activity.done, text="")
        self._shown: Progress | Live = self._progress
        if activity.devices is not None:  # these are looked at in the thread that shows them
            console = self._progress.console
            self._shown = Live(get_renderable=self._panel, console=console, refresh_per_second=1, transient=not activity.lasting)

    def _panel(self) -> RenderableType:
        seen = self._activity.devices() if self._activity.devices is not None else []
        return Group(seen_table(seen[: self._progress.console.height - ROOM]), self._progress)

    def start(self) -> None:
        """Show it."""
        self._shown.start()

    def update(self) -> None:
        """Show how far it is."""
        self._progress.update(self._task, completed=self._activity.done, text=self._activity.text)

    def stop(self) -> None:
        """Take it away, or leave its last state."""
        self._shown.stop()


ROOM = 4  # lines of a terminal beside those of devices


def seen_table(seen: Sequence[Seen]) -> Table:
    """Devices, a line each."""
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("stage", "device", "layers", "busy", "", "memory", ""):
        table.add_column(name, no_wrap=True, justify="right" if name in ("busy", "memory") else "left")
    table.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    for s in seen:
        busy = f"{s.busy:.0%}" if s.busy is not None else ""
        held = human_bytes(s.peak_bytes) if s.peak_bytes is not None else ""
        limit = f"of {human_bytes(s.memory_bytes)}" if s.peak_bytes is not None and s.memory_bytes else ""
        bar = ProgressBar(total=1.0, completed=s.busy, width=12) if s.busy is not None else ""
        table.add_row(s.stage, s.device, s.layers, busy, bar, held, limit, s.doing)
    return table
