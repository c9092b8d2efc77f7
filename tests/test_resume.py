"""A checkpoint says what it is of: a run goes on exactly, with what has changed said, or not at all."""

from __future__ import annotations

import functools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hetpipe.building.build import build_layers
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.resume import compare, identity
from hetpipe.checkpoints.state_tensors import state_keys
from hetpipe.documents.job import Job
from hetpipe.documents.profile import Profile
from hetpipe.files import folders
from hetpipe.files.folders import check_room, claimed
from hetpipe.files.messages import InputError
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.training.runlog import TrainResult
from hetpipe.training.start import run_everywhere, train_rank
from hetpipe.training.trainer import checkpoint_bytes
from tests.support.commands import finish, start
from tests.support.jobs import STATE, Folder, train
from tests.support.runs import ONE, trained
from tests.support.saving import older_version
from tests.test_checkpoint import ALONE, OPTIMIZERS, net, steps

ADAM, AMSGRAD = OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW, amsgrad"]
SGD = functools.partial(torch.optim.SGD, lr=0.01)
TWO = "exp_avg, exp_avg_sq, "
MOMENTUM = OPTIMIZERS["SGD with momentum"]


def saved_by(path: Path, factory: Any, dtype: torch.dtype = torch.float32, frozen: bool = False) -> Path:
    whole = net().to(dtype)
    if frozen:
        whole[0].requires_grad_(False)
    optimizer = factory([p for p in whole.parameters() if p.requires_grad])
    for step in range(2):
        torch.manual_seed(step)
        whole(torch.randn(5, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()
    return checkpoint.save(path, 2, whole, optimizer, STATE, ALONE, keep=2)


def loaded(saved: Path, factory: Any, whole: nn.Sequential | None = None) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    whole = net(seed=9) if whole is None else whole
    optimizer = factory(whole.parameters())
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    try:
        checkpoint.load(saved, whole, optimizer, ALONE, whole=whole, keeps=state_keys(factory))
    except InputError:
        assert all(torch.equal(before[name], value) for name, value in whole.state_dict().items())  # nothing is changed
        raise
    return whole, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_finds_what_it_keeps(tmp_path: Path, name: str) -> None:
    factory = OPTIMIZERS[name]
    whole, optimizer = loaded(saved_by(tmp_path, factory), factory)
    steps(whole, optimizer, 1)


def test_what_an_optimizer_did_not_train_has_no_state(tmp_path: Path) -> None:
    whole, optimizer = loaded(saved_by(tmp_path, ADAM, frozen=True), ADAM)
    assert len(optimizer.state) == 4  # of 6 parameters
    steps(whole, optimizer, 1)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (ADAM, AMSGRAD, f"of '0.weight' it has {TWO}step; the job's optimizer keeps {TWO}max_exp_avg_sq, step"),
        (AMSGRAD, ADAM, f"of '0.weight' it has {TWO}max_exp_avg_sq, step; the job's optimizer keeps {TWO}step"),
        (MOMENTUM, SGD, "of '0.weight' it has momentum_buffer; the job's optimizer keeps nothing"),
    ],
    ids=["amsgrad more", "amsgrad less", "momentum less"],
)
def test_another_kind_of_optimizer_state_is_refused(tmp_path: Path, before: Any, after: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded(saved_by(tmp_path, before), after)
    assert f"holds another model or optimizer; name another checkpoint.folder to start anew:\n  {message}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (lambda: net()[:2], "it has '3.bias', which the model has not\n  it has '3.weight', which the model has not"),
        (lambda: nn.Sequential(*net(), nn.Linear(2, 2)), "it has no '4.weight', which the model has"),
        (lambda: net(width=5), "'0.weight' has shape (4, 3), in the model (5, 3)"),
        (lambda: net().double(), "'0.weight' is float32, in the model float64 (train.dtype)"),
        (lambda: net().bfloat16(), "'0.weight' is float32, in the model bfloat16 (train.dtype)"),
    ],
    ids=["fewer layers", "more layers", "wider", "float64", "bfloat16"],
)
def test_another_model_is_refused_whether_larger_or_smaller(tmp_path: Path, whole: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded(saved_by(tmp_path, ADAM), ADAM, whole())
    assert f"  {message}" in str(caught.value)


@pytest.mark.parametrize("key", ["optimizer.0.weight.exp_avg", "optimizer.0.weight.step", "model.0.weight"])
def test_a_tensor_that_was_lost_is_missed(tmp_path: Path, key: str) -> None:
    saved = saved_by(tmp_path, ADAM)
    (file,) = saved.glob("*.safetensors")
    older_version(saved)
    left = {name: tensor for name, tensor in load_file(file).items() if name != key}
    save_file(left, file)
    with pytest.raises(InputError) as caught:
        loaded(saved, ADAM)
    assert str(caught.value) == (
        f"checkpoint {saved} holds {len(left)} tensors, but {len(left) + 1} were saved. A file is missing or has been changed; "
        "remove it to resume from the one before"
    )


JOB: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "model": {"name": "mlp", "args": {"layers": 4}},
    "data": {"name": "text", "args": {"context": 16}},
    "train": {
        "global_batch": 12,
        "steps": 7,
        "clip_norm": 1.0,
        "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
        "scheduler": {"name": "StepLR", "step_size": 10},
    },
}


