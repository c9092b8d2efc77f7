"""How far are times off that are scaled from data sheets?

    python -m bench.what_if.run [--markdown table.md]

Of every card that was measured all measurements are taken away (of its other forms, too, such as the V100 with 32 GB), and its
layer times are scaled from other cards, as `hetpipe what-if` does; then the same with what was measured on it of models that are
built in another way. It needs no data but what is shipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, NamedTuple

import typer

from bench.tables import markdown
from hetpipe.cli.commands import main
from hetpipe.documents.number_types import Precision
from hetpipe.files.writing import write_text
from hetpipe.whatif.cards import known_cards
from hetpipe.whatif.estimate import MeasuredCell, all_measured, estimate, seconds
from hetpipe.whatif.models import measured_model

HEADS = ("card", "precision", "cells", "scaled from", "scaled over measured", "least", "most")
TITLES = ("cards that nobody measured", "cards on which only models that are built in another way were measured")


class Row(NamedTuple):
    """A card at a precision: the cards that it was scaled from, and scaled over measured seconds of each cell."""

    card: str
    precision: Precision
    sources: tuple[str, ...]
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return exp(fmean(map(log, self.ratios)))


def silicon(card: str) -> str:
    """What a card and its other forms share: v100 of v100-16."""
    return card.split("-")[0]


def ratio(cell: MeasuredCell, others: list[MeasuredCell]) -> tuple[str, float]:
    """From which card a cell is scaled without its own, and scaled over measured seconds of all its micro-batch sizes."""
    found = estimate(measured_model(cell.model), cell.tokens, cell.precision, cell.card, known_cards().cards, others)
    return found.source.card, seconds(found.cell, cell.cell) / seconds(cell.cell, found.cell)


def rows(other_models: bool = False) -> Iterator[Row]:
    """Every card and precision that was measured. With `other_models` only what was measured of models that are built alike is
    hidden, on cards of which there is more at that precision."""
    cells = list(all_measured())
    for card, precision in sorted({(m.card, m.precision) for m in cells}):
        others = [m for m in cells if silicon(m.card) != silicon(card)]
        found = []
        for cell in [m for m in cells if (m.card, m.precision) == (card, precision)]:
            beside = [m for m in cells if (m.card, m.precision) == (card, precision) and m.family != cell.family]
            if not other_models:
                found.append(ratio(cell, others))
            elif beside:
                found.append(ratio(cell, others + beside))
        if found:
            sources = tuple(sorted({source for source, _ in found}))
            yield Row(card, precision, sources, tuple(r for _, r in found))


def off(found: list[Row]) -> tuple[float, float]:
    """By which factor, one way or the other, half of the cards are off by more, and the worst is."""
    factors = [max(row.mean, 1 / row.mean) for row in found]
    return median(factors), max(factors)


def cells(row: Row) -> list[str]:
    """A line of the table."""
    numbers = (row.mean, min(row.ratios), max(row.ratios))
    return [row.card, row.precision, str(len(row.ratios)), ", ".join(row.sources), *(f"{x:.2f}" for x in numbers)]


def run(table_file: Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown.")] = None) -> None:
    """Scale every measured card from others."""
    pages = []
    for other_models in (False, True):
        found = list(rows(other_models))
        half, worst = off(found)
        title = f"{TITLES[other_models]}: half are off by more than a factor of {half:.2f}, the worst by {worst:.2f}"
        pages.append(f"{title}\n\n{markdown(HEADS, [*map(cells, found)], words=4)}")
        print(pages[-1])
    if table_file is not None:
        write_text(table_file, "\n".join(pages))


if __name__ == "__main__":
    main(lambda: typer.run(run))
