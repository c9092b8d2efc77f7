"""What the programs here share: names that an option lists, tables of figures as Markdown, and what they were measured on."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hetpipe.files.messages import InputError, nearest
from hetpipe.files.writing import write_text


def chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The names of a list with commas between them. InputError for one that is not known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{option}: unknown value {name!r}{nearest(name, known)}")
    return names


def environment() -> str:
    """Where figures come from, in a line."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} processors ({platform.machine()}), load {load:.1f} at the start, Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )


def geometric_mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return statistics.geometric_mean(values) if values else math.nan


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A table whose first `words` columns are words, the others numbers."""
    ends = [":--"] * words + ["--:"] * (len(names) - words)
    lines = [names, ends, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def replace_table(path: Path, name: str, text: str) -> None:
    """Put the text between `<!-- name -->` and `<!-- end of name -->`. ValueError if they are not there."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text("utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not found or not last:
        raise ValueError(f"{path} has no {begin} with {end} after it")
    write_text(path, f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