def changed(**changes: Any) -> dict[str, Any]:
    """What a job depends on after changes such as `train__optimizer__lr=0.2`; None takes a key away."""
    document = json.loads(json.dumps(JOB))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = document
        for name in parents:
            place = place[name]
        place[last] = value
        if value is None:
            del place[last]
    return identity(Job.parse(document, "the test's"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"train__steps": 50}, None),
        ({"train__evaluate_samples": "all"}, None),
        ({"train__on_nonfinite": "skip"}, None),
        ({"train__global_batch": 24}, "  train.global_batch was 12, is 24"),
        ({"train__clip_norm": None}, "  train.clip_norm was 1.0, is None"),
        ({"train__seed": 3}, "  train.seed was 0, is 3 (the order of the samples stays that of the old one)"),
        ({"model__args": {"layers": 4, "dropout": 0.1}}, "  model.args.dropout was None, is 0.1"),
        (
            {"train__optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}},
            "  train.optimizer.weight_decay was None, is 0.2",
        ),
    ],
)
def test_what_a_run_goes_on_with_is_said(changes: dict[str, Any], said: str | None) -> None:
    heard = compare(changed(), changed(**changes), Path("saved/step-00000002"), step=2)
    start_of_it = "note: the job has changed since saved/step-00000002 was saved. The run resumes with the new values:\n"
    assert heard == (None if said is None else start_of_it + said)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"train__scheduler__step_size": 20}, "train.scheduler.step_size was 10, is 20"),
        ({"train__scheduler__warmup_steps": 5}, "train.scheduler.warmup_steps was 0, is 5"),
        ({"train__optimizer__lr": 0.2}, "train.optimizer.lr was 0.1, is 0.2"),
        ({"train__optimizer__momentum": 0.5}, "train.optimizer.momentum was 0.9, is 0.5"),
        ({"train__dtype": "bfloat16"}, "train.dtype was 'float32', is 'bfloat16'"),
        ({"train__frozen_dtype": "bfloat16", "train__precision": "bf16"}, "train.frozen_dtype was 'float32', is 'bfloat16'"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused_with_both_values(changes: dict[str, Any], refused: str) -> None:
    with pytest.raises(InputError) as caught:
        compare(changed(), changed(**changes), Path("saved/step-00000002"), step=2)
    begin = "" if "dtype" in refused else "To go on with another schedule, let it begin here: --set train.scheduler.from_step=2\n"
    assert str(caught.value) == (
        f"checkpoint saved/step-00000002 belongs to another job:\n  {refused}\nTo resume, set these keys back.\n{begin}"
        "To start anew, name another folder: --set checkpoint.folder=FOLDER"
    )


def test_without_a_schedule_the_rate_may_change_and_a_schedule_cannot_come_in_the_midst() -> None:
    plain = {"train__scheduler": None}
    heard = compare(changed(**plain), changed(**plain, train__optimizer__lr=0.2), Path("saved"), step=2)
    assert str(heard).endswith("  train.optimizer.lr was 0.1, is 0.2")
    with pytest.raises(InputError, match="train.scheduler.name was None, is 'StepLR'"):
        compare(changed(**plain), changed(), Path("saved"), step=2)
    assert compare(None, changed(), Path("saved"), step=2) is None  # by a version that did not say
    older = {key: value for key, value in changed().items() if "precision" not in key and "loss_scale" not in key}
    assert len(older) < len(changed())
    assert compare(older, changed(), Path("saved"), step=2) is None  # by one that did not have these keys
    heard = compare(older, changed(train__precision="bf16"), Path("saved"), step=2)
    assert str(heard).endswith("  train.precision was None, is 'bf16'")


def test_a_changed_rate_is_the_one_that_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Under a schedule it is refused: the schedule's state holds the old one."""
    folder = Folder(tmp_path)
    section = {"folder": str(tmp_path / "saved"), "every_steps": 1}
    plain = train(steps=2, scheduler=None)
    file = folder.ready(train=plain, checkpoint=section)

    def run(*settings: str) -> TrainResult:
        result: TrainResult = run_everywhere(Job.read(file, settings), train_rank)
        return result

    run()
    run("train.steps=4", "train.optimizer.lr=0.002")
    assert "\n  train.optimizer.lr was 0.01, is 0.002" in capfd.readouterr().err
    assert [line["learning_rate"] for line in folder.lines("log/metrics.jsonl")] == [0.01, 0.002]
    folder.job(train=train(steps=2), checkpoint={**section, "folder": str(tmp_path / "other")})
    run()
    with pytest.raises(RankFailure, match="train.optimizer.lr was 0.01, is 0.002") as caught:
        run("train.steps=4", "train.optimizer.lr=0.002")
    assert caught.value.exit_code == 2
    with pytest.raises(
        RankFailure, match="from_step is 1, so this schedule would replace another from that step on, but the newest"
    ):
        run("train.steps=4", "train.scheduler.from_step=1")
    scheduler = ("train.scheduler.from_step=2", "train.scheduler.warmup_steps=0", "train.scheduler.T_max=2")
    anew = ("train.optimizer.lr=0.002", *scheduler)
    (tmp_path / "log" / "metrics.jsonl").unlink()
    run("train.steps=3", *anew)
    capfd.readouterr()
    run("train.steps=5", *anew)
    assert [line["learning_rate"] for line in folder.lines("log/metrics.jsonl")] == pytest.approx([0.001, 0.0, 0.001])
    told = capfd.readouterr().err
    assert "the schedule CosineAnnealingLR ends at step 4 of 5, behind which the learning rate rises again" in told
    assert "To give it the length of the run: 'train.scheduler={name: CosineAnnealingLR, T_max: 2, from_step: 3}'" in told


def test_a_run_that_ended_with_its_schedule_gets_another_one_for_more_steps(tmp_path: Path) -> None:
    """It went on with a rate that rose again."""
    folder = Folder(tmp_path)
    cosine = {"name": "CosineAnnealingLR", "T_max": 2, "warmup_steps": 1}
    file = folder.ready(
        (1,),
        ONE,
        train=train(steps=3, scheduler=cosine),
        checkpoint={"folder": str(tmp_path / "saved"), "every_steps": 1},
        log={"folder": str(tmp_path / "log"), "every_steps": 1},
    )
    trained(file)
    with pytest.raises(
        RankFailure, match="ends at step 3 of 6, behind which the learning rate rises again. Let another"
    ) as found:
        trained(file, "train.steps=6")
    (advice,) = re.findall(r"--set '(train.scheduler=.*?})'", str(found.value))
    trained(file, "train.steps=6", advice)
    rates = [line["learning_rate"] for line in folder.lines("log/metrics.jsonl")]
    assert rates == sorted(rates[:3], reverse=True) + sorted(rates[3:], reverse=True)
    assert rates[3] == pytest.approx(0.01 * 0.75)


# ---- folders ----


def test_a_folder_is_claimed_by_one_run_at_a_time(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with claimed({"checkpoint.folder": folder, "log.folder": f"{folder}/."}):  # one folder for both
        with pytest.raises(InputError) as caught, claimed({"log.folder": folder}):
            pass
        holder = json.loads((tmp_path / "saved" / folders.HOLDER_FILE).read_text())
        assert str(caught.value) == (
            f"{folder} (log.folder) is in use by another run: process {holder['process']} on host {holder['host']}, since "
            f"{holder['since']}. Wait for it, or name another folder"
        )
        (tmp_path / "saved" / folders.HOLDER_FILE).write_text("{half")
        with pytest.raises(InputError, match="it has not yet said which"), claimed({"log.folder": folder}):
            pass
    with claimed({"log.folder": folder}):
        pass
    assert not (tmp_path / "saved" / folders.HOLDER_FILE).exists()


def test_of_two_runs_on_one_folder_the_second_is_refused_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    saved = {"folder": str(tmp_path / "saved"), "every_steps": 5}
    folder.ready(slowdown=20.0, train=train(steps=10**6, scheduler=None), checkpoint=saved)  # its devices mostly wait
    first = start(["-m", "hetpipe", "train", "job.yaml"], tmp_path, f"{tmp_path}/first", "first")
    try:
        while not checkpoint.list_checkpoints(tmp_path / "saved"):
            assert first.poll() is None
            time.sleep(0.05)
        message = rf"{tmp_path}/saved \(checkpoint.folder\) is in use by another run: process "
        with pytest.raises(RankFailure, match=message) as caught:
            run_everywhere(Job.read(tmp_path / "job.yaml"), train_rank)
        assert caught.value.exit_code == 2
        assert first.poll() is None
    finally:
        first.kill()
        assert finish(first, tmp_path, f"{tmp_path}/first", "first").leftover == []
    newest = int(checkpoint.list_checkpoints(tmp_path / "saved")[-1].name.removeprefix("step-"))
    result = run_everywhere(Job.read(tmp_path / "job.yaml", [f"train.steps={newest + 1}"]), train_rank)
    assert (result.first_step, len(result.losses)) == (newest, 1)


def test_there_is_room_or_the_message_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room(tmp_path / "not/yet", 1000, "nothing")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=300 * 2**20))
    with pytest.raises(InputError) as caught:
        check_room("saved", 2**30, "the checkpoint of step 4")
    assert str(caught.value) == (
        "there is no room for the checkpoint of step 4 in saved: it needs 1.00 GiB, but 300 MiB are free. Free some, or name "
        "another "
        "folder"
    )


