"""Part 7: the tests, with the card visible to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.gpu.page import Rows, Say
from bench.gpu.subject import Subject

ROOT = Path(__file__).resolve().parents[2]
ENDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
ALONE = re.compile(rf"(\S+::.*?) ({ENDS})\b")  # a line of `pytest -v`: the test, then how it ended
BESIDE = re.compile(rf"\[gw\d+\] \[ *\d+%\] ({ENDS}) (\S+::.*)")  # where tests run side by side, the other way round
SUMMARY = re.compile(r"(=+ )?(\d+ (passed|failed|error|skipped|deselected|warning|xfailed|xpassed)|no tests ran)")
MOST_ROWS = 40


def suite(subject: Subject, say: Say) -> Rows:
    """pytest's last line, and a row for each test that failed."""
    if subject.tests is None:
        return [{"what": "not run", "found": "`--tests` runs the tests"}]
    log = Path(subject.folder) / "tests.log"
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider", *subject.tests]
    say(f"pytest, for {subject.tests_seconds:g} s at most")
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(subject.tests_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return rows_of(log.read_text(errors="replace"), code, subject.tests_seconds)


def rows_of(said: str, code: int | None, limit_seconds: float) -> Rows:
    """What pytest said, by its exit code (None: it was ended at its limit, and has said no summary)."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code is None:
        ended = _ended(lines)
        counts = Counter(how for how, _ in ended)
        so_far = ", ".join(f"{count} {how.lower()}" for how, count in counts.items()) or "nothing"
        rows: Rows = [{"what": "pytest", "found": f"not over after {limit_seconds:g} s; so far: {so_far}", "ok": False}]
        failed = [(how.lower(), test) for how, test in ended if how in ("FAILED", "ERROR")]
    else:
        summary = next((line for line in reversed(lines) if SUMMARY.match(line)), lines[-1] if lines else "it said nothing")
        rows = [{"what": "pytest", "found": summary.strip("= "), "ok": code == 0}]
        told = [line.split(maxsplit=1) for line in lines if line.startswith(("FAILED ", "ERROR "))]
        failed = [(how.lower(), test) for how, test in told]
    rows += [{"what": how, "found": test} for how, test in failed[:MOST_ROWS]]
    if len(failed) > MOST_ROWS:
        rows.append({"what": "more", "found": f"{len(failed) - MOST_ROWS} others failed"})
    return rows


def _ended(lines: list[str]) -> list[tuple[str, str]]:
    """(how it ended, test) of each line that says so."""
    alone = [(match[2], match[1]) for match in map(ALONE.match, lines) if match]
    return alone + [(match[1], match[2]) for match in map(BESIDE.match, lines) if match]
