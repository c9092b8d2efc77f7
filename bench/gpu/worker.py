"""A process that runs the parts, so that what one of them breaks is not there for the next: a CUDA error lasts as long as its
process, and what waits for ever can only be ended from outside."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from bench.gpu.page import Rows, Say
from hetpipe.files.messages import clipped

END_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a call gave: rows, or the error and where it was raised."""

    rows: Rows = field(default_factory=list)
    error: str | None = None
    trace: str = ""


@dataclass
class Worker:
    """Runs one call after the other in a process of its own, and takes a new process after a call that failed. A context."""

    _process: SpawnProcess | None = None
    _pipe: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(kill=kind is not None)

    def run(self, call: Callable[..., Rows], *arguments: Any, limit_seconds: float, say: Say) -> Outcome:
        """`call(*arguments, say)`, which may take so long."""
        outcome = self._run(call, arguments, limit_seconds, say)
        if outcome.error is not None:
            self._end(kill=True)
        return outcome

    def _run(self, call: Callable[..., Rows], arguments: tuple[Any, ...], limit_seconds: float, say: Say) -> Outcome:
        process, pipe = self._begin()
        last, deadline = "", time.monotonic() + limit_seconds
        try:
            pipe.send((call, arguments))
            while pipe.poll(max(0.0, deadline - time.monotonic())):
                kind, value = pipe.recv()
                if kind != "say":
                    return value if isinstance(value, Outcome) else Outcome(error=str(value))
                last = value
                say(value)
        except (EOFError, OSError):
            process.join(END_SECONDS)
            return Outcome(error=f"the process that ran it ended with exit code {process.exitcode}{_while(last)}")
        return Outcome(error=f"it had not ended after {limit_seconds:g} s{_while(last)}")

    def _begin(self) -> tuple[SpawnProcess, Connection]:
        if self._process is None or self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()  # so that its end is told here
        return self._process, self._pipe

    def _end(self, *, kill: bool = False) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            if kill:
                self._process.terminate()
            self._process.join(END_SECONDS)
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _while(last: str) -> str:
    return f", the last that it said was: {last}" if last else ""


def _serve(pipe: Connection) -> None:
    """The process: one call after the other, until the other end is closed."""
    signal.signal(signal.SIGINT, lambda *_: None)  # it goes to all of a terminal's processes; the other end ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what a part has started is ended, too
    while True:
        try:
            call, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            outcome = Outcome(rows=call(*arguments, lambda text: pipe.send(("say", text))))
        except Exception as error:
            told = clipped(f"{type(error).__name__}: {error}")
            outcome = Outcome(error=told, trace="".join(traceback.format_exception(error)))
        pipe.send(("end", outcome))
