"""Programs in processes of their own, which measure what one process alone takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST_TOLD = 2000  # characters of what a program said that failed


def said(words: Sequence[str], variables: Mapping[str, str] | None = None, *, folder: Path = ROOT, checkout: Path = ROOT) -> str:
    """What `python words…` prints in a folder, with hetpipe and bench of a checkout. RuntimeError if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), **(variables or {})}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stdout + done.stderr).strip()[-MOST_TOLD:]
        raise RuntimeError(f"{' '.join(words)} in {folder} ended with {done.returncode}: {told}")
    return done.stdout


def figures(words: Sequence[str], checkout: Path = ROOT) -> Any:
    """The JSON in the last line of what a program prints."""
    return json.loads(said(words, folder=checkout, checkout=checkout).splitlines()[-1])


def each_apart(module: str, each: Iterable[Sequence[str]], jobs: int) -> Iterator[dict[str, Any]]:
    """The figures of `module --here words…` for several words, so many processes at a time, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda words: figures(["-m", module, "--here", *words]), each)
