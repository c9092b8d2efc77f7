"""A start of `hetpipe finetune` until its first step, by part: before and now, beside a plain script of transformers and peft.

python -m bench.start.run [--rounds N] [--layers 4,28] [--chats 400,20000] [--ranks 1,4] [--readme]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.beside import BEFORE, NEW, by_turns, checkouts, in_words, run_worker
from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main

HERE = Path(__file__).parent
PARTS = ("imports", "data", "model", "looks", "planning", "loading", "first step", "without measuring", "measuring")
NAMES = ("layers", "chats", "ranks", "start", "", *PARTS, "wall", "peak of a process, MiB")
console = Console(width=220)


def rows_of(folder: Path, case: tuple[int, int, int], folders: dict[str, Path], rounds: int) -> list[list[str]]:
    """The rows of one case: both starts, before and now, and the plain script."""
    head, rows = [str(number) for number in case], list[list[str]]()
    found = by_turns(HERE / "worker.py", [str(folder), str(case[2])], folders, rounds)
    for start, (side, figures) in product(("first", "second"), found.items()):
        cells = [in_words([each.get(f"{start}: {part}", 0.0) for each in figures], ".1f") for part in (*PARTS, "wall")]
        peak = in_words([each[f"{start}: peak"] / 2**20 for each in figures], ".0f")
        rows.append([*head, start, side, *cells, peak])
    plain = [run_worker(HERE / "plain.py", [str(folder)], folders[NEW], {"OMP_NUM_THREADS": "1"}) for _ in range(rounds)]
    seconds = [in_words([each[name] for each in plain], ".1f") for name in ("processor seconds", "wall seconds")]
    rows.append(
        [
            *head,
            "",
            "plain script",
            *[""] * 7,
            seconds[0],
            "",
            seconds[1],
            in_words([each["peak bytes"] / 2**20 for each in plain], ".0f"),
        ]
    )
    return rows


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Of each row.")] = 3,
    layers: Annotated[str, typer.Option(help="With commas.")] = "4,28",
    chats: Annotated[str, typer.Option(help="With commas.")] = "400,20000",
    ranks: Annotated[str, typer.Option(help="With commas.")] = "1,4",
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into the README.")] = False,
) -> None:
    """Measure, and show."""
    where, rows = environment(), list[list[str]]()
    every = product(*(map(int, text.split(",")) for text in (layers, chats)))
    with checkouts() as folders, tempfile.TemporaryDirectory() as scratch:
        for count, many in every:
            folder = Path(scratch, f"{count}-{many}")
            folder.mkdir()
            subprocess.run([sys.executable, str(HERE / "inputs.py"), str(folder), str(count), str(many)], check=True)
            for number in map(int, ranks.split(",")):
                for row in rows_of(folder, (count, many, number), folders, rounds):
                    rows.append(row)
                    console.print(*row, markup=False)
    table = markdown(NAMES, rows, words=5)
    if readme:
        replace_table(HERE / "README.md", "start", f"{table}\n{where}; before: {BEFORE}; {rounds} rounds by turns.")


if __name__ == "__main__":
    main(lambda: typer.run(run))
