"""How much faster is the plan than what people use today? Every way trains the same model on the same emulated devices, measured.

python -m bench.throughput.run [--models gpt,bert] [--only TEXT] [--seconds S] [--rounds N] [-o all.json] [--resume]
                               [--readme]
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from scipy.stats import spearmanr

from bench.tables import chosen, environment, geometric_mean, markdown, replace_table
from bench.throughput.clusters import MIXES, MODELS, Mix, cluster_document, tight_memory
from hetpipe.building.build import build_model
from hetpipe.cli.exits import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_output, write_text
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.training.loop import Loop
from hetpipe.training.runlog import WARMUP_STEPS
from hetpipe.training.session import join, open_session
from hetpipe.training.start import profile_everywhere

README = Path(__file__).parent / "README.md"
OURS, EQUAL = "hetpipe", "DDP, equal batches"
WAYS: dict[str, dict[str, Any]] = {
    EQUAL: {"partitioner": "even-data-parallel"},
    "DDP, batches by speed (FastSpeed)": {"partitioner": "uneven-data-parallel"},
    "DDP, best batches (Cephalo)": {"partitioner": "cephalo"},
    "even pipeline, GPipe": {"partitioner": "even", "schedule": "gpipe"},
    "even pipeline, 1F1B": {"partitioner": "even", "schedule": "1f1b"},
    "torchgpipe's balance": {"partitioner": "torchgpipe-balance"},
    "FASOP": {"partitioner": "fasop"},
    "Zorse": {"partitioner": "zorse"},
    OURS: {"partitioner": "auto"},
}
BATCH = 24


class Ran(NamedTuple):
    """Seconds of steps, predicted seconds, and per device measured and predicted peak bytes; the part of the steps by which
    emulated devices were late; the loss of each step."""

    seconds: list[float]
    predicted: float
    peaks: dict[str, tuple[int, int]]
    overrun: float
    losses: list[float]


def trained(job: Job, plans: Mapping[str, Plan], steps: Mapping[str, int], profile: Profile, rounds: int) -> dict[str, list[Ran]]:
    """The program of every rank: each plan `rounds` times in turn, for so many steps, in one process group. Returns the runs of
    the plans whose first rank this is."""
    session, found = open_session(job), dict[str, list[Ran]]()
    for _ in range(rounds):
        for name, plan in plans.items():
            model = build_model(job, session.data)  # as before the last plan trained
            session = replace(session, model=model)
            engine = join(session, plan, profile)
            if engine is None:
                continue
            own = job.model_copy(update={"train": job.train.model_copy(update={"steps": steps[name]})})
            result = Loop(own, session, engine).run()
            if engine.world.is_main:
                predicted = with_footprint(simulate(plan, profile, session.cluster), plan, profile, session.cluster)
                peaks = {d: (peak, predicted.peak_bytes[d]) for d, peak in result.peak_bytes.items()}
                row = Ran(result.steady_seconds, predicted.step_seconds, peaks, result.overrun_fraction, result.losses)
                found.setdefault(name, []).append(row)
    return found


def job_of(model: str, mix: Mix, folder: Path, memory: dict[str, int] | None = None) -> Job:
    """The job, and its cluster file in the folder."""
    Cluster.parse(cluster_document(mix, memory), mix.name).save(folder / "cluster.json")
    document = {
        "format": "hetpipe.job/1",
        "cluster": str(folder / "cluster.json"),
        **MODELS[model],
        "profiler": {"microbatch_sizes": [1, 2, 4], "repeats": 5, "cache": str(folder / "cache")},
        "train": {
            "global_batch": BATCH,
            "steps": WARMUP_STEPS,
            "evaluate_samples": 0,
            "optimizer": {"name": "AdamW", "lr": 1e-4},
        },
    }
    return Job.parse(document, f"{model} on {mix.name}")


def whole_model_bytes(profile: Profile) -> int:
    """Of parameters, gradients, the optimizer's state, and what one sample leaves for backward."""
    parameters = sum(layer.parameter_bytes - layer.tied_parameter_bytes for layer in profile.layers)
    saved = sum(layer.saved_bytes_per_sample for layer in profile.layers)
    return round(parameters * (2 + profile.optimizer.state_bytes_per_parameter_byte) + saved)


