"""How long does a step wait for a checkpoint, and how much slower are steps while one is written?

python -m bench.saving.run [--rounds N] [--blocks N] [-o all.json] [--readme]
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench.beside import in_words
from bench.tables import environment, markdown, replace_table
from hetpipe.building.build import build_model
from hetpipe.cli.exits import main
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import check_output, write_text
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.training.legs import joined, leg
from hetpipe.training.loop import Loop
from hetpipe.training.session import open_session
from hetpipe.training.start import profile_everywhere

README = Path(__file__).parent / "README.md"
BATCH, WIDTH = 4, 1024
SAVES, EVERY = 2, {"processors": 9, "emulated cards": 4}  # steps, enough to write what was saved
SLOWDOWN = {"processors": None, "emulated cards": 4.0}
WAYS = {"beside the steps": False, "while they wait": True}


@dataclass
class Ran:
    """What one run showed: seconds that its steps waited for each save, and seconds of its steps, with one under way and
    without."""

    waits: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def job_of(kind: str, blocks: int, folder: Path) -> Job:
    """A model of so many blocks on two devices."""
    slowdown = SLOWDOWN[kind]
    cluster = {
        "format": "hetpipe.cluster/1",
        "device_types": {"d": {"memory": "8 GiB"} | ({"emulate": {"slowdown": slowdown}} if slowdown is not None else {})},
        "nodes": [{"name": "n", "devices": {"d": 2}}],
    }
    Cluster.parse(cluster, kind).save(folder / "cluster.json")
    content = {
        "format": "hetpipe.job/1",
        "model": {"name": "mlp", "args": {"layers": blocks, "inputs": 32, "width": WIDTH, "expansion": 4, "outputs": 10}},
        "data": {"name": "random_classification", "args": {"inputs": 32, "classes": 10, "samples": 64}},
        "cluster": str(folder / "cluster.json"),
        "profiler": {"microbatch_sizes": [BATCH], "repeats": 3},
        "train": {
            "global_batch": BATCH,
            "steps": SAVES * EVERY[kind] + EVERY[kind] // 2,
            "evaluate_samples": 0,
            "optimizer": {"name": "AdamW", "lr": 1e-4},
        },
        "checkpoint": {"folder": str(folder / "saved"), "every_steps": EVERY[kind], "keep": 1},
    }
    return Job.parse(content, kind)


def plan_of(blocks: int) -> Plan:
    """Half of the layers on each device."""
    half = blocks // 2 + 1
    stages = [{"layers": layers, "devices": [f"n/{at}"]} for at, layers in enumerate(([0, half], [half, blocks + 2]))]
    replicas = [{"microbatch_sizes": [BATCH], "stages": stages}]
    content = {"model": "mlp", "global_batch": BATCH, "schedule": "1f1b", "partitioner": "by hand", "replicas": replicas}
    return Plan.parse({"format": "hetpipe.plan/1", **content}, "by hand")


def timed(call: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
    """The same, which says how many seconds it took."""

    def found(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments)
        add(time.perf_counter() - began)
        return result

    return found


def run_once(job: Job, loop: Loop) -> Ran:
    """Train, and look at it. The save after the last step, for which every run waits, does not count."""
    assert loop.saved is not None
    assert job.checkpoint is not None
    saved, ran, under_way = loop.saved, Ran(), list[bool]()

    def more(seconds: float) -> None:
        if ran.waits:
            ran.waits[-1] += seconds

    vars(saved).update(save=timed(saved.save, ran.waits.append), complete=timed(saved.complete, more))
    loop.after.insert(0, (lambda step: True, lambda step, _: under_way.append(saved.writing is not None)))
    steps = loop.run().step_seconds
    for number, seconds in enumerate(steps):
        # those before the first save make room for gradients and the optimizer's state; one with a save ends with all optimizers
        if number >= job.checkpoint.every_steps and (number + 1) % job.checkpoint.every_steps:
            (ran.beside if under_way[number] else ran.alone).append(seconds)
    del ran.waits[-1]
    return ran


def plain(folder: Path, size_bytes: int) -> float:
    """Seconds of one process for as many bytes, until they are on the disk."""
    content = memoryview(torch.ones(size_bytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    began = time.perf_counter()
    with open(folder / "plain", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    (folder / "plain").unlink()
    return seconds


def trained(job: Job, plan: Plan, profile: Profile | None, rounds: int) -> list[dict[str, Any]]:
    """The program of each rank: the plain write and a run of each way by turns, `rounds` times."""
    session, rows = open_session(job), list[dict[str, Any]]()
    assert job.checkpoint is not None
    saved, sizes = Path(job.checkpoint.folder), list[int]()
    for number in range(rounds):
        row: dict[str, Any] = {}
        for name in list(WAYS)[:: -1 if number % 2 else 1]:
            session = replace(session, model=build_model(job, session.data))
            own = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"wait": WAYS[name]})})
            engine = joined(session, plan, profile)
            assert engine is not None
            with leg(session, plan, engine):
                row[name] = vars(run_once(own, Loop(own, session, engine)))
            if session.world.is_main:
                sizes.append(sum(file.stat().st_size for file in saved.rglob("*.safetensors")))
                shutil.rmtree(saved)
            session.world.barrier()
        if session.world.is_main:
            row |= {"plain": plain(saved.parent, sizes[-1]), "bytes": sizes[-1]}
        session.world.barrier()
        rows.append(row)
    return rows


def measure(kind: str, blocks: int, rounds: int) -> list[dict[str, Any]]:
    """All rounds on such devices, as the main rank saw them."""
    with tempfile.TemporaryDirectory(prefix="hetpipe-saving-") as name:
        job = job_of(kind, blocks, Path(name))
        profile = profile_everywhere(job) if SLOWDOWN[kind] is not None else None
        cluster = job.read_cluster()
        assert cluster is not None
        found: list[dict[str, Any]] = start_ranks(
            trained, (job, plan_of(blocks), profile, rounds), cluster.devices, modules_of(job)
        )[0]
        return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians of all rounds, with quartiles in brackets."""
    lines = list[list[str]]()
    for kind, rounds in found.items():
        lines.append([kind, "one process writes the bytes", *2 * [in_words([row["plain"] for row in rounds])], "1", "", "", ""])
        for name in WAYS:
            runs = [row[name] for row in rounds]
            first, later = [run["waits"][0] for run in runs], [median(run["waits"][1:]) for run in runs]
            ratio = [wait / row["plain"] for wait, row in zip(later, rounds, strict=True)]
            alone, beside = ([median(run[which]) if run[which] else 0.0 for run in runs] for which in ("alone", "beside"))
            slower = [b / a for a, b in zip(alone, beside, strict=True) if b]
            under_way = [len(run["beside"]) / SAVES for run in runs]
            lines.append(
                [
                    *(kind, name, in_words(first), in_words(later), in_words(ratio)),
                    in_words(alone, ".3f"),
                    in_words(slower) if slower else "",
                    f"{median(under_way):.1f}" if slower else "",
                ]
            )
    names = ["devices", "writing", "wait for the first save, s", "for a later one, s", "over one process", "a step, s"]
    return markdown([*names, "beside writing, times as long", "steps beside it"], lines, words=2)


def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Of all ways, by turns.")] = 5,
    blocks: Annotated[int, typer.Option(min=2, help="Of the model, 100 MB each with what AdamW keeps.")] = 10,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all figures as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md beside this file.")] = False,
) -> None:
    """Train on processors and on emulated cards, and save."""
    console, where = Console(width=200), environment()
    if output is not None:
        check_output(output)
    found = {kind: measure(kind, blocks, rounds) for kind in SLOWDOWN}
    size = human_bytes(max(row["bytes"] for rows in found.values() for row in rows))
    said = f"{where}. A checkpoint has {size}. Medians of {rounds} rounds, with quartiles in brackets.\n\n{table(found)}"
    console.print(said, markup=False, soft_wrap=True)
    if output is not None:
        write_text(output, json.dumps({"environment": where, "rounds": found}, indent=1) + "\n")
    if readme:
        replace_table(README, "table", said)


if __name__ == "__main__":
    main(lambda: typer.run(bench))
