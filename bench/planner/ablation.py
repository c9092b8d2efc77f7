"""What is each part of `auto` worth? Drawn problems are planned with all of them, and without one at a time.

    python -m bench.planner.ablation [--draws COUNT] [--seed SEED] [--wide] [--only TEXTS] [--jobs COUNT] [-o table.json]

Each problem runs in a process of its own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import typer
from rich.console import Console

from bench.apart import each_apart
from bench.planner.run import drawn
from bench.tables import geometric_mean, markdown
from hetpipe import partitioners
from hetpipe.partitioners import auto
from hetpipe.partitioners.search import assembly, places, planner
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.partitioners.search.floor import cost
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import with_prediction

FOLDER = Path(partitioners.__file__).parent
WHOLE = "all parts"
console = Console(width=160)


class Part(NamedTuple):
    """What is left out: names of a module or class, and what they are instead; without an `owner` of the problem. `modules` serve
    nothing else but `chain`: patterns of files."""

    owner: Any
    instead: dict[str, Any]
    modules: Sequence[str] = ()


def less(**changes: Any) -> dict[str, Any]:
    """Of each effort so much instead."""
    return {"EFFORTS": {name: effort._replace(**changes) for name, effort in EFFORTS.items()}}


PARTS: dict[str, Part] = {
    "the exact search": Part(auto, {"FEW_DEVICES": 0}, ("exact/*", "compositions/*")),
    "the bound, and pipelines from it": Part(planner, less(before=0.0, after=0.0), ("bound/*",)),
    "pipelines from the bound": Part(planner, less(wishes=0)),
    "the second bound": Part(planner, less(after=0.0)),
    "pipelines near an even split": Part(planner, less(even=0)),
    "pipelines of one type": Part(planner, less(pure=0)),
    "integer programs": Part(assembly.Assembly, {"_choice": lambda *_: None}),
    "cuts that all replicas have": Part(assembly, {"SETS": 0}),
    "short tiles": Part(places, {"TILES": ()}),
    "local search": Part(planner, less(starts=0), ("search/improve",)),
    "last moves": Part(planner, less(finalists=0), ("search/polish",)),
    "16 of 24 numbers of replicas": Part(planner, less(numbers=8)),
    "--effort quick": Part(None, {"effort": "quick"}),
    "--effort long": Part(None, {"effort": "long"}),
    "the simple rules": Part(auto, {"simple_plans": lambda *_, **__: iter(())}, ("search/floor",)),
}


def planned(given: Problem) -> dict[str, float]:
    """What the plan of `auto` costs, its gap, and seconds of processors."""
    began = time.process_time()
    try:
        solution = auto.Auto()(given)
    except PartitionError:
        return {"cost": math.inf, "gap": math.inf, "seconds": time.process_time() - began}
    seconds, found = time.process_time() - began, with_prediction(solution, given).predicted
    assert found is not None
    return {"cost": cost(given, solution.plan), "gap": math.inf if found.gap is None else found.gap, "seconds": seconds}


def measure(again: Callable[[], Problem], names: Sequence[str]) -> dict[str, Any]:
    """One problem, with all parts and without each of these."""
    given = again()
    planned(given)  # numba reads what it compiled
    found = {"devices": len(given.cluster.devices), WHOLE: planned(given)}
    for name in names:
        owner, instead, _ = PARTS[name]
        with ExitStack() as stack:
            for attribute, value in instead.items() if owner is not None else ():
                stack.enter_context(patch.object(owner, attribute, value))
            found[name] = planned(again() if owner is not None else replace(again(), **instead))
    return found


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Each part's lines, and what it is like without it."""
    some = [row for row in rows if math.isfinite(row[WHOLE]["cost"])]
    lines = []
    for name in (WHOLE, *names):
        modules = PARTS[name].modules if name in PARTS else ()
        files = [path for pattern in modules for path in FOLDER.glob(f"{pattern}.py")]
        count = sum(len(path.read_text("utf-8").splitlines()) for path in files)
        steps = [row[name]["cost"] / row[WHOLE]["cost"] for row in some]
        none, steps = sum(map(math.isinf, steps)), [step for step in steps if math.isfinite(step)]
        seconds = sum(row[name]["seconds"] for row in some) / sum(row[WHOLE]["seconds"] for row in some)
        gap = median(row[name]["gap"] for row in some)
        lines.append(
            [
                name,
                f"{count or ''}",
                f"{geometric_mean(steps):.3f}",
                f"{max(steps, default=math.nan):.3f}",
                str(none),
                f"{gap:.1%}",
                f"{seconds:.2f}",
            ]
        )
    return markdown(["without", "lines", "step, mean", "worst", "no plan", "gap, median", "seconds"], lines)


def main(
    draws: Annotated[int, typer.Option(help="How many problems are drawn.")] = 12,
    seed: Annotated[int | None, typer.Option(help="Of the first; without it today's date.")] = None,
    beyond: Annotated[bool, typer.Option("--wide", help="Of the wider kind.")] = False,
    only: Annotated[str, typer.Option(help="Only parts whose name has one of these, with commas between.")] = "",
    jobs: Annotated[int, typer.Option(help="Problems at a time.")] = 1,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
) -> None:
    """Print the table."""
    first = int(date.today().strftime("%Y%m%d")) if seed is None else seed
    names, rows = [name for name in PARTS if any(text in name for text in only.split(","))], list[dict[str, Any]]()
    if here:
        print(json.dumps(measure(lambda: drawn(first, beyond=beyond), names)))
        return
    each = [["--only", only, *["--wide"] * beyond, "--seed", str(first + i)] for i in range(draws)]
    for number, row in enumerate(each_apart("bench.planner.ablation", each, jobs)):
        rows.append({"seed": first + number, **row})
        console.print({name: found if name == "devices" else found["cost"] for name, found in row.items()})
        if output is not None:
            output.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table(rows, names), markup=False)


if __name__ == "__main__":
    typer.run(main)