def plans_of(profile: Profile, cluster: Cluster) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plan of each way, and why the others have none. PartitionError if hetpipe has none."""
    plans, reasons = dict[str, Plan](), dict[str, str]()
    for way, options in WAYS.items():
        try:
            plans[way] = make_plan(profile, cluster, BATCH, **options)
        except PartitionError as error:
            if way == OURS:
                raise
            reasons[way] = str(error)
    return plans, reasons


def prepared(
    job_of: Callable[[dict[str, int] | None], Job], tight_memory: Callable[[int], dict[str, int]] | None
) -> tuple[Job, Profile, Cluster]:
    """A job with ample memory, measured, and its cluster; where memory is to be tight, then with what follows from the bytes of
    the whole model."""
    job = job_of(None)
    profile = profile_everywhere(job)
    assert profile is not None
    if tight_memory is not None:
        job = job_of(tight_memory(whole_model_bytes(profile)))
    cluster = job.read_cluster()
    assert cluster is not None
    return job, profile, cluster


def steps_of(plan: Plan, seconds: float) -> int:
    """Steps of a run, of which those that count take so many seconds."""
    assert plan.predicted is not None
    return WARMUP_STEPS + math.ceil(seconds / plan.predicted.step_seconds)


def compare(model: str, mix: Mix, seconds: float, rounds: int) -> dict[str, Any]:
    """All ways on one cluster."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-throughput-") as name:
        folder = Path(name)
        job, profile, cluster = prepared(
            lambda memory: job_of(model, mix, folder, memory), (lambda whole: tight_memory(mix, whole)) if mix.tight else None
        )
        with Activity(f"{model} on {mix.name}: planning"):
            plans, reasons = plans_of(profile, cluster)
        steps = {way: steps_of(plan, seconds) for way, plan in plans.items()}
        runs = start_ranks(trained, (job, plans, steps, profile, rounds), cluster.devices, modules_of(job))
    ran, ours = {way: run for found in runs for way, run in found.items()}, plans[OURS].predicted
    assert ours is not None
    return {
        "model": model,
        "cluster": mix.name,
        "devices": len(cluster.devices),
        "tight": mix.tight,
        "fluid_seconds": ours.fluid_bound_seconds,
        "bound_seconds": ours.lower_bound_seconds,
        "reasons": reasons,
        "ways": {way: row_of(ran[way]) for way in plans},
    }


