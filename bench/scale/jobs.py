"""What `run.py` trains: a small perceptron on emulated devices, by a plan that is written down."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

MODEL = {"layers": 8, "width": 64, "inputs": 16, "outputs": 4}
DEEP = MODEL["layers"] + 2  # layers with embedding and head
BATCH = 32  # samples
Row = dict[str, Any]


def cluster(count: int) -> Row:
    """As many emulated devices, none of them slower than the processor."""
    link = {"bandwidth": "1 GB/s", "latency": "50 us"}
    return {
        "format": "hetpipe.cluster/1",
        "device_types": {"cpu": {"memory": "1 GiB", "emulate": {"slowdown": 1}}},
        "nodes": [{"name": "n0", "devices": {"cpu": count}, "link": link}],
    }


def plan(count: int) -> Row:
    """Two replicas of half of the devices each; one of one device."""
    stages = max(1, count // 2)
    cuts = list(pairwise(DEEP * s // stages for s in range(stages + 1)))
    replicas = [
        {
            "microbatch_sizes": [BATCH // 2 // (count // stages)] * 2,
            "stages": [{"layers": cut, "devices": [f"n0/{r * stages + s}"]} for s, cut in enumerate(cuts)],
        }
        for r in range(count // stages)
    ]
    return {"format": "hetpipe.plan/1", "model": "mlp", "global_batch": BATCH, "replicas": replicas}


def job() -> Row:
    """One step of a small perceptron."""
    return {
        "format": "hetpipe.job/1",
        "model": {"name": "mlp", "args": MODEL},
        "data": {"name": "random_classification", "args": {"samples": 64, "inputs": 16, "classes": 4}},
        "train": {"global_batch": BATCH, "steps": 1, "optimizer": {"name": "SGD", "lr": 0.01}},
    }
