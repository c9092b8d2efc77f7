"""Saving and going on: under the same plan exactly as if never interrupted, under another plan with the same numbers."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hetpipe import checkpoint
from hetpipe.config import Job
from hetpipe.formats import InputError
from hetpipe.launch import RankFailure
from hetpipe.runlog import TrainResult
from hetpipe.start import run_everywhere, train_rank
from hetpipe.tables import train_table
from hetpipe.trainer import _resumed, train_reference
from hetpipe.world import World
from tests.jobs import Folder, train

ALONE = World(rank=0, size=1, device_id="n0/0", rank_of={"n0/0": 0}, ranks=(0,), control=None)


def net(seed: int = 0, width: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def steps(layers: nn.Sequential, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        layers(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW, amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.01),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.01),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_device_goes_on_exactly_with_every_optimizer(tmp_path: Path, name: str) -> None:
    whole, factory = net(), OPTIMIZERS[name]
    optimizer = factory(whole.parameters())
    steps(whole, optimizer, 3)
    saved = checkpoint.save(tmp_path, 3, whole, optimizer, {"note": 7}, ALONE, keep=2)
    steps(whole, optimizer, 3, first=3)

    again = net(seed=9)
    other = factory(again.parameters())
    checkpoint.load(saved, again, other, ALONE)
    assert checkpoint.read_state(saved) == {"format": "hetpipe.checkpoint/1", "step": 3, "note": 7}
    steps(again, other, 3, first=3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_without_the_optimizer_only_the_model_is_read(tmp_path: Path) -> None:
    whole = net()
    optimizer = torch.optim.AdamW(whole.parameters())
    steps(whole, optimizer, 1)
    saved = checkpoint.save(tmp_path, 1, whole, optimizer, {}, ALONE, keep=1)
    again = net(seed=9)
    checkpoint.load(saved, again, None, ALONE)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(("capturable", "where"), [(False, "cpu"), (True, "meta")])
def test_steps_are_counted_where_the_optimizer_counts_them(tmp_path: Path, capturable: bool, where: str) -> None:
    whole = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(whole.parameters())
    whole(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = checkpoint.save(tmp_path, 1, whole, optimizer, {}, ALONE, keep=1)
    available = HuggingFaceStorageReader(str(saved)).read_metadata().state_dict_metadata
    there = nn.Linear(2, 2, device="meta")
    other = torch.optim.AdamW(there.parameters(), capturable=capturable)
    wanted = checkpoint._empty_optimizer_state(there, other, dict(available))
    assert wanted["optimizer.weight.step"].device.type == where
    assert wanted["optimizer.weight.exp_avg"].device.type == "meta"


def test_the_newest_are_kept_and_incomplete_ones_are_nothing(tmp_path: Path) -> None:
    whole = net()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    assert checkpoint.list_checkpoints(tmp_path / "nowhere") == []
    for step in (2, 10, 4, 6):
        checkpoint.save(tmp_path, step, whole, optimizer, {}, ALONE, keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00000006", "step-00000010"]
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000012.partial")
    (tmp_path / "step-00000014").mkdir()
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00000006", "step-00000010"]
    checkpoint.save(tmp_path, 12, whole, optimizer, {}, ALONE, keep=2)  # over what a killed run left
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00000010", "step-00000012"]
    assert not (tmp_path / "step-00000012.partial").exists()


def test_messages(tmp_path: Path) -> None:
    whole = net()
    saved = checkpoint.save(
        tmp_path, 1, whole, torch.optim.SGD(whole.parameters(), lr=0.1), {}, ALONE, keep=1
    )
    with pytest.raises(InputError, match=r"'0.weight' has shape \(4, 3\), the model \(5, 3\)"):
        checkpoint.load(saved, net(width=5), None, ALONE)
    with pytest.raises(InputError, match="has no '4.weight': it was saved from another model"):
        checkpoint.load(saved, nn.Sequential(*net(), nn.Linear(2, 2)), None, ALONE)
    (saved / checkpoint.STATE_FILE).write_text("[]")
    with pytest.raises(
        InputError,
        match="is not a checkpoint of hetpipe: its trainer.json has no format hetpipe.checkpoint/1",
    ):
        checkpoint.read_state(saved)


# Whole runs: dropout, a schedule with warm-up, partial batches (50 samples by 12), AdamW; 9 steps, or 4 and 5.

DROPOUT = {"target": "tests.user_parts:with_dropout"}
TIED = {"target": "tests.user_parts:tied"}
THREE = [{"cuts": [2, 2, 2], "sizes": [4, 4, 4]}]
SIDE_BY_SIDE = [{"cuts": [5, 1], "sizes": [5]}, {"cuts": [6], "sizes": [3, 4]}]


class Runs:
    """One job of 9 steps in a folder, run in parts."""

    def __init__(self, path: Path, **sections: Any) -> None:
        self.folder = Folder(path)
        self.file = self.folder.ready(
            **{
                "train": train(steps=9),
                "checkpoint": {"folder": str(path / "saved"), "every_steps": 2, "keep": 2},
                **sections,
            }
        )
        self.model = sections.get("model", {}).get("target", "mlp")

    def run(self, *settings: str) -> TrainResult:
        result = run_everywhere(Job.read(self.file, settings), train_rank)
        assert isinstance(result, TrainResult)
        return result

    def plan(self, counts: tuple[int, ...], rows: list[dict[str, Any]]) -> None:
        self.folder.cluster(*counts)
        self.folder.plan(rows, model=self.model)

    def uninterrupted(self) -> TrainResult:
        return self.run("checkpoint=")

    def newest(self) -> Path:
        return checkpoint.list_checkpoints(self.folder.path / "saved")[-1]


SCHEDULES: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR after a warm-up": {},
    "OneCycleLR, which moves the betas too": {
        "scheduler": {"name": "OneCycleLR", "max_lr": 0.05, "total_steps": 12}
    },
    "no schedule, SGD with momentum": {
        "scheduler": None,
        "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    },
}


@pytest.mark.parametrize("changes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_under_the_same_plan_an_interrupted_run_is_the_uninterrupted_one(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    runs = Runs(tmp_path, model=DROPOUT, train=train(steps=9, **changes))
    truth = runs.uninterrupted()
    first = runs.run("train.steps=4")
    assert runs.newest().name == "step-00000004"
    second = runs.run()
    assert (second.first_step, len(second.losses)) == (4, 5)
    assert first.losses + second.losses == truth.losses  # bit for bit
    assert second.evaluation == truth.evaluation
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "saved")] == [
        "step-00000008",
        "step-00000009",
    ]
    assert [line["step"] for line in runs.folder.lines("log/metrics.jsonl")] == [2, 4, 6, 8, 9]
    assert [line["loss"] for line in runs.folder.lines("log/metrics.jsonl")] == [
        truth.losses[i - 1] for i in (2, 4, 6, 8, 9)
    ]
    log = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    done = runs.run()
    assert (done.first_step, done.losses, done.evaluation) == (9, [], truth.evaluation)
    assert (done.summary()["steps"], done.summary()["last_loss"]) == (9, truth.losses[-1])
    assert (done.overrun_fraction, done.peak_bytes) == (0.0, {})
    assert {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()} == log
    console = Console(file=io.StringIO(), width=120)
    console.print(train_table(done))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "9 (the run was finished: none was left to do)" in said
    assert f"{truth.losses[-1]:.4f}" in said
    assert truth.evaluation is not None
    assert f"{truth.evaluation.loss:.4f}" in said


def test_what_is_said_of_a_checkpoint() -> None:
    """A run may be told to have fewer steps than it has done."""
    newest = Path("saved/step-00000009")
    anew = "to start anew, name another checkpoint.folder, or remove that one"
    assert _resumed(newest, 9, 10) == f"resuming from {newest}; {anew}"
    for total in (9, 7):
        assert _resumed(newest, 9, total) == (
            f"this run is finished: {newest} is of step 9, the job has {total}; to go on, give it more steps; {anew}"
        )


@pytest.mark.parametrize("model", [TIED, {"target": "tests.user_parts:with_batch_norm_of_8", "batch_norm": "per_microbatch"}],
                         ids=["tied", "buffers"])  # fmt: skip
def test_under_another_plan_it_goes_on_with_the_same_numbers(tmp_path: Path, model: dict[str, Any]) -> None:
    """Saved by a pipeline of three, resumed by two replicas, then by one device: AdamW's state goes where its layer is."""
    runs = Runs(tmp_path, model=model)
    runs.plan((3,), THREE)
    parts = [runs.run("train.steps=4")]
    runs.plan((2, 1), SIDE_BY_SIDE)
    parts.append(runs.run("train.steps=6"))
    runs.plan((1,), [{"cuts": [6], "sizes": [12]}])
    parts.append(runs.run())
    losses = [loss for part in parts for loss in part.losses]
    assert len(losses) == 9
    if "batch_norm" in model:  # each micro-batch is normalised by itself: other plans, other numbers
        assert parts[-1].evaluation is not None
        assert losses[-1] < losses[0]
    else:
        truth = train_reference(Job.read(runs.file))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth.losses), rtol=0, atol=1e-9)


