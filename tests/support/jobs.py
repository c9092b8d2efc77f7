"""Small jobs in a folder of their own: files as a user writes them, with a profile whose bytes are real and whose seconds are
made up, so that nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hetpipe.building.build import build_data, build_model
from hetpipe.documents.job import Job
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.measuring.profiler import assemble
from tests.support.ranks import make_plan

MLP: dict[str, Any] = {"name": "mlp", "args": {"layers": 4, "width": 16, "inputs": 8, "outputs": 4}}  # 6 layers
POINTS: dict[str, Any] = {"name": "random_classification", "args": {"samples": 50, "inputs": 8, "classes": 4, "test_samples": 20}}
TWO_AND_ONE = ({"cuts": [4, 2], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2]})  # n0/0, n0/1 beside n1/0: 12 samples
PLANNING = ("--profile", "profile.json", "--cluster", "cluster.yaml")  # options of commands, in that folder
# The plain part of a checkpoint, but for its step.
STATE: dict[str, Any] = {
    "loss": 0.5,
    "sampler": {"samples": 50, "seed": 0, "shuffle": True, "epoch": 1, "position": 10},
    "optimizer": "AdamW",
    "scheduler": "StepLR",
    "scheduler_state": {"step_size": 3, "last_epoch": 3, "base_lrs": [0.1]},
    "scheduled": [{"lr": 0.1, "momentum": None, "betas": [0.9, 0.999]}],
    "loss_scale": {"scale": 1024.0, "good_steps": 3},
}


@dataclass(frozen=True)
class Folder:
    """Where one job lives."""

    path: Path

    def write(self, name: str, content: Any) -> Path:
        file = self.path / name
        file.write_text(json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content), encoding="utf-8")
        return file

    def cluster(
        self, *counts: int, memory: str = "1 GiB", slowdown: float | dict[str, float] | None = None, name: str = "cluster.yaml"
    ) -> Path:
        """Nodes n0, n1, … of that many devices each, all of type cpu."""
        kind: dict[str, Any] = {"memory": memory, "price_per_hour": 1.0}
        if slowdown is not None:
            kind["emulate"] = {"slowdown": slowdown}
        link = {"bandwidth": "1 GB/s", "latency": "10 us"}
        nodes = [{"name": f"n{i}", "devices": {"cpu": count}, "link": link} for i, count in enumerate(counts)]
        return self.write(
            "cluster.yaml" if name is None else name,
            {"format": "hetpipe.cluster/1", "device_types": {"cpu": kind}, "nodes": nodes, "link": link},
        )

    def plan(
        self, rows: Sequence[dict[str, Any]] = TWO_AND_ONE, *, name: str = "plan.json", model: str = "mlp", **options: Any
    ) -> Path:
        file = self.path / name
        make_plan(rows, model=model, **options).save(file)
        return file

    def job(self, name: str = "job.yaml", **sections: Any) -> Path:
        """A job with the tiny mlp on cluster.yaml and plan.json, changed by whole sections (None: left out)."""
        content: dict[str, Any] = {
            "format": "hetpipe.job/1",
            "model": MLP,
            "data": POINTS,
            "cluster": "cluster.yaml",
            "profile": "profile.json",
            "plan": {"file": "plan.json"},
            "train": train(),
            "log": {"folder": str(self.path / "log"), "every_steps": 2},
        }
        content |= sections
        return self.write(name, {key: value for key, value in content.items() if value is not None})

    def profile(
        self, job_file: Path, *, types: Sequence[str] = ("cpu",), seconds: float = 1e-4, name: str = "profile.json"
    ) -> Path:
        """The profile of a job's model: `seconds` for each layer, action and sample on every type, and on the host."""
        document = yaml.safe_load(job_file.read_text())
        job = Job.parse(
            {key: value for key, value in document.items() if key not in ("cluster", "profile", "plan")}, str(job_file)
        )
        data = build_data(job)
        model = build_model(job, data)

        def measured(kind: str) -> Measurement:
            rows = tuple(tuple(seconds * size for _ in model.layers) for size in (1, 4))
            return Measurement(
                device_type=kind, microbatch_sizes=(1, 4), forward_seconds=rows, backward_seconds=rows, optimizer_seconds=rows[0]
            )

        file = self.path / name
        assemble(model, [measured(kind) for kind in types], 2.0, hosts=[measured("host")]).save(file)
        return file

    def ready(
        self,
        counts: Sequence[int] = (2, 1),
        rows: Sequence[dict[str, Any]] = TWO_AND_ONE,
        *,
        memory: str = "1 GiB",
        slowdown: float | dict[str, float] | None = None,
        **sections: Any,
    ) -> Path:
        """All four files; the job's path."""
        file = self.job(**sections)
        self.cluster(*counts, memory=memory, slowdown=slowdown)
        model = sections.get("model", MLP)
        self.plan(rows, model=model.get("name") or model["target"])
        self.profile(file)
        return file

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    def read(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())


def train(**keys: Any) -> dict[str, Any]:
    """A train section: 12 samples a step of the 50, in float64."""
    content = {
        "global_batch": 12,
        "steps": 7,
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "dtype": "float64",
        "clip_norm": 1.0,
        "scheduler": {"name": "CosineAnnealingLR", "T_max": 10, "warmup_steps": 3},
    }
    content |= keys
    return {key: value for key, value in content.items() if value is not None}
