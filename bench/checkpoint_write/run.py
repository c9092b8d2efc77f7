"""A checkpoint written and loaded, before and now: seconds, and memory beside the state itself.

python -m bench.checkpoint_write.run [--rounds N] [--readme]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.beside import NEW, OLD, Figures, by_turns, checkouts, in_words
from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main

HERE = Path(__file__).parent
WIDTH, LAYERS = 2048, 10
BOUNDS = ("a copy in memory", "torch.save", "the digest alone", "writing alone, until it is on the disk")
FIGURES = ("seconds", "processor seconds", "MiB more at most")
console = Console(width=200)


def rows(found: dict[str, list[Figures]]) -> list[list[str]]:
    """Lines of the table: what bounds a checkpoint, then a checkpoint."""
    every = [*found[OLD], *found[NEW]]
    lines = [[f"{bound}: seconds", *[in_words([one[bound] for one in every])] * 2] for bound in BOUNDS]
    for what in ("save", "load"):
        for figure in FIGURES:
            key, form = f"{what}: {figure}", ".0f" if "MiB" in figure else ".2f"
            lines.append([key, *(in_words([one[key] for one in found[name]], form) for name in (OLD, NEW))])
    return lines


def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Of each checkout, by turns.")] = 5,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Save and load by turns, each time in a new process."""
    where = environment()
    with checkouts() as folders:
        found = by_turns(HERE / "worker.py", [str(WIDTH), str(LAYERS)], folders, rounds)
    size = found[NEW][0]["MB"]
    text = markdown(["", OLD, NEW], rows(found))
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        replace_table(HERE / "README.md", "checkpoint", f"{size:.0f} MB, {rounds} rounds; {where}.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
