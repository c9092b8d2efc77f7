"""A second `hetpipe finetune` in a folder (hetpipe/finetune/folder.py), and a job whose schedule begins anew: it goes on, or
says what has changed and what to do instead. (What checkpoints say of data: test_content.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.building.build import build_scheduler
from hetpipe.building.content import Content
from hetpipe.checkpoints.origin.base import BEGUN
from hetpipe.checkpoints.resume import compare, identity
from hetpipe.checkpoints.training_state import FORMAT, TrainerState
from hetpipe.documents.job import Job
from hetpipe.documents.sections.torch_named import SchedulerSection
from hetpipe.files.messages import InputError
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import DataFacts, ModelFacts, draft, filled, open_keys, schedule, steps_of
from hetpipe.finetune.folder import continued, write_job
from hetpipe.finetune.job import Made
from hetpipe.finetune.kinds import Found
from tests.support.finetuning import CARDS

DATA = Content(samples=40, whole="a" * 32, unordered="b" * 32, tokenizer="c" * 32, template="d" * 32)


def asked(**options: Any) -> Asked:
    return Asked(**{"model": "tiny", "data": ("chats.jsonl",), "global_batch": 4, **options})


def made(content: Content = DATA, samples: int = 40, **options: Any) -> Made:
    """Of a command over samples of ten steps an epoch."""
    own = draft(asked(**options), Found("chat", {"file": "chats.jsonl"}), None, cards=False)
    keys = filled(own, ModelFacts(), DataFacts(samples, 0, 9 * samples, 9 * samples, 9, [9] * samples))
    job = Job.parse(keys, "it")
    steps = steps_of(job.train.model_dump(), [samples])
    return Made(keys, job, None, "", content, steps, ("train", "scheduler") in open_keys(own))


class Left:
    """What a run has left in its folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: TrainerState | None = None
        monkeypatch.chdir(folder)
        monkeypatch.setattr("hetpipe.finetune.folder.list_checkpoints", lambda _: [Path("step")] if self.state else [])
        monkeypatch.setattr("hetpipe.finetune.folder.read_state", lambda _: self.state)

    def after(self, step: int, own: Made) -> None:
        """A checkpoint of this step, and what an earlier end has exported."""
        for name in ("adapter", "model"):
            Path("finetuned", name).mkdir(parents=True, exist_ok=True)
        section = own.job.train.scheduler
        self.state = TrainerState.parse(
            {
                "format": FORMAT,
                "step": step,
                "optimizer": "AdamW",
                "scheduler": section.name if section else None,
                "scheduler_state": {} if section else None,
                "job": {**identity(own.job), "model.base": "x"},
                "data": own.content.model_dump(mode="json") if own.content else None,
                "scheduled": [{"lr": 0.1}],
                "sampler": {"samples": 40, "seed": 0, "shuffle": True, "epoch": 0, "position": 0},
            },
            "it",
        )

    def goes_on(self, own: Made | None = None, **options: Any) -> Made:
        return continued(asked(**options), own or made(**options))

    def refuses(self, own: Made | None = None, **options: Any) -> str:
        with pytest.raises(InputError) as caught:
            self.goes_on(own, **options)
        return str(caught.value)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    return Left(tmp_path, monkeypatch)


def test_the_same_command_goes_on_with_its_schedule(left: Left) -> None:
    for step in (4, 10):
        left.after(step, made())
        assert left.goes_on() == made()
    assert left.goes_on(emulate=(CARDS,)).job.cluster == "finetuned/cluster.yaml", "other devices are not another run"


def test_a_run_of_an_earlier_version_goes_on(left: Left) -> None:
    """Which said in its checkpoints what is no longer a key."""
    left.after(4, made())
    assert left.state is not None
    assert left.state.job is not None
    left.state.job["train.gradient_sums"] = "exact"
    assert left.goes_on() == made()
    left.state.job["train.gradient_sums"] = "bfloat16"
    assert "train.gradient_sums was 'bfloat16', is 'exact'" in left.refuses()


