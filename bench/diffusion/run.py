"""How many pictures a second does a LoRA of FLUX train on two cards that are not alike, beside what people do with them today?

python -m bench.diffusion.run [--quick] [--steps N] [--rounds N] [-o all.json] [--readme]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.beside import in_words
from bench.diffusion.material import EACH, SHAPES, make_latents, make_transformer
from bench.finetune.cards import LARGE, SMALL, memory, times
from bench.finetune.run import losses_apart
from bench.finetune.ways import OURS
from bench.tables import environment, markdown, replace_table
from bench.throughput.clusters import Mix, cluster_document
from bench.throughput.run import Ran, trained
from hetpipe.cli.exits import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.files.writing import check_output, write_text
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.planning.planner import make_plan, with_prediction
from hetpipe.predict.simulator import simulate
from hetpipe.processes.progress import Activity
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.training.runlog import WARMUP_STEPS
from hetpipe.training.start import profile_everywhere

README = Path(__file__).parent / "README.md"
HALVES, PIPELINE, ONE = "blocks in two halves", "equal pipeline", "faster card alone"
ORDER = (HALVES, PIPELINE, ONE, OURS)
MIX = Mix("3090 + 4060 Ti 16 GB", ({"3090": 1, "4060ti-16": 1},))
BATCH, MIB = 8, 2**20
EQUAL = {"bf16": 1e-2}  # by which part a loss may be off that was summed in another order, where products have 8 bits
CASES = ((LARGE, "fp8"), (LARGE, "nf4"), (LARGE, "bf16"), (SMALL, "fp8"))
console = Console(width=160)


def job_of(document: dict[str, Any], folder: Path, base: str) -> Job:
    """LoRA on this cluster, whose file is put into the folder."""
    Cluster.parse(document, "the bench's cluster").save(folder / "cluster.json")
    weights = str(folder / "transformer")
    job = {
        "format": "hetpipe.job/1",
        "cluster": str(folder / "cluster.json"),
        "model": {"name": "diffusion", "args": {"weights": weights}},
        "adapter": {"r": 8, "base": base},
        "data": {"name": "latents", "args": {"folder": str(folder / "latents"), "weights": weights}},
        "loss": {"name": "denoising"},
        "profiler": {"microbatch_sizes": [1, 2, 4], "repeats": 5, "cache": str(folder / "cache")},
        "train": {
            "global_batch": BATCH,
            "steps": WARMUP_STEPS,
            "evaluate_samples": 0,
            "optimizer": {"name": "AdamW", "lr": 1e-3},
            **({"precision": "bf16"} if base == "bf16" else {}),
        },
    }
    return Job.parse(job, "the bench's job")


def halves(profile: Profile, cluster: Cluster) -> Plan:
    """Half of the blocks on each card, and one micro-batch at a time on both, so that one card computes at a time: with the
    micro-batch, and with or without recompute, that simulate fastest of what fits. PartitionError if nothing does."""
    problem, found = Problem.of(profile, cluster, BATCH, PlanOptions()), list[tuple[float, Plan]]()
    count, middle = len(profile.layers), (len(profile.layers) + 1) // 2
    for size, recompute in product(profile.measurements[0].microbatch_sizes, (False, True)):
        ends = zip((0, middle), (middle, count), cluster.devices, strict=True)
        stages = tuple(StagePlan(layers=(lo, hi), devices=(device.id,), recompute=recompute, warmup=1) for lo, hi, device in ends)
        replica = ReplicaPlan(microbatch_sizes=(size,) * (BATCH // size), stages=stages)
        plan = Plan(model=profile.model, global_batch=BATCH, partitioner="halves", replicas=(replica,))
        with suppress(PartitionError):
            plan = with_prediction(Solution(plan=plan), problem)
            found.append((simulate(plan, profile, cluster).step_seconds, plan))
    if not found:
        raise PartitionError("halves do not fit")
    return min(found, key=itemgetter(0))[1]


def plans_of(profile: Profile, cluster: Cluster) -> dict[str, Plan]:
    """The plan of each way that fits."""
    fastest = cluster.nodes[0].model_copy(update={"devices": {cluster.devices[0].type: 1}})
    alone = cluster.model_copy(update={"nodes": (fastest,)})
    rules = {PIPELINE: (cluster, "even"), ONE: (alone, "type-blind"), OURS: (cluster, "auto")}
    plans = dict[str, Plan]()
    with suppress(PartitionError):
        plans[HALVES] = halves(profile, cluster)
    for way, (cards, rule) in rules.items():
        with suppress(PartitionError):
            plans[way] = make_plan(profile, cards, BATCH, partitioner=rule)
    return plans


def row_of(runs: list[Ran]) -> dict[str, Any]:
    """One way's figures: pictures a second of each round, in the mean of its steps, which have all shapes about as often."""
    speeds = [BATCH * len(run.seconds) / sum(run.seconds) for run in runs]
    return {
        "rounds": speeds,
        "predicted": BATCH / runs[0].predicted,
        "peaks": {device: (max(run.peaks[device][0] for run in runs), found[1]) for device, found in runs[0].peaks.items()},
        "overrun": max(run.overrun for run in runs),
    }


