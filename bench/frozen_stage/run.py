"""Nothing in the first layers trains: stages below the first that does run forwards only. How long is a step, beside one in which
every layer runs a backward?

    python -m bench.frozen_stage.run [--steps N] [--slowdowns 20,40] [-o frozen.json] [--readme]

The same chain twice. In the one nothing below its upper third trains. In the other one number of its first layer trains as well,
so that gradients have to come down to it: what every layer would take if nobody looked whether they are needed.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset

from bench.tables import environment, markdown, replace_table
from hetpipe.building.build import build_model
from hetpipe.building.datasets import DataSplits
from hetpipe.cli.exits import main
from hetpipe.files.writing import check_output, write_text
from hetpipe.planning.planner import make_plan
from hetpipe.predict.simulator import simulate
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.runtime.stages import transfers
from hetpipe.runtime.stages.engine import TorchEngine
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from hetpipe.training.loop import Loop
from hetpipe.training.session import join, open_session
from hetpipe.training.start import profile_everywhere

README = Path(__file__).parent / "README.md"
LAYERS, FROZEN, WIDTH, ROWS, BATCH = 12, 8, 128, 32, 16
WAYS = {"naive": "one number of layer 0 as well", "cut as naive": "layers 8 to 11, cut as the first", "frozen": "layers 8 to 11"}
console = Console(width=200)


class Block(nn.Module):
    """[samples, ROWS, WIDTH] → the same."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else x * self.scale
        more: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + more