def test_the_bytes_of_a_checkpoint_are_known_before_the_first_step(tmp_path: Path) -> None:
    """AdamW keeps two numbers of each parameter; what is tied is saved under each of its names but counted once."""
    folder = Folder(tmp_path)
    found = checkpoint_bytes(Profile.load(folder.profile(folder.job())))
    parameters = sum(p.numel() * 8 for p in build_layers(Job.read(tmp_path / "job.yaml")).parameters())
    assert found == 3 * parameters
    frozen = folder.profile(folder.job(model={"target": "tests.support.user_parts:mostly_frozen"}), name="frozen.json")
    layers = build_layers(Job.read(tmp_path / "job.yaml"))
    every, trained = (sum(p.numel() * 8 for p in layers.parameters() if p.requires_grad or any_) for any_ in (True, False))
    assert checkpoint_bytes(Profile.load(frozen)) == every + 2 * trained < 1.1 * every
    run_everywhere(Job.read(folder.ready(checkpoint={"folder": str(tmp_path / "saved")}), ["train.steps=1"]), train_rank)
    (saved,) = checkpoint.list_checkpoints(tmp_path / "saved")
    assert sum(file.stat().st_size for file in saved.glob("*.safetensors")) == pytest.approx(found, rel=0.3)  # with headers


