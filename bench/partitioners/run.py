"""How much slower is every baseline than `auto`, in simulated step time, on mixed clusters?

    python -m bench.partitioners.run [--only TEXT] [--large] [--drawn N --seed S] [--time-limit SECONDS] [-o table.json]
                                     [--markdown table.md]

Exit code 1 if any baseline is faster than `auto`: the claim is that none ever is.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.partitioners.clusters import CASES, LARGE, Case, cluster
from bench.partitioners.drawn import drawn
from bench.partitioners.profiles import profile
from bench.partitioners.zorse_profiles import ZORSE
from bench.tables import geometric_mean, markdown
from hetpipe.cli.commands import main
from hetpipe.documents.plan import Plan
from hetpipe.files.writing import write_text
from hetpipe.partitioners.auto import Auto
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.registry import partitioner, rules
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline

BASELINES = tuple(rule.name for rule in rules())
TOLERANCE = 1e-9
console = Console(width=200)


def shape(plan: Plan, problem: Problem) -> str:
    """A plan in a line: per replica its layers per device type and its micro-batches."""
    kinds: dict[str, int] = {}
    for replica in plan.replicas:
        stages = " → ".join(
            f"{s.layers[1] - s.layers[0]}{'r' if s.recompute else ''}·{problem.cluster.device(s.device).type}"
            for s in replica.stages
        )
        sizes = replica.microbatch_sizes
        text = f"[{stages}] {len(sizes)}×{max(sizes)}" + (f" ({sum(sizes)})" if len(set(sizes)) > 1 else "")
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(f"{count} × {text}" if count > 1 else text for text, count in kinds.items())


def where_time_goes(problem: Problem, timeline: Timeline) -> str:
    """Of the step: gradient sums and optimizer, and how busy the devices of each type compute (unused ones: 0)."""
    busy: dict[str, float] = {}
    for span in timeline.spans:
        if span.kind in ("F", "B"):
            kind = problem.cluster.device(span.device).type
            busy[kind] = busy.get(kind, 0.0) + span.end - span.start
    count = {kind: sum(d.type == kind for d in problem.cluster.devices) for kind in problem.cluster.device_types}
    step = timeline.step_seconds
    parts = [f"{kind} computes {busy.get(kind, 0.0) / number / step:.0%}" for kind, number in count.items()]
    return ", ".join([*parts, f"gradient sums {timeline.sync_seconds / step:.0%}"])


def solve(name: str, problem: Problem, seconds: float) -> dict[str, Any]:
    """One partitioner on one problem: its step, or why there is none."""
    found = Auto(time_limit_seconds=seconds) if name == "auto" else partitioner(name)
    assert isinstance(found.name, str)
    began = time.perf_counter()
    try:
        solution = found(problem)
    except PartitionError as error:
        return {"step_seconds": None, "reason": str(error), "seconds": time.perf_counter() - began}
    took = time.perf_counter() - began
    timeline = simulate(solution.plan, problem.profile, problem.cluster)
    return {
        "step_seconds": timeline.step_seconds,
        "seconds": took,
        "proof": solution.proof,
        "plan": shape(solution.plan, problem),
        "time": where_time_goes(problem, timeline),
    }


def run_case(case: Case, seconds: float) -> dict[str, Any] | None:
    """`auto` and all baselines on one cluster; None if its measurements are not here."""
    measured = profile(case.model, case.types)
    if measured is None:
        console.print(f"{case.name}: skipped, the measurements are not here")
        return None
    problem = Problem.create(cluster=cluster(case), profile=measured, global_batch=case.batch)
    results = {name: solve(name, problem, seconds) for name in ("auto", *BASELINES)}
    best = results["auto"]["step_seconds"]
    for name in BASELINES:
        step = results[name]["step_seconds"]
        results[name]["ratio"] = None if step is None else step / best if best is not None else 0.0
    ratios = "  ".join(f"{name} {_ratio(results[name]['ratio'])}" for name in BASELINES)
    auto = results["auto"]
    console.print(
        f"{case.name}: auto {best} s in {auto['seconds']:.1f} s ({auto.get('proof')}), {auto.get('plan')}\n    {ratios}"
    )
    return {"case": case.name, "model": case.model, "batch": case.batch, "devices": case.devices, "results": results}


def run_drawn(count: int, seed: int, seconds: float) -> list[dict[str, Any]]:
    """The first `count` of the drawn clusters on which anything fits."""
    rows: list[dict[str, Any]] = []
    if ZORSE is None:
        return rows
    for tried, case in enumerate(drawn(seed, ZORSE), 1):
        row = run_case(case, seconds)
        assert row is not None
        if row["results"]["auto"]["step_seconds"] is not None or violations([row]):
            rows.append(row)
        if len(rows) == count:
            console.print(f"{tried} clusters were drawn, on {tried - count} of them nothing fits")
            return rows
    raise AssertionError


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of README.md: ratios, and their geometric means over the clusters where the baseline fits."""
    lines = []
    for row in rows:
        auto = row["results"]["auto"]
        step = "–" if auto["step_seconds"] is None else f"{auto['step_seconds']:.3f}"
        ratios = [_ratio(row["results"][name]["ratio"]) for name in BASELINES]
        proven = "" if auto.get("proof") == "exhaustive" else "*"
        lines.append([row["case"], row["model"], str(row["batch"]), step + proven, *ratios])
    lines.append(["**geometric mean**", "", "", "", *(f"{mean(rows, name):.2f}" for name in BASELINES)])
    lines.append(["fits", "", "", "", *(f"{len(ratios_of(rows, name))} of {len(rows)}" for name in BASELINES)])
    return markdown(["cluster", "model", "batch", "auto, s", *BASELINES], lines, words=2)


