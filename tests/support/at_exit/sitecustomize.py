"""Imported by every Python that has this folder in PYTHONPATH: tells which threads of gloo's are still there when the interpreter
of a script that did its work begins to end. One that is just then letting go of a message aborts the process, now and then."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from pathlib import Path


def _threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sorted(name for name in names if "gloo" in name)


def _tell() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # after an exception nothing is waited for
    deadline = time.monotonic() + 1.0  # the system shows a thread a little longer than it can be waited for
    while (left := _threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        sys.stderr.write(f"threads left at exit: {left}\n")


atexit.register(_tell)  # the first, and so the last to be called