# ---- numbers that are none ----

FOURTH = r"the output of layer 3 \('3'\) of rank 1, replica 0 stage 1, device n0/1, whose inputs are finite"


def nan_job(path: Path, how: str, **keys: Any) -> Folder:
    """Layer 3, on rank 1, gives no numbers from the third step on (three micro-batches a step)."""
    folder = Folder(path)
    rows = [{"cuts": [3, 3], "sizes": [3, 3, 2]}, {"cuts": [6], "sizes": [2, 2]}]
    model = {"target": "tests.support.user_parts:failing", "args": {"how": how, "step": 7}}
    folder.ready(
        rows=rows,
        model=model,
        train=train(steps=6, **keys),
        checkpoint={"folder": str(path / "saved"), "every_steps": 1, "keep": 2},
    )
    return folder


def test_a_loss_that_is_no_number_stops_the_run_with_the_layer_it_came_from(tmp_path: Path) -> None:
    folder = nan_job(tmp_path, "nan")
    with pytest.raises(RankFailure) as caught:
        run_everywhere(Job.read(folder.path / "job.yaml"), train_rank)
    assert caught.value.exit_code == 1
    assert caught.match(rf"^step 3: the loss is nan; the first number that is not finite is in {FOURTH}; a smaller ")
    assert caught.value.resume == f"step 2, {tmp_path}/saved/step-00000002"
    assert caught.value.report is not None
    assert caught.value.report.line == ""  # it is no fault of the code
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "saved")] == ["step-00000001", "step-00000002"]


