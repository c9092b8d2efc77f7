"""Pieces of HTML, from texts that may hold anything."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from hetpipe.show.picture.canvas import printable


def escaped(text: str) -> str:
    """The text, with nothing in it that HTML reads as its own."""
    return html.escape(printable(text))


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph, perhaps of a class."""
    return f"<p{f' class={kind!r}' if kind else ''}>{escaped(text)}</p>"


def table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], *, label: str, marked: Sequence[int] = (), text: bool = False
) -> str:
    """A table that scrolls by itself where it is too wide; the first column names the rows; `marked` rows stand out. Cells hold
    numbers, or `text`, as a long one does. A column in which nothing stands is left out."""
    kept = [c for c in range(len(heading)) if c == 0 or any(row[c] for row in rows)]
    heading, rows = [heading[c] for c in kept], [[row[c] for c in kept] for row in rows]
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in heading)
    body = []
    for i, row in enumerate(rows):
        first = f'<th scope="row">{escaped(row[0])}</th>' if row else ""
        kinds = [" class=text" if text or len(cell) > 30 else "" for cell in row]
        cells = "".join(f"<td{kind}>{escaped(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        body.append(f"<tr{' class=marked' if i in marked else ''}>{first}{cells}</tr>")
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}">{inside}</div>'


def section(name: str, title: str, *parts: str) -> str:
    """A section of the page, of this id."""
    heading = f'<h2 id="{name}-title">{escaped(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{"".join(parts)}</section>'


def data(name: str, value: Any) -> str:
    """Values for the page's script."""
    text = json.dumps(_printable(value), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value