def test_a_run_that_was_killed_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    truth = runs.uninterrupted()
    runs.run("train.steps=7")
    assert runs.newest().name == "step-00000007"
    runs.newest().rename(tmp_path / "saved/step-00000007.partial")  # killed while saving it
    log = tmp_path / "log/metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 7, "lo')
    rest = runs.run()
    assert rest.first_step == 6
    assert rest.losses == truth.losses[6:]
    assert [line["step"] for line in runs.folder.lines("log/metrics.jsonl")] == [2, 4, 6, 8, 9]


def test_messages_of_a_run_that_cannot_go_on(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.run("train.steps=2")
    saved = runs.newest()

    def message(*settings: str) -> str:
        with pytest.raises(RankFailure) as caught:
            runs.run(*settings)
        assert caught.value.report is not None
        assert caught.value.report.code == 2
        return str(caught.value)

    assert f"checkpoint {saved} was saved with the optimizer AdamW, the job has SGD" in message(
        "train.optimizer.name=SGD")  # fmt: skip
    assert "was saved with the scheduler CosineAnnealingLR, the job has None" in message("train.scheduler=")
    assert "the checkpoint was saved over 50 samples, the data now has 60" in message("data.args.samples=60")
    assert "checkpoint.resume is false, but" in message("checkpoint.resume=false")
    own = runs.file.read_text()
    narrow = {"name": "mlp", "args": {"layers": 4, "width": 8, "inputs": 8, "outputs": 4}}
    runs.folder.profile(runs.folder.job(model=narrow))
    runs.file.write_text(own)
    # every rank finds a parameter of its own too wide; which of them is heard first is a race
    wider = message("model.args.width=8")
    assert re.search(r"has shape \((4, )?16[\d, ]*\), the model \((4, )?8[\d, ]*\)$", wider), wider
    runs.folder.profile(runs.file)
    state = saved / checkpoint.STATE_FILE
    whole = json.loads(state.read_text())
    state.write_text(json.dumps({key: value for key, value in whole.items() if key != "optimizer"}))
    assert "lacks ['optimizer'] in trainer.json: another version saved it" in message()
    next(saved.glob("*.safetensors")).write_bytes(b"half")
    state.write_text(json.dumps(whole))
    assert f"cannot read checkpoint {saved}: " in message()
