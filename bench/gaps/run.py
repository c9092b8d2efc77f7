"""How far from the best can the plans of `auto` be, as far as its bound shows? See README.md beside this file."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from bench.beside import NEW, OLD, Figures, by_turns, checkouts
from bench.tables import markdown

WORKER = Path(__file__).with_name("worker.py")
GROUPS = {"up to 8": (1, 8), "9 to 64": (9, 64), "65 and more": (65, 10**6), "all": (1, 10**6)}
Row = dict[str, Figures]


def gap(figures: Figures) -> float:
    """Step over bound, less one."""
    return max(0.0, figures["step"] / figures["bound"] - 1)


def table(rows: list[Row]) -> str:
    """Median and worst gap before and now, and the processor seconds of planning, by devices."""
    lines = []
    for name, (low, high) in GROUPS.items():
        having = [row for row in rows if low <= row[NEW]["devices"] <= high]
        gaps = {at: [gap(row[at]) for row in having] for at in (OLD, NEW)}
        if having:
            cells = [f"{median(gaps[at]):.0%}, {max(gaps[at]):.0%}" for at in (OLD, NEW)]
            seconds = [f"{median(row[at]['planning'] for row in having):.2f}" for at in (OLD, NEW)]
            lines.append([name, str(len(having)), *cells, *seconds])
    heading = ["devices", "draws", "before: median, worst", "now: median, worst", "before: processor s", "now: processor s"]
    return markdown(heading, lines)


def main(
    draws: Annotated[int, typer.Option(help="How many problems are drawn.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the first.")] = 7201,
    rounds: Annotated[int, typer.Option(help="Times that each is planned on each checkout.")] = 1,
    readme: Annotated[bool, typer.Option("--readme", help="Print the table only.")] = False,
) -> None:
    """Print the table; one line a draw before it."""
    rows = list[Row]()
    with checkouts() as folders:
        for number in range(seed, seed + draws):
            found = {name: runs[-1] for name, runs in by_turns(WORKER, [str(number)], folders, rounds).items()}
            if not all("step" in figures for figures in found.values()):
                continue
            rows.append(found)
            each = ", ".join(f"{name} {gap(figures):.0%} of {figures['step']:.4g} s" for name, figures in found.items())
            if not readme:
                print(f"{number}: {found[NEW]['devices']:.0f} devices: {each}", flush=True)
    print(table(rows))


if __name__ == "__main__":
    typer.run(main)
