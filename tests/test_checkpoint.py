"""Saving and going on: under the same plan exactly as if never interrupted, under another plan with the same numbers."""

from __future__ import annotations

import copy
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from bench.reference import train_reference
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.resume import resumed
from hetpipe.checkpoints.state_tensors import empty_optimizer_state, model_state, optimizer_state
from hetpipe.checkpoints.stores.folder import STATE_FILE, stored_at
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.world import World
from hetpipe.training.results.table import train_table
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank
from tests.support.jobs import STATE, Folder, train
from tests.support.saving import older_version

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


WHOLE = {"format": "hetpipe.checkpoint/1", "step": 4, **STATE}
DELETED = object()

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
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
    saved = checkpoint.save(tmp_path, 3, whole, optimizer, STATE, ALONE, keep=2)
    steps(whole, optimizer, 3, first=3)

    again = net(seed=9)
    other = factory(again.parameters())
    checkpoint.load(saved, again, other, ALONE)
    count = len(model_state(whole) | optimizer_state(whole, optimizer))
    state = checkpoint.read_state(saved).model_dump(mode="json", exclude={"files", "digest"})
    unsaid: dict[str, Any] = {**dict.fromkeys(("job", "data", "base_numbers", "evaluated", "stream", "last")), "reference": {}}
    unsaid["sampler"] = {**WHOLE["sampler"], "chunk": None}
    assert state == {**WHOLE, "step": 3, "tensors": count, **unsaid}
    steps(again, other, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


def test_without_the_optimizer_only_the_model_is_read(tmp_path: Path) -> None:
    whole = net()
    optimizer = torch.optim.AdamW(whole.parameters())
    steps(whole, optimizer, 1)
    saved = checkpoint.save(tmp_path, 1, whole, optimizer, {}, ALONE, keep=1)
    again = net(seed=9)
    checkpoint.load(saved, again, None, ALONE)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize(("capturable", "where"), [(False, "cpu"), (True, "meta")])
def test_steps_are_counted_where_the_optimizer_counts_them(tmp_path: Path, capturable: bool, where: str) -> None:
    whole = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(whole.parameters())
    whole(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = checkpoint.save(tmp_path, 1, whole, optimizer, {}, ALONE, keep=1)
    available = checkpoint.tensors_in(stored_at(saved), None)
    there = nn.Linear(2, 2, device="meta")
    other = torch.optim.AdamW(there.parameters(), capturable=capturable)
    wanted = empty_optimizer_state(there, other, available)
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
    saved = checkpoint.save(tmp_path, 1, whole, torch.optim.SGD(whole.parameters(), lr=0.1), {}, ALONE, keep=1)
    with pytest.raises(
        InputError, match=r"holds another model or optimizer; .*\n  '0.weight' has shape \(4, 3\), in the model \(5, 3\)"
    ):
        checkpoint.load(saved, net(width=5), None, ALONE)
    with pytest.raises(InputError, match="it has no '4.weight', which the model has"):
        checkpoint.load(saved, nn.Sequential(*net(), nn.Linear(2, 2)), None, ALONE)


DAMAGED: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("format",), "hetpipe.checkpoint/2", "its format is 'hetpipe.checkpoint/2', expected 'hetpipe.checkpoint/1'"),
    (("step",), DELETED, "step: Field required"),
    (("step",), -1, "step: Input should be greater than or equal to 0 (got -1)"),
    (("step",), 2.5, "step: Input should be a valid integer (got 2.5)"),
    (("step",), 10**18, "step: Input should be less than or equal to 1000000000000"),
    (("step",), 10**30, "step: a whole number of about 30 digits"),
    (("step",), "4", "step: Input should be a valid integer (got '4')"),
    (("step",), True, "step: Input should be a valid integer (got True)"),
    (("loss",), float("nan"), "loss: Input should be a finite number (got nan)"),
    (("sampler",), DELETED, "sampler: Field required"),
    (("sampler",), [1, 2], "sampler: Input should be a valid dictionary"),
    (("sampler", "position"), 51, "sampler: position 51 is outside an epoch of 50 samples"),
    (("sampler", "position"), None, "sampler.position: Input should be a valid integer"),
    (("sampler", "epoch"), -3, "sampler.epoch: Input should be greater than or equal to 0 (got -3)"),
    (("sampler", "epoch"), 10**15, "sampler.epoch: Input should be less than or equal to"),
    (("sampler", "seed"), 10**17, "sampler.seed: Input should be less than or equal to"),
    (("sampler", "shuffle"), "yes", "sampler.shuffle: Input should be a valid boolean: write true or false (got 'yes')"),
    (("optimizer",), 7, "optimizer: Input should be a valid string (got 7)"),
    (("scheduler",), None, "scheduler is None, but scheduler_state is {"),
    (("scheduler_state",), [1], "scheduler_state: Input should be a valid dictionary"),
    (("scheduled",), {"lr": 1}, "scheduled: Input should be a valid tuple"),
    (("scheduled", 0, "lr"), float("inf"), "scheduled.0.lr: Input should be a finite number (got inf)"),
    (("scheduled", 0, "betas"), [0.9], "scheduled.0.betas.1: Field required"),
    (("scheduled", 0, "params"), [0], "scheduled.0: unknown key 'params'"),
    (("extra",), 1, "unknown key 'extra'"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGED)
def test_a_damaged_state_is_refused_by_its_key(tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str) -> None:
    file = tmp_path / STATE_FILE
    document = copy.deepcopy(WHOLE)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    file.write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        checkpoint.read_state(tmp_path)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "4", '{"format": "hetpipe.checkpoint/1", "st', "\0", "{" * 5_000])
