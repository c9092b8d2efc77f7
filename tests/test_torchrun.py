"""Agents of torchrun, which are the nodes of the cluster file: the same parameters as anywhere, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.documents.job import Job
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank
from tests.support import restarted_loop
from tests.support.commands import ROOT, THREADS_LEFT, Ended, agents, finish
from tests.support.jobs import Folder, train
from tests.support.ranks import make_plan
from tests.support.runs import reference


def saved(folder: Path) -> dict[str, Tensor]:
    """The parameters and optimizer state of the newest checkpoint."""
    found: dict[str, Tensor] = {}
    for file in sorted(list_checkpoints(folder)[-1].glob("*.safetensors")):
        found |= load_file(file)
    return found


def under_torchrun(folder: Folder, counts: Sequence[int], *arguments: str, **options: Any) -> list[Ended]:
    mark = str(folder.path)
    started = agents(counts, arguments, folder.path, mark, **options)
    try:
        for agent in started:  # first of all: what the first one leaves behind is not the others
            agent.wait(180)
        return [finish(agent, folder.path, mark, f"agent{i}") for i, agent in enumerate(started)]
    finally:
        for agent in started:
            agent.kill()
            agent.wait()


@pytest.mark.slow
def test_two_agents_train_the_same_job_to_the_same_parameters(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    checkpoints = {"folder": "by_torchrun", "every_steps": 100}
    file = folder.ready((2, 1), train=train(steps=6), checkpoint=checkpoints)
    first, second = under_torchrun(folder, [2, 1], "train", "job.yaml", "--json")
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
    alone = run_everywhere(Job.read(file, [f"plan.file={tmp_path}/one.json", f"checkpoint.folder={tmp_path}/alone"]), train_rank)
    assert isinstance(alone, TrainResult)
    single = saved(tmp_path / "alone")
    assert set(single) == set(theirs)
    for key, value in single.items():
        torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """By a fixed address, and of one agent."""
    folder = Folder(tmp_path)
    model = {"target": "tests.support.user_parts:failing", "args": {"how": "kill once", "step": 3 * 4}}  # in the fourth step
    rows: list[dict[str, Any]] = [{"cuts": [3, 3], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2], "devices": ["n0/2"]}]
    checkpoints = {"folder": "restarted", "every_steps": 2}
    file = folder.ready((3,), rows, model=model, train=train(steps=6), checkpoint=checkpoints)
    (ended,) = under_torchrun(folder, [3], "train", "job.yaml", restarts=1)
    assert (ended.code, ended.leftover) == (0, []), ended.err
    assert (tmp_path / "failed_at").exists()
    assert "resuming from restarted/step-00000002" in ended.err
    settings = [f"checkpoint.folder={tmp_path}/here", "model.args.only_rank=9"]  # there is none
    here = run_everywhere(Job.read(file, settings), train_rank)
    assert isinstance(here, TrainResult)
    assert here.first_step == 0
    ours, theirs = saved(tmp_path / "here"), saved(tmp_path / "restarted")
    assert set(ours) == set(theirs)
    assert [key for key, value in ours.items() if not torch.equal(value, theirs[key])] == []


@pytest.mark.thorough
@pytest.mark.slow
def test_ones_own_loop_is_restarted_on_two_agents_of_the_c10d_rendezvous(tmp_path: Path) -> None:
    """The agent of one process comes first, and so may be the first in torchrun's order."""
    folder = Folder(tmp_path)
    make_plan([{"cuts": [3, 2], "sizes": [3, 2]}, {"cuts": [5], "sizes": [3]}]).save(tmp_path / "plan.json")
    program = [str(ROOT / "tests" / "support" / "restarted_loop.py")]
    both = under_torchrun(folder, [1, 2], program=program, c10d=True, restarts=1)
    assert [(ended.code, ended.leftover) for ended in both] == [(0, []), (0, [])], both[0].err + both[1].err
    assert THREADS_LEFT not in both[0].err + both[1].err
    said = both[0].out + both[1].out
    assert said.count("begins after step 0") == said.count("begins after step 3") == 3, said

    model = restarted_loop.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=restarted_loop.RATE)
    for step in range(restarted_loop.STEPS):
        inputs, targets = restarted_loop.batch(step)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    last = tmp_path / str(restarted_loop.STEPS)
    for replica in (["0-0", "0-1"], ["1-0"]):
        found = [value for part in replica for value in load_file(last / f"{part}.safetensors").values()]
        for value, true in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(value, true.detach(), rtol=0, atol=1e-12)
