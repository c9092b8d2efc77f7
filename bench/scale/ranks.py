"""What a rank of so many works out by itself when it starts, and in a step: the functions of hetpipe, called with a plan of so
many devices, without the other ranks.

    python -m bench.scale.ranks DEVICES      (started by run.py)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.simulator.run import NODE, seconds_of, whole_plan
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.planning.shares import shares_for
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.processes.ranks.launch import rank_environment
from hetpipe.processes.world import bind_devices
from hetpipe.runtime import replicas
from hetpipe.runtime.replicas import PlanGroups, plan_groups
from hetpipe.training.metrics import _as_timeline

STAGES, MICROBATCHES, REPEATS = 8, 8, 3


def pure(devices: int) -> dict[str, float]:
    """Processor seconds of each: pipelines of eight stages (of fewer devices: one pipeline), nodes of 8 devices that share
    adapters. The names are the columns of the table."""
    stages = min(STAGES, devices)
    plan, profile, cluster = whole_plan(stages, MICROBATCHES, devices // stages, min(NODE, devices))
    places = [(device.node, int(device.node[1:]), device.index) for device in cluster.devices]
    alone = [(f"n{i}", i, 0) for i in range(devices)]
    single = [cluster.nodes[0].model_copy(update={"name": name, "devices": {"gpu": 1}}) for name, _, _ in alone]
    rank_of = bind_devices(cluster.nodes, places)
    spans = [
        (stage.device, r, s, kind, i, 1.0 * i, 1.0 + i)
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        for i in range(len(replica.microbatch_sizes))
        for kind in "FB"
    ]
    simulate(plan, profile, cluster)  # loads what is compiled
    with tempfile.TemporaryDirectory(prefix="hetpipe-scale-") as folder:
        plan_file, cluster_file = Path(folder) / "plan.json", Path(folder) / "cluster.json"
        plan.save(plan_file)
        cluster.save(cluster_file)
        actions: dict[str, Callable[[], object]] = {
            "read the cluster": lambda: Cluster.load(cluster_file),
            "read the plan": lambda: Plan.load(plan_file),
            "check it": lambda: plan.check(cluster=cluster, profile=profile, layers=stages),
            "its fingerprint": lambda: plan.fingerprint,
            "one rank's environment": lambda: rank_environment(cluster.devices, devices - 1, 1),
            "bind nodes of 8": lambda: bind_devices(cluster.nodes, places),
            "bind nodes of 1": lambda: bind_devices(single, alone),
            "list the groups": lambda: plan_groups(plan, rank_of, {}),
            "simulate": lambda: with_footprint(simulate(plan, profile, cluster), plan, profile, cluster),
            "share a whole batch": lambda: shares_for(plan, plan.global_batch),
            "share one sample less": lambda: shares_for(plan, plan.global_batch - 1),
            "a logged step": lambda: _as_timeline(spans).bubble_fraction(),
        }
        found = {name: seconds_of(action, REPEATS)[1] for name, action in actions.items()}
    return found | {"make the groups": groups_made(plan, rank_of, devices)}


def groups_made(plan: Plan, rank_of: dict[str, int], devices: int) -> float:
    """Torch's bookkeeping of the plan's process groups on one rank, over a back end that connects nothing and never waits."""
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    with patch.object(replicas, "_check_same_plan"):
        seconds = seconds_of(lambda: PlanGroups.create(plan, rank_of, {}), 1)[1]
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    print(json.dumps(pure(int(sys.argv[1]))))
