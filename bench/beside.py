"""Old beside new: one worker's script by turns on a checkout of an earlier commit and on this one, each time in a new process.

A worker prints one line of JSON as its last: figures by name, among them what it measured of itself. Beside them stand the whole
process's processor seconds (with those of the processes that it waited for), wall seconds, and peak of resident memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).resolve().parent.parent
BEFORE = "85eda18"  # what "before" means in the benches of starts
OLD, NEW = "before", "now"
Figures = dict[str, float]


@contextmanager
def checkouts(commit: str = BEFORE) -> Iterator[dict[str, Path]]:
    """Folders of the commit and of this working tree, by `OLD` and `NEW`."""
    folder = Path(tempfile.mkdtemp(prefix="hetpipe-before-"))
    git = ["git", "-C", str(ROOT), "worktree"]
    try:
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder / "tree"), commit], check=True)
        yield {OLD: folder / "tree", NEW: ROOT}
    finally:
        subprocess.run([*git, "remove", "--force", str(folder / "tree")], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def run_worker(script: Path, arguments: Sequence[str], checkout: Path, extra: Mapping[str, str] | None = None) -> Figures:
    """What the script printed, with its `processor seconds`, `wall seconds` and `peak bytes`; hetpipe is the checkout's.
    RuntimeError, with what it wrote, where it ends with an error."""
    variables = os.environ | {"PYTHONPATH": str(checkout)} | dict(extra or {})
    with tempfile.TemporaryFile("w+") as out:
        began = time.perf_counter()
        process = subprocess.Popen([sys.executable, str(script), *arguments], stdout=out, cwd=checkout, env=variables)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = out.read().splitlines()
    if process.returncode or not lines:
        raise RuntimeError(f"{script.name} {' '.join(arguments)} in {checkout} ended with {process.returncode}: {lines[-5:]}")
    own: Figures = json.loads(lines[-1])
    whole = {"processor seconds": used.ru_utime + used.ru_stime, "wall seconds": wall, "peak bytes": used.ru_maxrss * 1024.0}
    return whole | own


def by_turns(
    script: Path, arguments: Sequence[str], folders: Mapping[str, Path], rounds: int, extra: Mapping[str, str] | None = None
) -> dict[str, list[Figures]]:
    """Each checkout's figures, round by round; every second round begins with the other one."""
    found = {name: list[Figures]() for name in folders}
    for number in range(rounds):
        names = list(folders)
        for name in names[::-1] if number % 2 else names:
            found[name].append(run_worker(script, arguments, folders[name], extra))
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and both quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return middle, low, high


def in_words(values: Sequence[float], form: str = ".2f") -> str:
    """Median, and the quartiles in brackets."""
    return "{:{form}} ({:{form}}–{:{form}})".format(*spread(values), form=form)