def test_what_is_no_state_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(InputError, match=f"^{tmp_path / STATE_FILE}( is|:) "):
        checkpoint.read_state(tmp_path)


def test_a_state_that_was_cut_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"format": "hetpipe.checkpoint/1", "st')
    with pytest.raises(InputError, match=r"Unterminated string .*; remove this checkpoint to resume from the one before$"):
        checkpoint.read_state(tmp_path)


# Whole runs: dropout, a schedule with warm-up, partial batches (50 samples by 12), AdamW; 9 steps, or 4 and 5.

DROPOUT = {"target": "tests.support.user_parts:with_dropout"}
TIED = {"target": "tests.support.user_parts:tied"}
THREE = [{"cuts": [2, 2, 2], "sizes": [4, 4, 4]}]
SIDE_BY_SIDE = [{"cuts": [5, 1], "sizes": [5]}, {"cuts": [6], "sizes": [3, 4]}]


class Runs:
    """One job of 9 steps in a folder, run in parts."""

    def __init__(self, path: Path, **sections: Any) -> None:
        self.folder = Folder(path)
        self.file = self.folder.ready(
            **{"train": train(steps=9), "checkpoint": {"folder": str(path / "saved"), "every_steps": 2, "keep": 2}, **sections}
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
    "OneCycleLR, which moves the betas too": {"scheduler": {"name": "OneCycleLR", "max_lr": 0.05, "total_steps": 12}},
    "no schedule, SGD with momentum": {"scheduler": None, "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9}},
}


FIRST = "OneCycleLR, which moves the betas too"  # of the others `make test-all` makes sure


@pytest.mark.parametrize(
    "changes",
    [pytest.param(own, id=name, marks=() if name == FIRST else pytest.mark.thorough) for name, own in SCHEDULES.items()],
)
def test_under_the_same_plan_an_interrupted_run_is_the_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    runs = Runs(tmp_path, model=DROPOUT, train=train(steps=9, **changes))
    truth = runs.uninterrupted()
    first = runs.run("train.steps=4")
    assert runs.newest().name == "step-00000004"
    second = runs.run()
    assert (second.first_step, len(second.losses)) == (4, 5)
    assert first.losses + second.losses == truth.losses  # bit for bit
    assert second.evaluation == truth.evaluation
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "saved")] == ["step-00000008", "step-00000009"]
    assert [line["step"] for line in runs.folder.lines("log/metrics.jsonl")] == [2, 4, 6, 8, 9]
    assert [line["loss"] for line in runs.folder.lines("log/metrics.jsonl")] == [truth.losses[i - 1] for i in (2, 4, 6, 8, 9)]
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
    assert resumed(newest, 9, 10) == f"resuming from {newest}; {anew}"
    for total in (9, 7):
        assert resumed(newest, 9, total) == (
            f"this run is finished: {newest} is of step 9, the job has {total}; to go on, give it more steps; {anew}"
        )


@pytest.mark.parametrize(
    "model",
    [TIED, {"target": "tests.support.user_parts:with_batch_norm_of_8", "batch_norm": "per_microbatch"}],
    ids=["tied", "buffers"],
)
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
        assert caught.value.resume == "", "not from that one"
        return str(caught.value)

    assert f"checkpoint {saved} was saved with the optimizer AdamW, but the job has SGD" in message("train.optimizer.name=SGD")
    assert "was saved with the scheduler CosineAnnealingLR, but the job has None" in message("train.scheduler=")
    assert "was saved over other data: there were 50 samples to train on, and there are 60. To resume, set back" in message(
        "data.args.samples=60"
    )
    assert "checkpoint.resume is false, but" in message("checkpoint.resume=false")
    own = runs.file.read_text()
    narrow = {"name": "mlp", "args": {"layers": 4, "width": 8, "inputs": 8, "outputs": 4}}
    runs.folder.profile(runs.folder.job(model=narrow))
    runs.file.write_text(own)
    assert "\n  'embed.weight' has shape (16, 8), in the model (8, 8)\n" in message("model.args.width=8")
    runs.folder.profile(runs.file)
    state = saved / STATE_FILE
    whole = json.loads(state.read_text())
    state.write_text(json.dumps({key: value for key, value in whole.items() if key != "optimizer"}))
    assert f"{state}: 1 fault(s) in this checkpoint\n  optimizer: Field required" in message()
    file = next(saved.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit
    state.write_text(json.dumps(whole))
    told = f"checkpoint {saved} is not as it was written; remove it to resume from the one before:\n  {file.name} has other"
    assert told in message()
    older_version(saved)
    file.write_bytes(b"half")
    assert f"cannot read checkpoint {saved}: " in message()