def test_more_epochs_go_on_with_a_schedule_of_their_own(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    """The old one has come to its end: its cosine would rise again."""
    left.after(10, made())
    more = left.goes_on(epochs=2)
    assert more.keys["train"]["scheduler"] == {**schedule(10), "from_step": 10}
    assert more.job.train.scheduler is not None
    assert more.job.train.scheduler.end_step == 20
    assert "resumes from step 10 and ends at step 20. These steps have a new schedule: a warm-up" in capsys.readouterr().err
    left.after(13, more)
    assert left.goes_on(epochs=2) == more, "interrupted, it goes on with this one"
    third = left.goes_on(epochs=3)
    assert third.keys["train"]["scheduler"] == {**schedule(17), "from_step": 13}
    faster = left.goes_on(epochs=3, rate=1e-3)
    assert faster.job.train.optimizer.arguments["lr"] == 1e-3


def test_fewer_epochs_than_are_done_are_refused(left: Left) -> None:
    left.after(15, made(epochs=2))
    said = left.refuses()
    assert said.startswith(
        "finetuned holds a run that has done 15 steps, and this command asks for 10. To train anew, name anoth"
    )


def test_another_rate_is_another_run_or_begins_at_a_step_that_is_said(left: Left) -> None:
    left.after(4, made())
    said = left.refuses(rate=1e-3)
    assert said.startswith(
        "finetuned holds a run of another job. To train as this command says, name another folder with -o; to begin there with "
        "what that run has learned: --adapter finetuned/adapter; to resume this run from step 4: --set "
        "train.scheduler.from_step=4:\n"
    )
    assert "train.optimizer.lr was 0.0002, is 0.001" in said
    begun = left.goes_on(rate=1e-3, settings=("train.scheduler.from_step=4",))
    assert begun.keys["train"]["scheduler"] == {**schedule(6), "from_step": 4}
    left.after(10, made())
    assert "from_step" not in left.refuses(rate=1e-3), "nothing is left to train"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"lora": "r=4"}, "adapter.r was 16, is 4"),
        ({"lora": "none"}, "adapter.kind was 'lora', is None"),
        ({"global_batch": 8}, "train.global_batch was 4, is 8"),
        ({"settings": ("train.scheduler=",)}, "train.scheduler.name was 'CosineAnnealingLR', is None"),
        ({"settings": ("train.clip_norm=2",)}, "train.clip_norm was 1.0, is 2.0"),
        ({"model": "other"}, "model.args.weights was 'tiny', is 'other'"),
    ],
)
def test_another_job_is_told_by_its_keys(left: Left, options: dict[str, Any], what: str) -> None:
    left.after(4, made())
    said = left.refuses(made(**options), **options)
    assert said.startswith(
        "finetuned holds a run of another job. To train as this command says, name another folder with -o; to begin"
    )
    assert what in said


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"length": 5}, "data.args.length was 9, is 5"),
        ({"turns": "last"}, "data.args.turns was None, is 'last'"),
        ({"tokenizer": "other"}, "data.args.tokenizer was 'tiny', is 'other'"),
    ],
)
def test_the_same_samples_may_be_read_otherwise(
    left: Left, options: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left.after(4, made())
    assert left.goes_on(made(**options), **options) == made(**options)
    said = capsys.readouterr().err
    assert "note: the samples are the same as in the run in finetuned, though they are read in another way" in said
    assert what in said
    unknown = made(**options)._replace(content=None)
    assert what in left.refuses(unknown, **options)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (DATA.model_copy(update={"whole": "0" * 32, "unordered": "0" * 32}), "samples are others"),
        (DATA.model_copy(update={"whole": "0" * 32}), "the samples are in another order"),
        (DATA.model_copy(update={"samples": 39}), "there were 40 samples to train on, and there are 39"),
        (DATA.model_copy(update={"tokenizer": "0" * 32}), "the tokenizer is another"),
        (DATA.model_copy(update={"template": "0" * 32}), "the template of chats is another"),
    ],
)
def test_other_data_are_another_run(left: Left, content: Content, what: str) -> None:
    """Mended chats gave the old adapter, and exit code 0."""
    for step in (4, 10):
        left.after(step, made())
        assert left.refuses(made(content)) == (
            f"finetuned holds a run over other data: {what}. To train on these data, name another folder with -o; to begin "
            f"there with what "
            "that run has learned: --adapter finetuned/adapter"
        )
    left.after(4, made(lora="none"))
    assert "to begin there with what that run has learned: the model finetuned/model" in left.refuses(
        made(content, lora="none"), lora="none"
    )


