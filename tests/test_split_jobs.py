"""Jobs whose stages are split over several devices: what is measured of them, and that they train by it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hetpipe.documents.profile import Profile
from hetpipe.layers.model import Loss, mse
from hetpipe.processes.progress import LOG
from hetpipe.processes.world import World
from tests.support.commands import Command
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.split_programs import engine_of, leave

SLOWDOWN = 3.0
JOB = {
    "format": "hetpipe.job/1",
    "model": {"name": "mlp", "args": {"layers": 2, "inputs": 20, "width": 64, "outputs": 4}},
    "data": {"name": "random_classification", "args": {"inputs": 20, "classes": 4}},
    "cluster": "cluster.yaml",
    "profiler": {"tensor_parallel": [2], "microbatch_sizes": [1, 4], "repeats": 3},
    "train": {"global_batch": 8, "steps": 2, "optimizer": {"name": "AdamW", "lr": 1.0e-3}},
}
CLUSTER = {
    "format": "hetpipe.cluster/1",
    "device_types": {"emulated": {"memory": "1 GiB", "emulate": {"slowdown": SLOWDOWN}}},
    "nodes": [{"name": "box", "devices": {"emulated": 2}}],
}
SPLIT = {"layers": [0, 4], "devices": ["box/0", "box/1"]}
PLAN = {
    "format": "hetpipe.plan/1",
    "model": "mlp",
    "global_batch": 8,
    "schedule": "1f1b",
    "replicas": [{"microbatch_sizes": [4, 4], "stages": [SPLIT]}],
}


@pytest.mark.slow
def test_emulated_devices_split_layers(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("job.yaml", JOB), ("cluster.yaml", CLUSTER), ("plan.json", PLAN)):
        Path(name).write_text(json.dumps(content))  # which is YAML, too
    ended = run("profile", "job.yaml", "-o", "profile.json")
    assert ended.code == 0, ended.err
    profile = Profile.load(Path("profile.json"))
    host, paced = profile.host_at(None, 2), profile.measurement("emulated", 2)
    assert host is not profile.host_at(None)
    assert (paced.forward >= SLOWDOWN * host.forward).all(), "sleeping cannot end early"
    assert paced.parameter_bytes is not None
    assert paced.parameter_bytes[1] < profile.layers[1].parameter_bytes

    trained = run("train", "job.yaml", "--plan", "plan.json", "--set", "profile=profile.json")
    assert trained.code == 0, trained.err
    summary = json.loads(Path("runs/job/summary.json").read_text())
    assert summary["steps"] == 2


def said_at_the_start(world: World) -> list[str]:
    """Messages of a rank whose stage is split."""
    told = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    plan = make_plan([{"cuts": [10], "sizes": [2], "widths": [2]}])
    leave(engine_of(world, plan, build("splittable"), *batch("splittable", 2, 0), Loss(function=mse)))
    return told


def test_layers_that_stay_whole_are_named_once() -> None:
    first, second = run_ranks(said_at_the_start, cluster_of(2))
    told = "layers of a split stage stay whole on each of its 2 devices, since nothing says how to split them: "
    assert [line for line in first if told in line] == [f"replica 0 stage 0, device n0/0: 2 {told}'2', '8'"]
    assert not any(told in line for line in second)
