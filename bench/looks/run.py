"""Looks at replayed models, and building and loading them, by their layers: before and now.

python -m bench.looks.run [--rounds N] [--layers 4,16,28,80] [--readme]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.beside import BEFORE, NEW, OLD, Figures, by_turns, checkouts, in_words
from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main

HERE = Path(__file__).parent
NAMES = (
    "layers",
    "trains",
    "stages",
    "a build: before",
    "now",
    "loading: before",
    "now",
    "boundaries: before",
    "now",
    "a look: before",
    "now",
    "in steps: before",
    "now",
    "a later look: now",
    "memory of a look: before",
    "now",
)
console = Console(width=200)


def row(layers: int, adapters: str, stages: int, found: dict[str, list[Figures]]) -> list[str]:
    """One row of the table."""
    cells = [str(layers), {"lora": "LoRA", "plain": "all"}[adapters], str(stages)]
    for name, form in (("build", ".2f"), ("loading", ".2f"), ("boundaries", ".2f"), ("look", ".2f"), ("steps a look", ".1f")):
        cells += [in_words([each[name] for each in found[side]], form) for side in (OLD, NEW)]
    cells.append(in_words([each["later look"] for each in found[NEW]]))
    sizes = [in_words([each["bytes of a look"] / 2**20 for each in found[side]], ".0f") for side in (OLD, NEW)]
    return cells + sizes


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Of each row.")] = 3,
    layers: Annotated[str, typer.Option(help="How many layers, with commas.")] = "4,16,28,80",
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into the README.")] = False,
) -> None:
    """Measure, and show."""
    where, rows = environment(), list[list[str]]()
    with checkouts() as folders:
        for count in map(int, layers.split(",")):
            for adapters in ("plain", "lora"):
                for stages in (1, 3):
                    found = by_turns(HERE / "worker.py", [str(count), adapters, str(stages)], folders, rounds)
                    rows.append(row(count, adapters, stages, found))
                    console.print(*rows[-1], markup=False)
    table = markdown(NAMES, rows, words=2)
    console.print(table, markup=False)
    if readme:
        replace_table(HERE / "README.md", "looks", f"{table}\n{where}; before: {BEFORE}; {rounds} rounds by turns.")


if __name__ == "__main__":
    main(lambda: typer.run(run))
