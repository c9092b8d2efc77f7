"""How long does the first plan of an installation take, before and now, with nothing compiled yet and with all compiled?

python -m bench.first_plan.run [--rounds N] [--devices 1,2,4,8,16] [--readme]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.beside import BEFORE, Figures, checkouts, in_words, run_worker
from bench.tables import environment, markdown, replace_table
from hetpipe.cli.exits import main

HERE = Path(__file__).parent
WORKER = HERE / "worker.py"
EMPTY, FILLED = "empty", "filled"
PARTS = ("rules: wall", "rules: processor", "plan: wall", "plan: processor")
NAMES = ("devices", "what numba keeps", "", *(f"{part} s" for part in PARTS), "processor s until its end")
console = Console(width=200)


def both(devices: str, checkout: Path) -> dict[str, Figures]:
    """The figures of a plan with nothing kept by numba, and of one with all that can be kept."""
    with tempfile.TemporaryDirectory() as cache:
        variables = {"NUMBA_CACHE_DIR": cache}
        empty = run_worker(WORKER, [devices], checkout, variables)
        run_worker(WORKER, ["ready"], checkout, variables)
        return {EMPTY: empty, FILLED: run_worker(WORKER, [devices], checkout, variables)}


def rows_of(devices: str, folders: dict[str, Path], rounds: int) -> list[list[str]]:
    """The rows of a cluster; every second round begins with the other checkout."""
    found = {name: list[dict[str, Figures]]() for name in folders}
    for number in range(rounds):
        names = list(folders)
        for name in names[::-1] if number % 2 else names:
            found[name].append(both(devices, folders[name]))
    steps = {each[kept]["step"] for runs in found.values() for each in runs for kept in (EMPTY, FILLED)}
    if len(steps) > 1:
        raise RuntimeError(f"the plans for {devices} devices differ: steps of {sorted(steps)} s")
    return [
        [devices, kept, name, *(in_words([each[kept][part] for each in runs], ".1f") for part in (*PARTS, "processor seconds"))]
        for kept in (EMPTY, FILLED)
        for name, runs in found.items()
    ]


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Of each cluster.")] = 2,
    devices: Annotated[str, typer.Option(help="With commas.")] = "1,2,4,8,16",
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into the README.")] = False,
) -> None:
    """Measure, and show."""
    where, rows = environment(), list[list[str]]()
    with checkouts() as folders:
        for each in devices.split(","):
            for row in rows_of(each, folders, rounds):
                rows.append(row)
                console.print(*row, markup=False)
    if readme:
        text = f"{markdown(NAMES, rows, words=3)}\n{where}; before: {BEFORE}; {rounds} rounds by turns."
        replace_table(HERE / "README.md", "first plan", text)


if __name__ == "__main__":
    main(lambda: typer.run(run))