def compare(mix: Mix, case: str, base: str, folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """All ways on one cluster, whose cards hold so much of a model with this base."""
    job = job_of(cluster_document(mix, times=times(mix)), folder, base)
    profile, cluster = profile_everywhere(job), job.read_cluster()
    assert profile is not None and cluster is not None
    job = job_of(cluster_document(mix, memory(mix, case, profile, cluster, BATCH), times(mix)), folder, base)
    cluster = job.read_cluster()
    assert cluster is not None
    with Activity(f"{mix.name}: planning"):
        plans = plans_of(profile, cluster)
    asked = dict.fromkeys(plans, steps + WARMUP_STEPS)
    ranks = start_ranks(trained, (job, plans, asked, profile, rounds), cluster.devices, modules_of(job))
    runs = {way: run for found in ranks for way, run in found.items()}
    ways = {way: row_of(runs[way]) for way in plans}
    cards = {device.id: (device.type, cluster.type_of(device.id).memory) for device in cluster.devices}
    return {
        "cluster": mix.name,
        "case": case,
        "base": base,
        "cards": cards,
        "apart": losses_apart(runs, EQUAL.get(base, 1e-5)),
        "ways": ways,
    }


def gains(row: dict[str, Any]) -> list[float]:
    """Round by round, how many times as fast hetpipe is as halves."""
    return [a / b for a, b in zip(row["ways"][OURS]["rounds"], row["ways"][HALVES]["rounds"], strict=True)]


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Speeds, then predictions."""
    speeds, held = list[list[str]](), list[list[str]]()
    for row in rows:
        name, ways = [row["cluster"], row["case"], row["base"]], row["ways"]
        cells = [in_words(ways[way]["rounds"], ".2f") if way in ways else "no room" for way in ORDER]
        speeds.append([*name, *cells, in_words(gains(row)) if HALVES in ways else "–"])
        for way in (way for way in ORDER if way in ways):
            found = ways[way]
            off = f"{found['predicted'] / median(found['rounds']) - 1:+.1%}"
            pairs = ((row["cards"][d], measured, said) for d, (measured, said) in found["peaks"].items())
            peaks = ", ".join(f"{kind} {a / MIB:.1f} ({b / MIB:.1f}) of {m / MIB:.1f}" for (kind, m), a, b in pairs)
            held.append([*name, way, off, peaks])
    apart = dict[str, float]()
    for row in rows:
        apart[row["base"]] = max(row["apart"], apart.get(row["base"], 0.0))
    said = ", ".join(f"{off:.0e} ({base})" for base, off in apart.items())
    late = max(way["overrun"] for row in rows for way in row["ways"].values())
    first = ["cluster", "model", "base"]
    parts = [
        markdown([*first, *ORDER, "times as fast as halves"], speeds, words=3),
        f"Losses of all ways are equal to {said} of them. Emulated cards were late by at most {late:.1%} of a step.\n",
        markdown([*first, "way", "predicted speed", "MiB at most, measured (predicted) of what the card has"], held, words=6),
    ]
    return "\n".join(parts)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round, one case.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Of each run, beside the first two: whole epochs have all shapes.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")] = 2,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the tables into the documentation.")] = False,
) -> None:
    """Measure, plan and train every way."""
    where, rows = environment(), list[dict[str, Any]]()
    if output is not None:
        check_output(output)
    if quick:
        steps, rounds = 2, 1
    with tempfile.TemporaryDirectory(prefix="hetpipe-diffusion-") as name:
        folder = Path(name)
        make_transformer(folder / "transformer", quick=quick)
        make_latents(folder / "latents")
        for case, base in CASES[: 1 if quick else None]:
            rows.append(compare(MIX, case, base, folder, steps, rounds))
            console.print(tables(rows[-1:]).splitlines()[2], markup=False, soft_wrap=True)
            if output is not None:
                write_text(output, json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    text = tables(rows)
    console.print(text, markup=False, soft_wrap=True)
    if readme:
        said = f"{len(SHAPES)} shapes of {EACH} samples, {BATCH} a step. Rounds: {rounds}, of {steps} steps."
        replace_table(README, "table", f"{where}. {said}\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
