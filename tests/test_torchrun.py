"""Two agents of torchrun, of 3 and 2 processes, which are the two nodes of the cluster file: the same parameters as anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hetpipe.checkpoint import list_checkpoints
from hetpipe.config import Job
from hetpipe.start import run_everywhere, train_rank
from hetpipe.trainer import TrainResult
from tests.commands import Ended, agents, finish
from tests.jobs import Folder, train
from tests.test_trainer import reference

ROWS = [{"cuts": [2, 2, 2], "sizes": [3, 3, 2]}, {"cuts": [4, 2], "sizes": [2, 2]}]


def saved(folder: Path) -> dict[str, Tensor]:
    """The parameters and optimizer state of the newest checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(list_checkpoints(folder)[-1].glob("*.safetensors")):
        found |= load_file(file)
    return found


def under_torchrun(folder: Folder, counts: Sequence[int], *arguments: str) -> list[Ended]:
    mark = str(folder.path)
    started = agents(counts, arguments, folder.path, mark)
    try:
        return [finish(agent, folder.path, mark, f"agent{i}") for i, agent in enumerate(started)]
    finally:
        for agent in started:
            agent.kill()
            agent.wait()


@pytest.mark.slow
def test_two_agents_train_the_same_job_to_the_same_parameters(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    checkpoints = {"folder": "by_torchrun", "every_steps": 100}
    file = folder.ready((3, 2), ROWS, train=train(steps=6), checkpoint=checkpoints)
    first, second = under_torchrun(folder, [3, 2], "train", "job.yaml", "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.leftover, second.leftover) == ([], [])
    losses = json.loads(first.out)["losses"]
    assert second.out == ""  # the main rank alone prints
    assert folder.read("log/summary.json")["losses"] == losses

    here = run_everywhere(Job.read(file, [f"checkpoint.folder={tmp_path}/here"]), train_rank)
    assert isinstance(here, TrainResult)
    truth = reference(file)
    assert len(losses) == len(truth.losses) == 6
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth.losses), rtol=0, atol=1e-9)
    ours, theirs = saved(tmp_path / "here"), saved(tmp_path / "by_torchrun")
    assert set(ours) == set(theirs)
    assert {key for key in ours if key.startswith("model.")}
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-12, msg=key)

    folder.plan([{"cuts": [6], "sizes": [12]}], name="one.json")
    alone = run_everywhere(
        Job.read(file, [f"plan.file={tmp_path}/one.json", f"checkpoint.folder={tmp_path}/alone"]), train_rank
    )
    assert isinstance(alone, TrainResult)
    single = saved(tmp_path / "alone")
    assert set(single) == set(theirs)
    for key, value in single.items():
        torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.slow
def test_torchrun_without_a_cluster_file_finds_its_devices_measures_and_plans(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    measuring = {"microbatch_sizes": [2, 4], "repeats": 1, "cache": "cache"}
    folder.job(
        cluster=None,
        profile=None,
        plan={"partitioner": "even-data-parallel"},
        profiler=measuring,
        train=train(steps=3, global_batch=14),
    )
    first, second = under_torchrun(folder, [1, 1], "train", "job.yaml", "--json")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    plan = folder.read("log/plan.json")
    assert [r["stages"][0]["devices"] for r in plan["replicas"]] == [["n0/0"], ["n1/0"]]
    assert len(json.loads(first.out)["losses"]) == 3