def test_such_a_step_is_left_out_or_taken_but_never_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = nan_job(tmp_path, "nan once", on_nonfinite="skip")
    result = run_everywhere(Job.read(folder.path / "job.yaml"), train_rank)
    assert [loss == loss for loss in result.losses] == [True, True, False, True, True, True]
    assert "note: step 3 is left out: the loss is nan" in capfd.readouterr().err
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "saved")] == ["step-00000005", "step-00000006"]
    assert [line["loss"] for line in folder.lines("log/metrics.jsonl")] == [result.losses[1], result.losses[3], result.losses[5]]

    settings = ["train.on_nonfinite=ignore", f"checkpoint.folder={tmp_path}/ignored"]
    result = run_everywhere(Job.read(folder.path / "job.yaml", settings), train_rank)
    assert [loss == loss for loss in result.losses] == [True, True, False, False, False, False]
    assert "note: step 6 is not saved, because its parameters are not finite" in capfd.readouterr().err
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "ignored")] == ["step-00000001", "step-00000002"]
    assert [line["loss"] for line in folder.lines("log/metrics.jsonl")] == [result.losses[1], None, None]
    assert json.loads((tmp_path / "log/summary.json").read_text())["last_loss"] is None


def test_a_key_that_is_gone_is_read_where_it_changed_nothing() -> None:
    old = Job.parse({**JOB, "train": {**JOB["train"], "gradient_sums": "exact"}}, "job")
    assert old == Job.parse(JOB, "job")
    own = identity(old)
    assert compare({**own, "train.gradient_sums": "exact"}, own, Path("saved"), step=2) is None
    told = compare({**own, "train.gradient_sums": "bfloat16"}, own, Path("saved"), step=2)
    assert told is not None
    assert "train.gradient_sums was 'bfloat16', is 'exact'" in told
    with pytest.raises(InputError, match=r"gradient_sums.*sums of gradients are exact"):
        Job.parse({**JOB, "train": {**JOB["train"], "gradient_sums": "bfloat16"}}, "job")
