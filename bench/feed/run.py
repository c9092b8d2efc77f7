"""Does a step wait for its samples? See README.md beside this file.

python -m bench.feed.run [--steps N]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import hetpipe
from bench.tables import markdown
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan
from hetpipe.training.loop import Loop
from hetpipe.training.session import join, open_session

STEP_SECONDS, BATCH, WORKERS = 0.1, 16, 2
SAMPLE_SECONDS = (0.0, 0.002, 0.005)
SAMPLES, REPEATS = 1 << 16, 3


class Pause(nn.Module):
    """Leaves the processor alone for as long as a GPU would compute."""

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        time.sleep(STEP_SECONDS)
        return x


def build() -> nn.Sequential:
    """A model whose step takes about STEP_SECONDS."""
    return nn.Sequential(Pause(), nn.Linear(8, 4))


class Slow(torch.utils.data.Dataset[Any]):
    """Samples each of which is waited for, as for a disk or a server."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((8,), float(index % 7)), index % 4


def load(seconds: float) -> hetpipe.DataSplits:
    """A job's data."""
    return hetpipe.DataSplits(train=Slow(seconds))


def job_of(cluster: Path, seconds: float, workers: int, steps: int) -> Job:
    """One device, and so many workers."""
    return Job.parse(
        {
            "format": "hetpipe.job/1",
            "model": {"target": "bench.feed.run:build", "coupled_layers": "per_microbatch"},  # so that layers are not tried
            "data": {"target": "bench.feed.run:load", "args": {"seconds": seconds}, "workers": workers},
            "cluster": str(cluster),
            "train": {"global_batch": BATCH, "steps": steps},
        },
        "the bench",
    )


CLUSTER = {
    "format": "hetpipe.cluster/1",
    "device_types": {"cpu": {"memory": "1 GiB"}},
    "nodes": [{"name": "n0", "devices": {"cpu": 1}}],
}
PLAN = {
    "format": "hetpipe.plan/1",
    "model": "feed",
    "global_batch": BATCH,
    "replicas": [{"microbatch_sizes": [BATCH], "stages": [{"layers": [0, 2], "devices": ["n0/0"]}]}],
}


def seconds_of(job: Job) -> list[float]:
    """Of the steps of a run in this process, after the warm-up."""
    session = open_session(job)
    engine = join(session, Plan.parse(PLAN, "the bench"), None)
    assert engine is not None
    return Loop(job, session, engine).run().steady_seconds


def main(steps: Annotated[int, typer.Option(help="Of each run.")] = 30) -> None:
    """Print the table of README.md."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="hetpipe-feed-") as folder:
        cluster = Path(folder) / "cluster.json"
        Cluster.parse(CLUSTER, "the bench").save(cluster)
        for seconds in SAMPLE_SECONDS:
            ratios, found = [], {0: list[float](), WORKERS: list[float]()}
            for _ in range(REPEATS):  # in turns, since machines are shared
                pair = [seconds_of(job_of(cluster, seconds, workers, steps)) for workers in found]
                for own, new in zip(found.values(), pair, strict=True):
                    own += new
                ratios.append(median(pair[0]) / median(pair[1]))
            rows.append(
                [
                    f"{seconds * 1e3:.0f} ms",
                    *(_cell(own) for own in found.values()),
                    f"{median(ratios):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
    names = ["a sample takes", "the rank reads them, s", f"{WORKERS} workers, s", "ratio", "of three runs each"]
    print(markdown(names, rows, words=1))


def _cell(seconds: list[float]) -> str:
    """The median, and where nine of ten lie."""
    ordered = sorted(seconds)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.05, 0.95))
    return f"{median(ordered):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    typer.run(main)
