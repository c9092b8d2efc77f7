"""Where do the gaps of `auto` lie? The worst of a table are planned again where one thing costs nothing: a gap that goes with it
lies there.

    python -m bench.planner.causes TABLE.json [--worst 10] [--wide] [--jobs 1]

TABLE.json is what `bench.planner.run -o` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from bench.apart import each_apart
from bench.planner.ablation import planned
from bench.planner.run import drawn
from bench.tables import markdown
from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.profile import Profile
from hetpipe.planning.partition import Problem

FREE, AMPLE = Link(bandwidth=1e18), 2**50  # bytes/s, bytes
console = Console(width=160)


def plain(model: BaseModel, **changes: Any) -> dict[str, Any]:
    """As it is in a file, but for what is changed."""
    return model.model_dump(mode="json", exclude_none=True) | changes


def on(given: Problem, **changes: Any) -> Problem:
    """On a cluster that is changed."""
    return replace(given, cluster=Cluster.parse(plain(given.cluster, **changes), "the draw's cluster"))


def free_links(given: Problem) -> Problem:
    """Nothing takes time on its way. (Draws have no adapters.)"""
    link = plain(FREE)
    return on(given, link=link, links=[], nodes=[plain(node, link=link) for node in given.cluster.nodes])


def ample_memory(given: Problem) -> Problem:
    """No device lacks any."""
    return on(given, device_types={name: plain(kind, memory=AMPLE) for name, kind in given.cluster.device_types.items()})


def no_activations(given: Problem) -> Problem:
    """Between stages nothing is sent, so that links carry gradient sums only."""
    layers = [plain(layer, output_bytes_per_sample=0) for layer in given.profile.layers]
    return replace(given, profile=Profile.parse(plain(given.profile, layers=layers), "the draw's profile"))


CASES: dict[str, Callable[[Problem], Problem]] = {
    "as it is": lambda given: given,
    "nothing sent between stages": no_activations,
    "free links": free_links,
    "ample memory": ample_memory,
    "both": lambda given: free_links(ample_memory(given)),
}


def main(
    table: Annotated[Path, typer.Argument(help="What bench.planner.run -o wrote.")],
    worst: Annotated[int, typer.Option(help="How many of its gaps, the widest first.")] = 10,
    beyond: Annotated[bool, typer.Option("--wide", help="They are of the wider kind.")] = False,
    jobs: Annotated[int, typer.Option(help="Problems at a time.")] = 1,
    seed: Annotated[int, typer.Option(hidden=True)] = 0,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print the gap of each, as it is and otherwise."""
    if here:
        given = drawn(seed, beyond=beyond)
        print(json.dumps({name: planned(case(given))["gap"] for name, case in CASES.items()}))
        return
    rows = [row for row in json.loads(table.read_text("utf-8")) if row.get("gap") is not None]
    rows, lines = sorted(rows, key=lambda row: -row["gap"])[:worst], list[list[str]]()
    each = [[str(table), "--seed", row["seed"], *["--wide"] * beyond] for row in rows]
    for row, found in zip(rows, each_apart("bench.planner.causes", each, jobs), strict=True):
        lines.append([row["seed"], f"{row['devices']}", f"{row['types']}", *(f"{found[name]:.0%}" for name in CASES)])
        console.print(row["seed"], found)
    console.print(markdown(["seed", "devices", "types", *CASES], lines), markup=False)


if __name__ == "__main__":
    typer.run(main)
