"""How good are the plans of `auto`, how long do they take, and how much is proven, on problems drawn from a seed?

    python -m bench.planner.run [--draws COUNT] [--seed SEED] [--wide] [--regret SECONDS] [--jobs COUNT] [-o table.json]
    python -m bench.planner.run --fixed [--only TEXT] [--per-device SAMPLES] [--memory FACTOR] [--synthetic]

Each problem runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import typer
from rich.console import Console

from bench.apart import each_apart
from bench.partitioners.profiles import SAILOR, profile
from bench.partitioners.zorse_profiles import ZORSE
from bench.planner.draws import measured, wide
from bench.tables import markdown
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers.options import ImportOptions
from hetpipe.exchange.importers.sailor import import_sailor
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.search import assembly, planner
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.partitioners.search.floor import cost
from hetpipe.partitioners.search.planner import Planner
from hetpipe.partitioners.step_times.drafts import Draft
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import with_prediction
from hetpipe.planning.registry import rules as every_rule

MODEL = "OPT-350"
TYPES: dict[str, float] = {"A100-40": 40, "V100-16": 16, "Titan-RTX": 24, "GH-96": 96}  # GB
SYNTHETIC = {"A100": 39, "V100": 15.7, "T4": 14.7, "A10": 22}
NODE = 8
INSIDE = {"bandwidth": "100 GB/s", "latency": "10 us"}
BETWEEN = {"bandwidth": "10 GB/s", "latency": "30 us"}
LIMITS = ("max_price_per_hour", "deadline_seconds_per_step")
MORE = EFFORTS["long"]._replace(
    numbers=200, wishes=300, even=300, pure=200, starts=500, tries=10**6, finalists=100, moves=10**6, tasks=1e12
)
RUNGS = {"EVENEST": 40, "RUNGS": 1.05}
SIMULATED = {"ALIKE": 12, "PLAYED": 12, "SETS": 8, "TASKS": 10**12}
POLISHING = 0.4  # of the seconds of a longer search
console = Console(width=160)


class Case(NamedTuple):
    """So many devices, of so many types in equal parts."""

    devices: int
    types: int


CASES = [Case(n, 2) for n in (8, 16, 32, 128, 512, 1024, 4096)]
CASES += [Case(n, 3) for n in (96, 192, 768)] + [Case(n, 4) for n in (256, 1024)]


def problem(case: Case, per_device: int, memory: float, *, synthetic: bool = False) -> Problem:
    """Nodes of 8 devices (4 where there are only 8 in all) of one type each."""
    found: Profile | None
    if SAILOR is not None and not synthetic:
        found, sizes = import_sailor(SAILOR, ImportOptions(model=MODEL)).profile, dict(TYPES)
    else:
        found, sizes = profile("gpt2-medium", list(SYNTHETIC)), dict(SYNTHETIC)
    assert found is not None
    kinds = list(sizes)[: case.types]
    each = case.devices // case.types
    in_node = min(NODE, each)
    nodes = [{kind: in_node} for kind in kinds for _ in range(each // in_node)]
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": {kind: {"memory": f"{sizes[kind] * memory:.3f} GB"} for kind in kinds},
        "nodes": [{"name": f"n{i}", "devices": devices, "link": INSIDE} for i, devices in enumerate(nodes)],
        "link": BETWEEN,
    }
    cluster = Cluster.parse(document, "the benchmark's cluster")
    return Problem.create(cluster=cluster, profile=found, global_batch=per_device * len(cluster.devices))


def drawn(seed: int, *, beyond: bool) -> Problem:
    """A draw; without measured layers of the wider kind."""
    return wide(seed) if beyond or ZORSE is None else measured(seed, ZORSE)


@contextmanager
def plans_noted() -> Iterator[list[float]]:
    """The processor seconds of this process at which the search had simulated a plan, the first first."""
    found, simulated = list[float](), assembly.Assembly._simulate

    def noted(self: assembly.Assembly, draft: Draft) -> float:
        took = simulated(self, draft)
        found.append(time.process_time())
        return took

    with patch.object(assembly.Assembly, "_simulate", noted):
        yield found


def measure(given: Problem, others: bool, regret: float) -> dict[str, Any]:
    """One problem, in this process: `auto`, then every rule, then a search of so many seconds."""
    row: dict[str, Any] = {
        "devices": len(given.cluster.devices),
        "types": len(given.cluster.device_types),
        "batch": given.global_batch,
        "limits": [name for name in LIMITS if getattr(given, name) is not None],
    }
    began, worked = time.perf_counter(), time.process_time()
    try:
        with plans_noted() as noted:
            solution = Auto()(given)
    except PartitionError as error:
        solution, row["refused"] = None, str(error)
    row["first"] = noted[0] - worked if noted else None
    row["seconds"], row["processor_seconds"] = time.perf_counter() - began, time.process_time() - worked
    row["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    least = math.inf
    if solution is not None:
        plan, found = solution.plan, with_prediction(solution, given).predicted
        assert found is not None
        least, row["gap"] = cost(given, plan), found.gap
        row |= {"cost": least, "replicas": len(plan.replicas), "stages": max(len(r.stages) for r in plan.replicas)}
    if others:
        row["rules"] = rules(given)
        row["ratio"] = least / min(row["rules"].values()) if row["rules"] else None
    if regret and solution is not None and not row["limits"]:
        longer = searched(given, regret)
        row["longer"], row["regret"] = longer, max(0.0, least / longer - 1)
    return row


def rules(given: Problem) -> dict[str, float]:
    """What the plan of every simple rule costs, of those that have one that keeps the limits. (Rules themselves know none.)"""
    found, free = dict[str, float](), replace(given, max_price_per_hour=None, deadline_seconds_per_step=None)
    for rule in every_rule():
        try:
            found[rule.name] = cost(given, rule(free).plan)
        except (PartitionError, InputError):
            continue
    return {name: value for name, value in found.items() if math.isfinite(value)}


def searched(given: Problem, seconds: float) -> float:
    """The best step that so many seconds find: of all numbers of replicas, from many starts, then by moves that are simulated."""
    for module, more in ((planner, RUNGS), (assembly, SIMULATED)):
        for name, value in more.items():
            setattr(module, name, value)
    ends = [time.monotonic() + (1 - POLISHING) * seconds]
    search = Planner(given, late=lambda: time.monotonic() > ends[0])
    search.effort = MORE
    search.run()
    ends[0] = time.monotonic() + POLISHING * seconds
    search.polish()
    return search.assembly.step


def spread(rows: list[dict[str, Any]], name: str, shown: str) -> list[str]:
    """Median, 95th percentile and worst, and of which seed."""
    having = sorted(((row[name], row["seed"]) for row in rows if row.get(name) is not None), key=lambda x: x[0])
    if not having:
        return []
    at = [having[round(part * (len(having) - 1))][0] for part in (0.5, 0.95, 1.0)]
    return [name, str(len(having)), *(format(value, shown) for value in at), str(having[-1][1])]


def summary(rows: list[dict[str, Any]]) -> str:
    """Of all draws."""
    each = {"ratio": ".3f", "regret": ".1%", "gap": ".1%", "first": ".2f", "seconds": ".2f", "peak_bytes": ".3g"}
    lines = [row for name, shown in each.items() if (row := spread(rows, name, shown))]
    return markdown(["", "problems", "median", "95 %", "worst", "its seed"], lines)


def printed(row: dict[str, Any]) -> str:
    """One line of progress."""
    shown = {"cost": ".4g", "ratio": ".3f", "regret": ".1%", "gap": ".1%", "seconds": ".1f"}
    each = [f"{name} {format(row[name], how)}" for name, how in shown.items() if row.get(name) is not None]
    return f"{row['seed']}: {row['devices']} devices, {row['types']} types: " + ", ".join(each) + str(row.get("refused", ""))[:80]


def main(
    draws: Annotated[int, typer.Option(help="How many problems are drawn.")] = 20,
    seed: Annotated[int | None, typer.Option(help="Of the first; without it today's date.")] = None,
    beyond: Annotated[bool, typer.Option("--wide", help="Of the wider kind.")] = False,
    regret: Annotated[float, typer.Option(help="Compare with what so many seconds of search find.")] = 0.0,
    jobs: Annotated[int, typer.Option(help="Problems at a time; more than one makes each slower.")] = 1,
    fixed: Annotated[bool, typer.Option("--fixed", help="The table of 8 to 4,096 alike nodes instead.")] = False,
    only: Annotated[str, typer.Option(help="'DEVICESxTYPES': one case of that table.")] = "",
    per_device: Annotated[int, typer.Option(help="Its global batch, in samples per device.")] = 16,
    memory: Annotated[float, typer.Option(help="Its device memory, times the real one.")] = 1.0,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="GPT-2 medium, though there are measurements.")] = False,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
) -> None:
    """Print the table."""
    first = int(date.today().strftime("%Y%m%d")) if seed is None else seed
    cases = [case for case in CASES if only in ("", f"{case.devices}x{case.types}")]
    if here:
        given = problem(cases[0], per_device, memory, synthetic=synthetic) if fixed else drawn(first, beyond=beyond)
        print(json.dumps(measure(given, not fixed, regret)))
        return
    if fixed:
        words = ["--fixed", "--per-device", str(per_device), "--memory", str(memory), *["--synthetic"] * synthetic]
        each = {f"{case.devices}x{case.types}": [*words, "--only", f"{case.devices}x{case.types}"] for case in cases}
    else:
        words = ["--regret", str(regret), *["--wide"] * beyond]
        each = {str(first + i): [*words, "--seed", str(first + i)] for i in range(draws)}
    rows = []
    for name, row in zip(each, each_apart("bench.planner.run", each.values(), jobs), strict=True):
        rows.append({"seed": name, **row})
        console.print(printed(rows[-1]))
        if output is not None:
            output.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(summary(rows), markup=False)


if __name__ == "__main__":
    typer.run(main)