def ratios_of(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The ratios of a baseline where it fits."""
    return [row["results"][name]["ratio"] for row in rows if row["results"][name]["ratio"] is not None]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    """Geometric mean of a baseline's ratios."""
    return geometric_mean([max(r, 1e-12) for r in ratios_of(rows, name)])


def violations(rows: list[dict[str, Any]]) -> list[str]:
    """Where a baseline beats `auto`."""
    return [
        f"{row['case']} ({row['model']}, batch {row['batch']}): {name} takes {result['ratio']:.6f} of auto's step\n"
        f"    {name}: {result['plan']}\n    auto ({row['results']['auto'].get('proof')}): {row['results']['auto'].get('plan')}"
        for row in rows
        for name, result in row["results"].items()
        if result.get("ratio") is not None and result["ratio"] < 1 - TOLERANCE
    ]


def worst(rows: list[dict[str, Any]]) -> None:
    """Where each baseline loses most, with both plans."""
    for name in BASELINES:
        fitting = [row for row in rows if row["results"][name]["ratio"] is not None]
        if fitting:
            row = max(fitting, key=lambda row: row["results"][name]["ratio"])
            result, auto = row["results"][name], row["results"]["auto"]
            console.print(f"\n{name} loses most on {row['case']} ({row['model']}): {result['ratio']:.2f}", style="bold")
            console.print(f"    {result['plan']}: {result['time']}\n    auto: {auto['plan']}: {auto['time']}", markup=False)


def run(
    only: Annotated[str, typer.Option(help="Only clusters whose name has this.")] = "",
    large: Annotated[bool, typer.Option("--large", help="Also 128 to 512 devices.")] = False,
    random_clusters: Annotated[
        int, typer.Option("--drawn", help="Instead: so many clusters of measured devices, drawn at random.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="With --drawn.")] = 0,
    time_limit: Annotated[float, typer.Option(help="Seconds for auto on one cluster.")] = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all results as JSON.")] = None,
    table_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table as Markdown; *: not proven the best.")
    ] = None,
) -> None:
    """Compare all partitioners."""
    cases = [case for case in (*CASES, *(LARGE if large else ())) if only.lower() in case.name.lower()]
    if random_clusters:
        rows = run_drawn(random_clusters, seed, time_limit)
    else:
        rows = [row for case in cases if (row := run_case(case, time_limit)) is not None]
    if not rows:
        raise typer.Exit(2)
    console.print(as_markdown(rows), markup=False)
    worst(rows)
    if output is not None:
        write_text(output, json.dumps(rows, indent=1) + "\n")
    if table_file is not None:
        write_text(table_file, as_markdown(rows))
    found = violations(rows)
    for text in found:
        console.print(f"VIOLATION: {text}", style="bold red", markup=False)
    console.print(f"\n{len(found)} violations: cases in which a baseline is faster than auto")
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    main(lambda: typer.run(run))