def test_what_a_run_has_learned_that_has_not_ended(left: Left) -> None:
    """No adapter was in the folder that the advice named."""
    left.after(4, made())
    Path("finetuned/adapter").rmdir()
    assert left.refuses(made(DATA.model_copy(update={"samples": 39}))).endswith(
        "to begin there with what that run has learned: hetpipe export-weights finetuned/job.yaml -o finetuned-adapter, then "
        "--adapter finetuned-adapter"
    )


def test_a_run_that_began_with_an_adapter_goes_on_with_its_own(left: Left) -> None:
    """The folder with the adapter may be gone by then."""
    begun = made(adapter="finetuned/adapter", out="second")
    left.after(4, begun)
    assert left.state is not None
    assert left.state.job is not None
    left.state.job.update({"adapter.weights": None, "adapter.r": 8, "adapter.alpha": 4.0})
    assert left.goes_on(begun, adapter="finetuned/adapter", out="second") == begun
    assert "adapter.r was 8, is 16" in left.refuses(made(out="second"), out="second")
    left.state.job[BEGUN] = "finetuned/adapter"
    assert left.goes_on(begun, adapter="finetuned/adapter", out="second") == begun
    other = made(adapter="third/adapter", out="second")
    assert "adapter.weights was 'finetuned/adapter', is 'third/adapter'" in left.refuses(other, out="second")
    new = made(lora="r=8,alpha=4", out="second")
    assert "adapter.weights was 'finetuned/adapter', is None" in left.refuses(new, out="second")


def test_an_adapter_is_not_left_unread_for_the_run_that_it_came_from(left: Left) -> None:
    """--adapter finetuned/adapter, and the -o forgotten, said that the old adapter is the one that was trained."""
    left.after(10, made())
    assert left.state is not None
    assert left.state.job is not None
    left.state.job[BEGUN] = None
    own = made(adapter="finetuned/adapter")
    said = left.refuses(own, adapter="finetuned/adapter")
    assert "to begin there with what that run has learned: --adapter finetuned/adapter:\n" in said
    assert said.endswith("  adapter.weights was None, is 'finetuned/adapter'")