def row_of(runs: Sequence[Ran]) -> dict[str, Any]:
    """One way's figures: samples per second by the median step of all runs."""
    seconds = sorted(s for run in runs for s in run.seconds)
    middle = median(seconds)
    return {
        "samples_per_second": BATCH / middle,
        "step_seconds": middle,
        "predicted_seconds": runs[0].predicted,
        "relative_spread": (seconds[-1 - len(seconds) // 4] - seconds[len(seconds) // 4]) / middle,
        "overrun_fraction": max(run.overrun for run in runs),
        "peaks": runs[-1].peaks,
    }


def others(row: dict[str, Any]) -> dict[str, float]:
    """Samples per second of every other way that ran."""
    return {way: found["samples_per_second"] for way, found in row["ways"].items() if way != OURS}


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many times as fast hetpipe is as each other way, by name."""
    return {
        f"{row['model']} on {row['cluster']}: hetpipe over {way}": row["ways"][OURS]["samples_per_second"] / found
        for row in rows
        for way, found in others(row).items()
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Samples per second of hetpipe, and how many times as fast it is as each other way (–: it does not fit)."""
    rivals = [way for way in WAYS if way != OURS]
    lines = []
    for row in rows:
        ours = row["ways"][OURS]["samples_per_second"]
        beside = [f"{ours / found:.2f}" if (found := others(row).get(way)) else "–" for way in rivals]
        lines.append([row["cluster"], row["model"], f"{ours:.1f}", *beside, *efficiency(row)])
    means = [mean_text(rows, way) for way in rivals]
    lines.append(["**geometric mean**", "", "", *means, "", ""])
    names = ["cluster", "model", "hetpipe, samples/s", *rivals, "of the fluid bound", "over the proven bound"]
    return markdown(names, lines, words=2)


def efficiency(row: dict[str, Any]) -> list[str]:
    """What part of the devices' speed the measured step uses, and its seconds over those that are proven to be needed."""
    step, bound = row["ways"][OURS]["step_seconds"], row["bound_seconds"]
    return [f"{row['fluid_seconds'] / step:.0%}", f"{step / bound:.3f}" if bound else "–"]


def mean_text(rows: Sequence[dict[str, Any]], way: str) -> str:
    found = [row["ways"][OURS]["samples_per_second"] / others(row)[way] for row in rows if way in others(row)]
    return f"{geometric_mean(found):.2f}" if found else "–"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """What README says of all rows: where the model fits every device, and the measured step over the proven bound."""
    fits = [row for row in rows if not row["tight"]]
    ours = [row["ways"][OURS]["samples_per_second"] for row in fits]
    best = [max(others(row).values()) for row in fits]
    equal = [(speed, others(row)[EQUAL]) for speed, row in zip(ours, fits, strict=True) if EQUAL in others(row)]
    over = [row["ways"][OURS]["step_seconds"] / row["bound_seconds"] for row in rows if row["bound_seconds"]]
    return {
        "over_equal_ddp": geometric_mean([a / b for a, b in equal]),
        "over_best_other": geometric_mean([a / b for a, b in zip(ours, best, strict=True)]),
        "rows_where_another_is_faster": sum(a < b for a, b in zip(ours, best, strict=True)),
        "rows": len(rows),
        "step_over_bound_mean": sum(over) / len(over) if over else math.nan,
        "step_over_bound_worst": max(over, default=math.nan),
    }


def told(rows: Sequence[dict[str, Any]]) -> str:
    """In which rows another way was faster, and where predictions were furthest off, as sentences."""
    lost, off = list[str](), list[tuple[float, str]]()
    for row in rows:
        where, ours = f"{row['model']} on {row['cluster']}", row["ways"][OURS]["samples_per_second"]
        way, best = max(others(row).items(), key=itemgetter(1), default=("", 0.0))
        if best > ours:
            lost.append(f"- {where}: {way} is {best / ours - 1:.1%} faster.")
        off += [(w["predicted_seconds"] / w["step_seconds"] - 1, f"{where}, {name}") for name, w in row["ways"].items()]
    worst = sorted(off, key=lambda pair: -abs(pair[0]))[:3]
    lines = [
        f"**Where hetpipe does not win**: in {len(lost)} of {len(rows)} rows.",
        "",
        *lost,
        "",
        "**Predictions that are furthest off** (above 0: the step took less):",
        "",
        *(f"- {error:+.1%}: {where}." for error, where in worst),
    ]
    return "\n".join(lines)


def accuracy(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Predicted against measured over all ways: mean and worst absolute error of seconds and of peak bytes, and the rank
    correlation of seconds within clusters, in the mean."""
    seconds = [w["predicted_seconds"] / w["step_seconds"] - 1 for row in rows for w in row["ways"].values()]
    peaks = [p / m - 1 for row in rows for w in row["ways"].values() for m, p in w["peaks"].values() if m]
    sides = [[[w[f"{side}_seconds"] for w in row["ways"].values()] for side in ("predicted", "step")] for row in rows]
    ranks = [float(spearmanr(*side).statistic) for side in sides if len(side[0]) > 2]
    return {
        "seconds_mean_error": sum(map(abs, seconds)) / len(seconds),
        "seconds_worst_error": max(map(abs, seconds)),
        "bytes_mean_error": sum(map(abs, peaks)) / len(peaks) if peaks else math.nan,
        "bytes_worst_error": max(map(abs, peaks), default=math.nan),
        "rank_correlation": sum(ranks) / len(ranks) if ranks else math.nan,
    }


def cases(models: str, only: str) -> list[tuple[str, Mix]]:
    """Models and clusters by their names; InputError for a model that there is not."""
    names = chosen("--models", models, list(MODELS))
    mixes = [mix for mix in MIXES if only.lower() in mix.name.lower()]
    return [(name, mix) for mix in mixes for name in names if name in (mix.only or names)]


def bench(
    models: Annotated[str, typer.Option(help="Names, with commas between them.")] = ",".join(MODELS),
    only: Annotated[str, typer.Option(help="Only clusters whose name has this.")] = "",
    seconds: Annotated[float, typer.Option(min=0.001, help="That a run's steps take at least, without the first two.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")] = 2,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the output file has already.")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Put the tables into README.md beside this file.")] = False,
) -> None:
    """Measure, plan and train every way on every cluster."""
    console, rows, where = Console(width=200), list[dict[str, Any]](), environment()
    if output is not None:
        check_output(output)
        if resume and output.exists():
            rows += json.loads(output.read_text("utf-8"))["rows"]
    there = {(row["model"], row["cluster"]) for row in rows}
    for model, mix in cases(models, only):
        if (model, mix.name) in there:
            continue
        rows.append(compare(model, mix, seconds, rounds))
        figures = {way: f"{found['samples_per_second']:.1f}" for way, found in rows[-1]["ways"].items()}
        console.print(f"{model} on {mix.name}: {figures}, fluid bound {BATCH / rows[-1]['fluid_seconds']:.1f}", markup=False)
        if output is not None:
            document = {"environment": where, "summary": summary(rows), "accuracy": accuracy(rows), "ratios": ratios(rows)}
            write_text(output, json.dumps({**document, "rows": rows}, indent=1) + "\n")
    console.print({**summary(rows), **accuracy(rows)})
    if readme:
        found = {**summary(rows), **accuracy(rows)}
        lines = [[name.replace("_", " "), f"{value:.3g}"] for name, value in found.items()]
        over = markdown(["over all rows", "figure"], lines)
        replace_table(README, "table", f"{where}.\n\n{table(rows)}\n{over}\n{told(rows)}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
