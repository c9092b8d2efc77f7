"""Real gloo ranks for tests: one spawn checks many cases, since starting processes is what costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.processes.world import World, connect, create_world


def cluster_of(*counts: int) -> Cluster:
    """A cluster of plain CPU nodes n0, n1, … with that many devices each."""
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {"cpu": {"memory": "1 GiB"}},
            "nodes": [{"name": f"n{i}", "devices": {"cpu": c}} for i, c in enumerate(counts)],
            "link": {"bandwidth": "1 GB/s", "latency": "10 us"},
        },
        "test cluster",
    )


def make_plan(replicas: Sequence[dict[str, Any]], *, schedule: str = "1f1b", model: str = "test") -> Plan:
    """A plan from short rows: `cuts` [4, 3, 3] layers per stage, `sizes` of micro-batches, optional `warmup`, `recompute`,
    `offload`, `devices`, and `widths` of stages that are split; without devices, these are dealt out in order (one node a
    replica)."""
    documents = []
    for r, row in enumerate(replicas):
        at, device, stages = 0, 0, []
        for s, count in enumerate(row["cuts"]):
            width = row["widths"][s] if "widths" in row else 1
            stage: dict[str, Any] = {
                "layers": [at, at + count],
                "devices": [row["devices"][s]] if "devices" in row else [f"n{r}/{device + i}" for i in range(width)],
                "recompute": row.get("recompute", False),
                "offload": row.get("offload", False),
            }
            if "warmup" in row:
                stage["warmup"] = row["warmup"][s]
            stages.append(stage)
            at, device = at + count, device + width
        documents.append({"microbatch_sizes": row["sizes"], "stages": stages})
    total = sum(sum(row["sizes"]) for row in replicas)
    return Plan.parse(
        {"format": "hetpipe.plan/1", "model": model, "global_batch": total, "schedule": schedule, "replicas": documents},
        "test plan",
    )


def _rank_program(program: Callable[..., Any], cluster: Cluster, arguments: Sequence[Any]) -> Any:
    torch.set_num_threads(1)
    connect(use_cuda=False)
    return program(create_world(cluster), *arguments)


def run_ranks(program: Callable[..., Any], cluster: Cluster, *arguments: Any) -> list[Any]:
    """`program(world, *arguments)` on one rank per device of the cluster; the results in rank order."""
    return start_ranks(_rank_program, (program, cluster, arguments), cluster.devices)


__all__ = ["World", "cluster_of", "make_plan", "run_ranks"]
