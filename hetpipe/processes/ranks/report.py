"""What a rank says when it ends, and the error that a command ends with when one fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetpipe.files.messages import clipped, cut, exit_code
from hetpipe.processes.pulse import cause, is_of_another
from hetpipe.processes.stopping import RunError, RunStopped
from hetpipe.processes.whereabouts import resume, whereabouts

_WRAPPERS = ("failed to run forward:", "Failed to run stage backward:")
MOST_OF_A_LINE = 1_000  # characters of a traceback


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says when it ends: its result, or its error: the message, where the rank was, the line of code that raised
    it, what the run can go on from, the traceback, and the code with which a command ends after it. `where` and `line`
    are empty for an error of all ranks. `cause`: see `Beat`."""

    rank: int
    time: float
    result: Any = None
    error: str | None = None
    code: int = 1
    where: str = ""
    line: str = ""
    resume: str = ""
    trace: str = ""
    stopped: RunStopped | None = None
    cause: str | None = None

    @property
    def of_another(self) -> bool:
        """Whether the error only says that another rank is gone or late."""
        return self.cause is not None

    @property
    def last_words(self) -> tuple[str | None, str | None]:
        """What a rank leaves with its last sign of life: its own error, or what it knows of another rank's (see `Beat`)."""
        return (None, self.cause) if self.of_another else (self.error, None)


class RankFailure(RuntimeError):
    """A rank failed; the message names rank, stage and device. `report` (None if it ended without one) has the code to exit with
    and the traceback; `resume` is what the run can go on from; `lost`: devices whose processes ended, or stood still, without a
    word."""

    def __init__(self, message: str, report: Report | None, resume: str = "", lost: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.report, self.resume, self.lost = report, resume, tuple(lost)

    @property
    def exit_code(self) -> int:
        """That of the rank's own error."""
        return self.report.code if self.report is not None else 1


def report_of(error: BaseException, rank: int) -> Report:
    """What this rank says of the error that ends it."""
    root = root_cause(error)
    of_all = isinstance(root, RunError)
    return Report(
        rank=rank,
        time=time.time(),
        error=clipped(str(root) if exit_code(root) != 1 or of_all else f"{type(root).__name__}: {root}"),
        code=exit_code(root),
        where="" if of_all else whereabouts(rank),
        line="" if of_all else line_of(root),
        resume=resume(),
        trace=trace_of(error),
        stopped=root if isinstance(root, RunStopped) else None,
        cause="" if is_of_another(root) else None,
    )


def with_cause(report: Report, error: BaseException) -> Report:
    """Of an error that only says that another rank is gone or late: a report that names that one, if it can be found out."""
    words = cause(root_cause(error)) if report.of_another else None
    return report if words is None else replace(report, error=words, cause=words, where="", line="")


def root_cause(error: BaseException) -> BaseException:
    """What a stage itself raised: torch's pipelining wraps it in a RuntimeError with a message full of tensor dumps."""
    while type(error) is RuntimeError and error.__cause__ is not None and any(text in str(error) for text in _WRAPPERS):
        error = error.__cause__
    return error


def trace_of(error: BaseException) -> str:
    """Its traceback, each line cut."""
    return "".join(f"{cut(line, MOST_OF_A_LINE)}\n" for line in "".join(traceback.format_exception(error)).splitlines())


def line_of(error: BaseException) -> str:
    """The innermost line of code that is in no installed package."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename and f.line]
    return cut(f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}") if frames else ""
