"""Are plans of this checkout as good as those of another, and how long do both take? Drawn problems are planned by both in one
run, each in a process of its own, one after the other.

    python -m bench.planner.beside FOLDER [--draws COUNT] [--seed SEED] [--wide] [--jobs COUNT] [-o table.json]

FOLDER is another checkout, such as one of an earlier commit (`git worktree add FOLDER COMMIT`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.apart import ROOT, figures
from bench.planner.run import drawn, rules
from bench.tables import markdown

CODE = """
import json, sys
from pathlib import Path
from bench.planner.ablation import planned
from bench.planner.run import drawn
given = drawn(int(sys.argv[1]), beyond=sys.argv[2] == "wide")
found = planned(given) | {"devices": len(given.cluster.devices)}
# what getrusage says begins with the parent's peak
kibibytes = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(json.dumps(found | {"peak_bytes": 1024 * int(kibibytes)}))
"""
SIZES = ((2, 8), (9, 32), (33, 128), (129, 4096), (2, 4096))  # devices
console = Console(width=160)


def planned_in(folder: Path, seed: int, kind: str) -> dict[str, Any]:
    """What `auto` of a checkout finds, and the processor seconds and the memory that it takes."""
    found: dict[str, Any] = figures(["-c", CODE, str(seed), kind], folder)
    return found


def both(other: Path, seed: int, kind: str) -> dict[str, Any]:
    """A draw, by the other checkout and by this one; and what the best simple rule of this one takes."""
    row: dict[str, Any] = {"seed": seed, "before": planned_in(other, seed, kind), "after": planned_in(ROOT, seed, kind)}
    given = drawn(seed, beyond=kind == "wide")
    row["rule"] = min(rules(given).values(), default=math.inf)
    return row


def lines(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line of the table for each size of clusters, and for all."""
    for low, high in SIZES:
        some = [row for row in rows if low <= row["after"]["devices"] <= high and math.isfinite(row["before"]["cost"])]
        if not some:
            continue
        steps = [row["after"]["cost"] / row["before"]["cost"] for row in some]
        seconds = [row["after"]["seconds"] / row["before"]["seconds"] for row in some]
        yield [
            f"{low} to {high}",
            f"{len(some)}",
            f"{mean(steps):.4f}",
            f"{max(steps):.3f}",
            f"{min(steps):.3f}",
            f"{max(row['after']['cost'] / row['rule'] for row in some):.3f}",
            f"{median(seconds):.2f}",
            *(f"{median(row[x]['seconds'] for row in some):.1f}" for x in ("before", "after")),
            *(f"{median(row[x]['gap'] for row in some):.0%}" for x in ("before", "after")),
            f"{max(row['after']['peak_bytes'] for row in some) / 2**20:.0f}",
        ]


def main(
    other: Annotated[Path, typer.Argument(help="The other checkout.")],
    draws: Annotated[int, typer.Option(help="How many problems are drawn.")] = 100,
    seed: Annotated[int | None, typer.Option(help="Of the first; without it today's date.")] = None,
    beyond: Annotated[bool, typer.Option("--wide", help="Of the wider kind.")] = False,
    jobs: Annotated[int, typer.Option(help="Problems at a time; more than one makes each slower, in both alike.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
) -> None:
    """Print the table."""
    first = int(date.today().strftime("%Y%m%d")) if seed is None else seed
    kind = "wide" if beyond else "measured"
    rows = list[dict[str, Any]]()
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda i: both(other.resolve(), first + i, kind), range(draws)):
            rows.append(row)
            before, after = row["before"], row["after"]
            each = ", ".join(f"{x['cost']:.5g} in {x['seconds']:.1f} s" for x in (before, after))
            console.print(f"{row['seed']}: {after['devices']} devices, {each}")
            if output is not None:
                output.write_text(json.dumps(rows, indent=1) + "\n")
    titles = [
        "devices",
        "draws",
        "step, mean",
        "worst",
        "best",
        "over a rule, worst",
        "seconds, median of ratios",
        "before",
        "after",
        "gap before",
        "after",
        "peak MB",
    ]
    console.print(markdown(titles, list(lines(rows))), markup=False)


if __name__ == "__main__":
    typer.run(main)