def test_the_base_stays_held_as_it_was_on_other_devices(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    """It hangs on them in what precision a new run holds it, and that was another job."""
    left.after(4, made())
    half = made(precision="bf16")
    assert half.keys["adapter"]["base"] == "bf16"
    assert left.goes_on(half, precision="bf16").keys["adapter"]["base"] == "as-is"
    told = capsys.readouterr().err
    assert (
        "the frozen weights stay held as as-is, as in the run in finetuned (on these devices a new run would hold them as bf16)"
        in told
    )
    said = left.refuses(made(precision="bf16", base="bf16"), precision="bf16", base="bf16")
    assert "adapter.base was 'as-is', is 'bf16'" in said


def test_a_base_that_was_moved_is_looked_at_by_the_run(left: Left) -> None:
    left.after(4, made())
    assert left.goes_on(made(), model="tiny") == made()
    Path("models/tiny").mkdir(parents=True)
    moved = made(model="models/tiny", tokenizer="tiny")
    assert left.goes_on(moved, model="models/tiny", tokenizer="tiny") == moved
    Path("tiny").symlink_to("models/tiny")
    assert left.goes_on(moved, model="models/tiny", tokenizer="tiny") == moved
    Path("other").mkdir()
    assert "model.args.weights was 'tiny', is 'other'" in left.refuses(made(model="other"), model="other")
    whole = made(model="models/tiny", tokenizer="tiny", lora="none")
    left.after(4, made(lora="none"))
    assert left.state is not None
    assert left.state.job is not None
    Path("tiny").unlink()
    del left.state.job["model.base"]
    assert "model.args.weights was 'tiny', is 'models/tiny'" in left.refuses(whole, model="models/tiny", lora="none")


def test_what_was_written_into_the_job_by_hand_is_not_lost_unsaid(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_job("finetuned", made(), "it")
    write_job("finetuned", made(), "it")
    assert capsys.readouterr().err == ""
    file.write_text(file.read_text().replace("checkpoint:", "checkpoint:\n  keep: 9"))
    write_job("finetuned", made(epochs=2), "it")
    said = capsys.readouterr().err
    assert said.startswith(
        "note: this command replaces the job in finetuned/job.yaml, which was another (to keep a key, give --set "
    )
    assert "\n  checkpoint.keep was 9, is None" in said
    assert "\n  train.epochs was 1, is 2" in said
    file.write_text("{")
    write_job("finetuned", made(), "it")
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_one(left: Left) -> None:
    Path("finetuned/adapter").mkdir(parents=True)
    assert "finetuned/adapter exists, but finetuned has no checkpoint of the run that wrote it" in left.refuses()
    Path("file").write_text("")
    assert "file is a file. Name a folder with -o" in left.refuses(made(out="file"), out="file")


# ---- jobs ----

SCHEDULED: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "model": {"name": "mlp"},
    "data": {"name": "text"},
    "train": {
        "global_batch": 4,
        "steps": 20,
        "optimizer": {"name": "AdamW", "lr": 0.1},
        "scheduler": {"name": "CosineAnnealingLR", "T_max": 10},
    },
}


def changed(**train: Any) -> dict[str, Any]:
    return identity(Job.parse({**SCHEDULED, "train": {**SCHEDULED["train"], **train}}, "it"))


def test_another_schedule_goes_on_where_it_is_said_to_begin() -> None:
    saved, longer = changed(), {"name": "CosineAnnealingLR", "T_max": 12}
    with pytest.raises(InputError) as caught:
        compare(saved, changed(scheduler=longer), Path("checkpoints/step-00000008"), step=8)
    assert "\nTo go on with another schedule, let it begin here: --set train.scheduler.from_step=8\n" in str(caught.value)
    with pytest.raises(InputError) as caught:
        compare(saved, changed(scheduler=longer, dtype="float64"), Path("step-00000008"), step=8)
    assert "from_step" not in str(caught.value)
    own = changed(scheduler={**longer, "from_step": 8}, optimizer={"name": "AdamW", "lr": 0.2})
    note = compare(saved, own, Path("step-00000008"), step=8, anew=True)
    assert note is not None
    assert "train.optimizer.lr was 0.1, is 0.2" in note
    older = {key: value for key, value in saved.items() if key != "train.scheduler.from_step"}
    assert compare(older, saved, Path("step-00000008"), step=8) is None, "a version that knew no such key"


def test_a_model_that_is_configured_otherwise_goes_on_with_that_said() -> None:
    """Its weights are those of the checkpoint; what another version of transformers says beside is no change."""
    saved = changed() | {"model.config.rms_norm_eps": 1e-6, "model.config.old": 1}
    own = changed() | {"model.config.rms_norm_eps": 0.01, "model.config.new": 2}
    note = compare(saved, own, Path("step-00000008"), step=8)
    assert note is not None
    assert note.splitlines()[1:] == ["  model.config.rms_norm_eps was 1e-06, is 0.01"]
    assert compare(changed(), own, Path("step-00000008"), step=8) is None, "a version that did not say"


def test_where_a_schedule_ends() -> None:
    def end(**keys: Any) -> int | None:
        return SchedulerSection(**keys).end_step

    assert end(name="CosineAnnealingLR", T_max=10, warmup_steps=3, from_step=7) == 20
    assert end(name="PolynomialLR", total_iters=9) == 9
    assert end(name="StepLR", step_size=3) is end(name="LinearLR", warmup_steps=3) is None


def test_a_schedule_that_begins_anew_may_end_with_the_run() -> None:
    section = SchedulerSection.model_validate({"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 10, "from_step": 10})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert build_scheduler(section, optimizer, 20 - section.from_step) is not None
