"""How the command shows things on standard error: colours, and a bar for what takes a while."""

from __future__ import annotations

import logging

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

from hetpipe.processes import progress
from hetpipe.processes.progress import LOG, Activity

STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red"}


def install() -> None:
    """Show records of the logger in colour, and activities as bars."""
    LOG.handlers[:] = [Coloured()]
    progress.bars = ActivityBar


class Coloured(logging.Handler):
    """Prints each record in the colour of its level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        console, style = Console(stderr=True), STYLES.get(record.levelno, "")
        console.print(record.getMessage(), style=style, markup=False, highlight=False, soft_wrap=True)


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
        self._progress = Progress(*columns, console=Console(stderr=True), transient=not activity.lasting, expand=True)
        self._task = self._progress.add_task(activity.title, total=activity.total, completed=activity.done, text="")

    def start(self) -> None:
        """Show it."""
        self._progress.start()

    def update(self) -> None:
        """Show how far it is."""
        self._progress.update(self._task, completed=self._activity.done, text=self._activity.text)

    def stop(self) -> None:
        """Take it away, or leave its last state."""
        self._progress.stop()
