"""Do sums of gradients hide behind the last backward as predicted? See README.md beside this file."""

from __future__ import annotations

import os
import tempfile
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer

from hetpipe.predict.simulator import simulate
from hetpipe.runtime.gradients import GradientSync
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.spec.profile import Profile
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import profile_everywhere, run_everywhere
from hetpipe.training.trainer import Trainer

WAYS = {"in buckets": True, "after backward": False}


def job_of(folder: Path, slowdown: float, micro: int, steps: int) -> Job:
    """Eight residual blocks of 16.8 MB on two devices that are slower than this machine."""
    kind = {"memory": "4 GiB", "emulate": {"slowdown": slowdown}}
    nodes = [{"name": "n0", "devices": {"slow": 2}}]
    document: dict[str, Any] = {"format": "hetpipe.cluster/1", "device_types": {"slow": kind}, "nodes": nodes}
    cluster = Cluster.parse(document, "the bench's cluster")
    cluster.save(folder / "cluster.json")
    document = {
        "format": "hetpipe.job/1",
        "model": {"name": "mlp", "args": {"layers": 8, "width": 1024, "inputs": 256, "outputs": 10}},
        "data": {"name": "random_classification", "args": {"inputs": 256, "classes": 10, "samples": 256}},
        "cluster": str(folder / "cluster.json"),
        "train": {"global_batch": 2 * micro, "steps": steps, "optimizer": {"name": "SGD", "lr": 0.01}},
        "profiler": {"microbatch_sizes": sorted({1, micro}), "repeats": 9, "cache": str(folder / "cache")},
    }
    return Job.parse(document, "the bench's job")


def plan_of(profile: Profile, micro: int) -> Plan:
    """Two replicas of one stage, with one micro-batch each."""
    L = len(profile.layers)
    replicas = tuple(
        ReplicaPlan(microbatch_sizes=(micro,), stages=(StagePlan(layers=(0, L), devices=(f"n0/{r}",)),)) for r in range(2)
    )
    return Plan(model=profile.model, global_batch=2 * micro, replicas=replicas)


def trained(job: Job, plan: Plan, profile: Profile, early: bool) -> TrainResult | None:
    """On every rank; unless `early`, the engine is not told which backward is the last, and sums when all have ended."""
    if not early:
        GradientSync.last_backward = lambda self: None  # type: ignore[method-assign]
    return Trainer(job).run(plan, profile)


def run(
    slowdown: float = 4.0,
    micro: Annotated[str, typer.Option(help="micro-batch sizes, with commas between")] = "1,4,16",
    steps: int = 14,
    rounds: int = 4,
) -> None:
    """Measured beside predicted, sums in buckets and after backward in turns."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| micro-batch | sums | measured ms | quartiles | predicted ms | error | overrun |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for size in map(int, micro.split(",")):
        with tempfile.TemporaryDirectory() as at:
            measure(job_of(Path(at), slowdown, size, steps), size, rounds)


def measure(job: Job, micro: int, rounds: int) -> None:
    """Rows of the table."""
    profile, cluster = profile_everywhere(job), job.read_cluster()
    assert profile is not None and cluster is not None
    plan, found = plan_of(profile, micro), dict[str, list[TrainResult]]()
    for way in chain.from_iterable([list(WAYS), list(WAYS)[::-1]][i % 2] for i in range(rounds)):
        found.setdefault(way, []).append(run_everywhere(job, trained, plan, profile, WAYS[way]))
    for way, early in WAYS.items():
        update = {} if early else {"bucket_bytes": 0}
        overhead = cluster.runtime_overhead.model_copy(update=update)
        predicted = simulate(plan, profile, cluster.model_copy(update={"runtime_overhead": overhead})).step_seconds
        seconds = [x for result in found[way] for x in result.steady_seconds]
        low, middle, high = (x * 1e3 for x in (quantiles(seconds)[0], median(seconds), quantiles(seconds)[2]))
        over = max(result.overrun_fraction for result in found[way])
        print(
            f"| {micro} | {way} | {middle:.0f} | {low:.0f} to {high:.0f} | {predicted * 1e3:.0f} "
            f"| {predicted * 1e3 / middle - 1:+.1%} | {over:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(run)
