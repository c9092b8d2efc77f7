"""How a command ends: its exit code, and its last words, which say what went wrong and how to go on.

Exit codes: 0 done, 2 the input is wrong, 3 no plan fits, 128 + n stopped by signal n, 1 anything else."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from hetpipe.cli.terminal import install_bars
from hetpipe.files.messages import InputError, clipped, exit_code, visible
from hetpipe.processes.environment import launched, own_rank
from hetpipe.processes.progress import debugging, say, show_with
from hetpipe.processes.pulse import LAUNCHED, first_to_say, others_may_wait, stop_pulse
from hetpipe.processes.ranks.launch import end_server
from hetpipe.processes.ranks.report import RankFailure, Report, report_of, with_cause
from hetpipe.processes.stopping import RunError, RunStopped, forget_signals, heed_signals, stop_if_told
from hetpipe.processes.whereabouts import resume


def main(run: Callable[[], object], instead: Callable[[Sequence[str]], str] = lambda _: "") -> NoReturn:
    """Run a command line and end the process with its exit code. `instead` says what to type in place of one that is refused."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be characters
    show_with(install_bars)
    own, of_another = None, None  # the error that ends this process, or another rank's
    try:
        heed_signals()
        stop_if_told()
        try:
            _look_here()
            run()
        except Exception:
            stop_if_told()  # `class` makes a RuntimeError of what a signal raises in a __set_name__, and imports make others
            raise
        code = 0
    except (SystemExit, KeyboardInterrupt) as stop:  # typer makes the former of the latter
        given = stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        code = given if isinstance(given, int) else int(given is not None)
        own = f"exit code {code}" if code else None
        if code == 128 + signal.SIGINT:
            _say_once("stopped by Ctrl-C")
        if code == 2 and (hint := instead(sys.argv[1:])):  # the usage was wrong; an InputError is none of these
            say(hint)
    except (Exception, RunStopped) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, to what is left of a job that fails
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:  # other writing names its file
            error = RunError(_unwritten(error))
        code = exit_code(error)
        report = with_cause(report_of(error, own_rank()), error)
        own, of_another = report.last_words
        _print(ending_words(error, report, code), report, error)
    code = _flushed(code)
    forget_signals()
    if launched():
        # No destructors: after a failure, process groups would wait in them for peers that are gone; after success, they
        # end a process now and then with "terminate called without an active exception", which torchrun calls a failure.
        stop_pulse(own, of_another)
        if own is not None and others_may_wait():
            from hetpipe.processes.rendezvous import leave_word  # it imports torch, which takes a while

            leave_word(own)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    end_server()
    sys.exit(code)


def _open_streams() -> None:
    """Standard streams that are closed (`2>&-`) lead nowhere. Else the next files and sockets that are opened get their numbers,
    and what a library prints goes into these."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one, for ranks, too
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _flushed(code: int) -> int:
    """The exit code when all is written: as a shell gives it for a process that wrote to a pipe that nobody reads any more, and 1
    where results could not be written."""
    broken = code == 1 and type(sys.stdout).__name__ == "PacifyFlushWrapper"  # typer's click has seen it, and left this
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        broken = True
    except OSError as error:
        if code == 0:
            say(f"error: {_unwritten(error)}", logging.ERROR)
        code = code or 1
    else:
        return 128 + signal.SIGPIPE if broken else code
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
    return 128 + signal.SIGPIPE if broken else code


def _unwritten(error: OSError) -> str:
    return f"cannot write to standard output: {error.strerror}"


def _look_here() -> None:
    """A job's package.module:function may lie in the current folder, as under python -m. InputError if that is gone."""
    try:
        here = os.getcwd()
    except OSError:
        raise InputError("the current folder has been deleted. Change into one that exists (cd)") from None
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def ending_words(error: Exception | RunStopped, report: Report, code: int) -> str:
    """What is said of it, last of all that is printed."""
    if isinstance(error, RunStopped):
        return f"{error}; {how_to_resume(error.resume)}"
    if code != 1:
        words = clipped(str(error.report and error.report.error) if isinstance(error, RankFailure) else str(error))
        where = error.resume if isinstance(error, RankFailure) else resume()
        return f"{words}; when that is fixed, {how_to_resume(where)}" if where else words
    if isinstance(error, RankFailure):
        return f"{error}; {how_to_resume(error.resume)}"
    if not launched():
        return str(report.error)
    where = f"{report.where}: " if report.where else ""
    return f"{where}{report.error}; {how_to_resume(resume())}"


def how_to_resume(where: str) -> str:
    """The command that takes the run up again, and from where it goes on."""
    if os.environ.get("TORCHELASTIC_RUN_ID") is not None:
        again = "start the same torchrun command again on every host"
    else:
        again = f"start it again: {shlex.join(['hetpipe', *sys.argv[1:]])}"
    if where:
        return f"{again}; it resumes from {where}"
    return f"nothing is saved so far (a job's checkpoint section says where and when); {again}"


def _print(words: str, report: Report, error: Exception | RunStopped) -> None:
    """Write them: once in each agent's log, with the line of code that raised it (HETPIPE_LOG=debug: the whole traceback)."""
    if isinstance(error, RunStopped):
        _say_once(words)
        return
    raised = error.report if isinstance(error, RankFailure) else report
    if raised is not None and (exit_code(error) == 1 or debugging()):
        if debugging():
            sys.stderr.write(visible(raised.trace))
        elif raised.line and not raised.of_another:
            say(f"{raised.line}  (HETPIPE_LOG=debug shows the whole traceback)")
    _tell_torchrun(words)
    _say_once(words, "error: ", logging.ERROR)


def _say_once(words: str, before: str = "", level: int = logging.INFO) -> None:
    if first_to_say(words):
        say(f"{before}{words}", level)


def _tell_torchrun(words: str) -> None:
    """torchrun's own report, which follows, shows what a rank leaves in this file."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None and LAUNCHED not in os.environ:
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as out:
            more = {"py_callstack": words, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": words, "extraInfo": more}}, out)
