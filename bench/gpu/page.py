"""The page: a section for each part, with a table of its rows, or the error that ended it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetpipe.files.units import human_bytes, human_seconds

Row = dict[str, Any]
Rows = list[Row]
Say = Callable[[str], None]
MOST_TRACE_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Section:
    """What came out of a part. A key of a row that ends in `_seconds` or `_bytes` has that unit; `ok` says whether what the row
    compares is as it must be (no such key: nothing is compared). `error`: why there are no rows; `trace`: where that was."""

    number: str
    title: str
    about: str
    rows: Rows
    seconds: float
    error: str | None = None
    trace: str = ""

    @property
    def failed(self) -> bool:
        """Whether the part raised, or a number is off."""
        return self.error is not None or any(row.get("ok") is False for row in self.rows)


def as_json(title: str, sections: Sequence[Section]) -> dict[str, Any]:
    """All of it as plain values, in seconds and bytes."""
    plain = [{**asdict(s), "rows": [_plain(row) for row in s.rows], "failed": s.failed} for s in sections]
    return {"title": title, "failed": any(s.failed for s in sections), "sections": plain}


def _plain(row: Row) -> Row:
    """JSON has no infinity: a text."""
    return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def markdown(title: str, sections: Sequence[Section], parts: int) -> str:
    """The page. `parts`: how many sections there are to be."""
    failed = [f"{s.number}. {s.title}" for s in sections if s.failed]
    if failed:
        verdict = f"**Not as it must be:** {'; '.join(failed)}."
    else:
        verdict = "Every part ran, and every number that is compared is as it must be."
    if len(sections) < parts:
        verdict = f"**Not complete:** {len(sections)} of {parts} parts have ended. {verdict if failed else ''}".rstrip()
    return "\n\n".join([f"# {title}", verdict, *(_section(s) for s in sections)]) + "\n"


def _section(section: Section) -> str:
    parts = [f"## {section.number}. {section.title}", section.about]
    if section.error is not None:
        trace = section.trace.rstrip().splitlines()[-MOST_TRACE_LINES:]
        parts.append(f"**This part failed** after {human_seconds(section.seconds)}: {_escaped(section.error)}")
        if trace:
            parts.append("\n".join(["```text", *trace, "```"]))
    elif section.rows:
        parts += [*tables(section.rows), f"It took {human_seconds(section.seconds)}."]
    return "\n\n".join(parts)


def tables(rows: Rows) -> list[str]:
    """The rows in Markdown: a table for those that follow each other and have the same keys, whether or not `ok` is one."""
    return [_table(list(group)) for _, group in itertools.groupby(rows, lambda row: row.keys() - {"ok"})]


def _table(rows: Rows) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numbers = {key for key in keys if any(_is_number(row.get(key)) for row in rows)}
    lines = [_line([_heading(key) for key in keys]), _line(["--:" if key in numbers else ":--" for key in keys])]
    return "\n".join(lines + [_line([cell(key, row.get(key)) for key in keys]) for row in rows])


def cell(key: str, value: Any) -> str:
    """A value as people read it.

    >>> cell("step_seconds", 0.0123), cell("saved_bytes", 2048), cell("error", 0.25), cell("ok", False), cell("ok", None)
    ('12.3 ms', '2.00 KiB', '0.25', '**NO**', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if _is_number(value) and key.endswith("_seconds"):
        return human_seconds(value)
    if _is_number(value) and key.endswith("_bytes"):
        return human_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else _escaped(str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _heading(key: str) -> str:
    return key.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