def chain(way: str) -> nn.Sequential:
    """The model of a way."""
    layers = nn.Sequential(*(Block(scaled=way == "naive" and i == 0) for i in range(LAYERS)))
    for name, parameter in layers[:FROZEN].named_parameters():
        parameter.requires_grad_(name.endswith("scale"))
    return layers


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Inputs, and what they are to become."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def numbers() -> DataSplits:
    """Random samples and what they are to become."""
    x, y = torch.randn(2, 8 * BATCH, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataSplits(train=Numbers(x, y))


def job_of(way: str, folder: Path, slowdowns: list[float], steps: int) -> Job:
    """The job, and its cluster file in the folder."""
    cluster = {
        "format": "hetpipe.cluster/1",
        "link": {"bandwidth": "1 GB/s", "latency": "100 us"},
        "device_types": {f"t{i}": {"memory": "4 GiB", "emulate": {"slowdown": x}} for i, x in enumerate(slowdowns)},
        "nodes": [{"name": f"n{i}", "devices": {f"t{i}": 1}} for i in range(len(slowdowns))],
    }
    (folder / "cluster.json").write_text(json.dumps(cluster))
    return Job.parse(
        {
            "format": "hetpipe.job/1",
            "cluster": str(folder / "cluster.json"),
            "model": {"target": "bench.frozen_stage.run:chain", "args": {"way": way}},
            "data": {"target": "bench.frozen_stage.run:numbers"},
            "loss": {"name": "mse"},
            "profiler": {"microbatch_sizes": [1, 2], "repeats": 5, "cache": str(folder / "cache")},
            "train": {"global_batch": BATCH, "steps": steps, "evaluate_samples": 0, "optimizer": {"name": "AdamW", "lr": 1e-4}},
        },
        way,
    )


class Ran(NamedTuple):
    """Layers of each stage; seconds of a step, predicted and measured; bytes of gradients that came to the first stage in a step;
    the part of the time by which emulated devices were late."""

    cut: list[int]
    predicted: float
    seconds: float
    back: float
    late: float


def trained(job: Job, plans: list[Plan], profile: Profile) -> list[tuple[int, Ran]]:
    """The program of every rank: each plan in turn, with the number of its stage."""
    session, found, sent, send = open_session(job), list[tuple[int, Ran]](), dict[int, int](), transfers.Outgoing.send

    def counted(self: transfers.Outgoing, tensors: Any) -> None:
        sent[id(self)] = sent.get(id(self), 0) + sum(t.nbytes for t in tensors)
        send(self, tensors)

    transfers.Outgoing.send = counted  # type: ignore[method-assign]
    for plan in plans:
        session = replace(session, model=build_model(job, session.data.train, session.data.names))  # as before the last plan
        engine = join(session, plan, profile)
        if engine is None:
            continue
        assert isinstance(engine, TorchEngine)
        result = Loop(job, session, engine).run()
        returned = [run._returned for run in engine._runs.values()]
        back = sum(sent.get(id(lane), 0) for lane in returned if lane is not None) / (job.train.steps or 1)
        cut = [stage.layers[1] - stage.layers[0] for stage in plan.replicas[0].stages]
        predicted = simulate(plan, profile, session.cluster).step_seconds
        found.append((engine.index, Ran(cut, predicted, median(result.steady_seconds), back, result.overrun_fraction)))
    return found


def measured(slowdowns: list[float], steps: int) -> dict[str, Ran]:
    """One pipeline over these devices: each way with its own plan, and the frozen chain with the other's, too."""
    found, plans = dict[str, Ran](), dict[str, Plan]()
    for way in ("naive", "frozen"):
        with tempfile.TemporaryDirectory() as name:
            job = job_of(way, Path(name), slowdowns, steps)
            profile, cluster = profile_everywhere(job), job.read_cluster()
            assert profile is not None
            assert cluster is not None
            plans[way] = make_plan(profile, cluster, BATCH, partitioner="chain")
            own = [plans[way]] if way == "naive" else [plans["naive"].model_copy(update={"model": profile.model}), plans[way]]
            ranks = start_ranks(trained, (job, own, profile), cluster.devices, modules_of(job))
        for i, key in enumerate(["naive"] if way == "naive" else ["cut as naive", "frozen"]):
            rows = {index: row for rank in ranks for index, row in rank[i : i + 1]}
            found[key] = rows[0]._replace(back=rows[1].back if 1 in rows else 0.0)
    return found


def table(found: dict[str, dict[str, Ran]]) -> str:
    """Three rows for each set of devices."""
    rows = list[list[str]]()
    for devices, ways in found.items():
        for name, ran in ways.items():
            off = f"{ran.predicted / ran.seconds - 1:+.1%}"
            cut, back = " + ".join(map(str, ran.cut)), f"{ran.back / 2**10:,.0f} KiB"
            rows.append(
                [
                    devices,
                    WAYS[name],
                    cut,
                    back,
                    f"{ran.predicted:.3f}",
                    f"{ran.seconds:.3f}",
                    off,
                    f"{ways['naive'].seconds / ran.seconds:.2f}",
                ]
            )
    header = [
        "devices",
        "what trains",
        "layers",
        "back to stage 0, a step",
        "predicted, s",
        "measured, s",
        "predicted is off",
        "times as fast as the first",
    ]
    return markdown(header, rows)


def bench(
    steps: Annotated[int, typer.Option(min=8, help="Of each run.")] = 20,
    slowdowns: Annotated[list[str] | None, typer.Option(help="Of a pipeline's devices, with commas; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all numbers as JSON.")] = None,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md.")] = False,
) -> None:
    """Train the chain each way."""
    if output is not None:
        check_output(output)
    found = {}
    for row in slowdowns or ["20,20", "20,40", "20,30,40"]:
        found["× " + ", ".join(row.split(","))] = measured([float(x) for x in row.split(",")], steps)
    text = table(found)
    console.print(text, markup=False, soft_wrap=True)
    late = max(ran.late for ways in found.values() for ran in ways.values())
    if output is not None:
        told = {devices: {way: ran._asdict() for way, ran in ways.items()} for devices, ways in found.items()}
        write_text(output, json.dumps(told, indent=1) + "\n")
    if readme:
        replace_table(README, "ways", f"{environment()} Emulated devices were late by at most {late:.1%} of a step.\n\n{text}")


if __name__ == "__main__":
    main(lambda: typer.run(bench))
