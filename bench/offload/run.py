"""What does it take to keep activations, to compute them again, or to keep them in the host's memory: predicted and measured?

    python -m bench.offload.run [--steps 6]

Two stages of a wide MLP on two emulated devices, measured by `hetpipe profile`. The same plan is trained three times, all stages
keeping, recomputing or offloading: seconds of a step and the most bytes of each device, predicted and measured, and host bytes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from hetpipe.predict.simulator import simulate
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile

WAYS: dict[str, dict[str, bool]] = {"keep": {}, "recompute": {"recompute": True}, "offload": {"offload": True}}
LAYERS, WIDTH, SIZE, MICROBATCHES = 14, 512, 512, 6
CLUSTER = {
    "format": "hetpipe.cluster/1",
    "device_types": {"card": {"memory": "1 GiB", "emulate": {"slowdown": 4.0}}},
    "nodes": [{"name": "n0", "devices": {"card": 2}, "host_memory": "2 GiB"}],
}
STAGES: list[dict[str, Any]] = [{"layers": [0, 7], "devices": ["n0/0"]}, {"layers": [7, LAYERS], "devices": ["n0/1"]}]


def job(steps: int, **sections: Any) -> dict[str, Any]:
    """A job on that cluster."""
    return {
        "format": "hetpipe.job/1",
        "model": {"name": "mlp", "args": {"layers": LAYERS - 2, "width": WIDTH, "inputs": WIDTH, "outputs": 16}},
        "data": {"name": "random_classification", "args": {"samples": 4 * SIZE * MICROBATCHES, "inputs": WIDTH, "classes": 16}},
        "cluster": "cluster.yaml",
        "profiler": {"microbatch_sizes": [SIZE]},
        "train": {
            "global_batch": SIZE * MICROBATCHES,
            "steps": steps,
            "optimizer": {"name": "SGD", "lr": 0.01},
            "evaluate_samples": 0,
        },
        **sections,
    }


def hetpipe(*arguments: str) -> None:
    """A command, of which nothing is shown unless it fails."""
    done = subprocess.run([sys.executable, "-m", "hetpipe", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def run(steps: Annotated[int, typer.Option(min=1)] = 6) -> None:
    """Measure, predict, train."""
    table = Table("activations", "step, predicted", "measured", "peak n0/0, predicted", "measured", "n0/1", "measured", "host")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
        Path("job.yaml").write_text(yaml.safe_dump(job(steps)))
        hetpipe("profile", "job.yaml", "-o", "profile.json")
        profile, cluster = Profile.load("profile.json"), Cluster.load("cluster.yaml")
        for way, flags in WAYS.items():
            plan = Plan.parse(
                {
                    "format": "hetpipe.plan/1",
                    "model": "mlp",
                    "global_batch": SIZE * MICROBATCHES,
                    "replicas": [{"microbatch_sizes": [SIZE] * MICROBATCHES, "stages": [{**stage, **flags} for stage in STAGES]}],
                },
                way,
            )
            plan.save("plan.json")
            predicted = simulate(plan, profile, cluster)
            own = job(steps, plan={"file": "plan.json"}, profile="profile.json", log={"folder": way})
            Path("job.yaml").write_text(yaml.safe_dump(own))
            hetpipe("train", "job.yaml")
            measured = json.loads(Path(way, "summary.json").read_text())
            peaks = [x[d] for d in ("n0/0", "n0/1") for x in (predicted.peak_bytes, measured["peak_bytes"])]
            memory = [f"{peak / 2**20:.1f} MiB" for peak in peaks]
            host = f"{predicted.host_bytes.get('n0', 0) / 2**20:.1f} MiB"
            table.add_row(way, f"{predicted.step_seconds:.3f} s", f"{measured['measured_step_seconds']:.3f} s", *memory, host)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(run)
