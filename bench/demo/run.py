"""How much faster is the plan than equal splits? Profiles once, then trains the same job three ways and on one plain device.

    python -m bench.demo.run [JOB] [--steps N] [--even-steps N]

Writes summary.json, plan.svg, report.html and trace.json into the job's log folder.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.reference import Truth, train_reference
from hetpipe.cli.commands import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.files.units import human_seconds
from hetpipe.files.writing import write_text
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import make_plan
from hetpipe.processes.progress import Activity
from hetpipe.show.draw import draw_plan
from hetpipe.show.report import plan_table, text_gantt, utilisation_table
from hetpipe.study.make import make_study
from hetpipe.study.rules import rule_names
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import profile_everywhere, run_everywhere
from hetpipe.training.trainer import Trainer

console = Console()
WAYS = {"even-data-parallel": "equal data parallel", "even": "even pipeline", "auto": "the plan"}


def _train(job: Job, plan: Plan, profile: Profile) -> TrainResult | None:
    return Trainer(job).run(plan, profile)


def _aside(job: Job, name: str, steps: int) -> Job:
    log = job.log.model_copy(update={"folder": f"{job.log.folder}/{name}"}) if job.log is not None else None
    return job.model_copy(update={"log": log, "train": job.train.model_copy(update={"steps": steps, "epochs": None})})


def _one_way(name: str, job: Job, profile: Profile, cluster: Cluster, steps: int) -> tuple[dict[str, Any], TrainResult | None]:
    """Plan and train one way; a way that does not fit says so, with the planner's reason."""
    try:
        plan = make_plan(profile, cluster, job.train.global_batch, partitioner=name)
    except PartitionError as error:
        return {"samples_per_second": "does not fit", "reason": str(error)}, None
    if name == "auto":
        console.print(plan_table(plan, profile=profile, cluster=profile.joined(cluster)))
    result = run_everywhere(job if name == "auto" else _aside(job, name, steps), _train, plan, profile)
    assert isinstance(result, TrainResult) and result.predicted is not None
    row = {
        "samples_per_second": result.samples_per_second,
        "predicted_step_seconds": result.predicted.step_seconds,
        "measured_step_seconds": result.usual_step_seconds,
        "measured_over_predicted": result.usual_step_seconds / result.predicted.step_seconds,
        "steps_timed": len(result.steady_seconds),
        "fastest_step_seconds": min(result.steady_seconds),
        "slowest_step_seconds": max(result.steady_seconds),
        "overrun_fraction": result.overrun_fraction,
    }
    return row, result


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="one job, three ways to split it")
    for name in ("way", "samples/s", "measured step", "predicted step", "measured − predicted", "speed-up of the plan"):
        table.add_column(name, justify="left" if name == "way" else "right")
    best = rows["the plan"]["samples_per_second"]
    for name, row in rows.items():
        if row["samples_per_second"] == "does not fit":
            table.add_row(name, "does not fit", "", "", "", "")
            continue
        table.add_row(
            name,
            f"{row['samples_per_second']:.2f}",
            human_seconds(row["measured_step_seconds"]),
            human_seconds(row["predicted_step_seconds"]),
            f"{row['measured_over_predicted'] - 1:+.1%}",
            f"{best / row['samples_per_second']:.2f}×",
        )
    return table


def _compare_losses(plan: TrainResult, reference: Truth) -> dict[str, float]:
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(plan.losses, reference.losses, strict=True)]
    return {
        "first_loss": plan.losses[0],
        "last_loss": plan.losses[-1],
        "reference_last_loss": reference.losses[-1],
        "greatest_relative_difference": max(differences),
    }


def run(
    job_file: Annotated[str, typer.Argument()] = "configs/jobs/demo.yaml", steps: int | None = None, even_steps: int = 6
) -> None:
    """Compare equal data parallel, an even pipeline and the plan on the job's cluster."""
    job = Job.read(job_file, [f"train.steps={steps}"] if steps is not None else [])
    cluster = job.read_cluster()
    if cluster is None or job.log is None:
        raise InputError(f"{job_file}: the comparison needs a 'cluster' file and a 'log' folder")
    folder = Path(job.log.folder)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    console.rule("1. measure every layer on every type of device")
    profile = profile_everywhere(job)
    assert profile is not None
    console.rule("2. plan and train, three ways")
    rows, results = {}, {}
    for name, label in WAYS.items():
        rows[label], results[label] = _one_way(name, job, profile, cluster, even_steps)
    best = results["the plan"]
    assert best is not None and best.plan is not None and best.plan.predicted is not None and best.measured is not None
    console.rule("3. the same job on one plain device, the whole batch at once")
    losses = _compare_losses(best, train_reference(job))
    fluid = fluid_bound(Problem.create(cluster=cluster, profile=profile, global_batch=job.train.global_batch))
    speeds = {
        label: row["samples_per_second"]
        for label, row in rows.items()
        if label != "the plan" and row["samples_per_second"] != "does not fit"
    }
    summary = {
        "ways": {label: {k: v for k, v in row.items() if k != "reason"} for label, row in rows.items()},
        "speedup": rows["the plan"]["samples_per_second"] / max(speeds.values()),
        "best_equal_split": max(speeds, key=lambda k: speeds[k]),
        "predicted_step_seconds": rows["the plan"]["predicted_step_seconds"],
        "measured_step_seconds": rows["the plan"]["measured_step_seconds"],
        "fluid_bound_seconds": fluid,
        "efficiency": fluid / rows["the plan"]["measured_step_seconds"],
        "gap": best.plan.predicted.gap,
        "proof": best.plan.predicted.proof,
        "losses": losses,
        "overrun_fraction": rows["the plan"]["overrun_fraction"],
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
    }
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    with Activity("drawing") as activity:
        study = make_study(
            best.plan,
            profile=profile,
            cluster=cluster,
            measured=best.measured,
            rules=rule_names(),
            changes=True,
            cuts=True,
            progress=activity.say,
        )
        for picture in ("plan.svg", "report.html"):
            draw_plan(study, folder / picture)
    console.print(text_gantt(best.measured))
    console.print(utilisation_table(best.predicted, best.measured))
    for label, row in rows.items():
        if "reason" in row:
            console.print(f"{label}: {row['reason']}", markup=False)
    console.print(_table(rows))
    console.print(f"speed-up over the best equal split that fits ({summary['best_equal_split']}): {summary['speedup']:.2f}×")
    console.print(
        f"efficiency against the fluid bound ({human_seconds(fluid)} a step, which no plan can beat): {summary['efficiency']:.0%}"
    )
    console.print(
        f"loss {losses['first_loss']:.4f} → {losses['last_loss']:.4f}; "
        f"greatest relative difference from one device: {losses['greatest_relative_difference']:.1e}"
    )
    if summary["overrun_fraction"] > 0.01:
        console.print("the emulated devices overran: this machine was too busy, timings are not valid", style="bold red")
    console.print(f"pictures, trace (open in ui.perfetto.dev), metrics and summary: {folder}")


if __name__ == "__main__":
    main(lambda: typer.run(run))
