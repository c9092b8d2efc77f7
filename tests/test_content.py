"""What has changed since a checkpoint was saved: of a job, of `hetpipe finetune` and of one's own loop, it is refused, noted,
or the same run; nothing changes in silence."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

os.environ["HF_HUB_OFFLINE"] = "1"

import hetpipe
from hetpipe.building.content import content_of
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.checkpoint import list_checkpoints, read_state
from hetpipe.checkpoints.origin.base import pinned_base
from hetpipe.checkpoints.origin.base_numbers import check_numbers, numbers_of_base
from hetpipe.checkpoints.origin.configured import config_of
from hetpipe.checkpoints.resume import check_data, compare, identity
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.folder import continued, write_job
from hetpipe.finetune.job import make_job
from hetpipe.finetune.looked import look
from hetpipe.language.conversations import chat
from hetpipe.layers.model import cross_entropy, mse
from hetpipe.layers.weights import materialise
from hetpipe.training.session import open_session
from tests.support.chats import lines
from tests.support.content_changes import CHANGES, JOB, NOTE, Change, texts
from tests.support.finetuning import small_model
from tests.support.jobs import STATE
from tests.support.ranks import make_plan
from tests.support.runs import alone


class Kept:
    """A folder with a run that has two steps done, and a loop of one's own; each test has a copy."""

    options: ClassVar[dict[str, Any]] = {
        "model": "tiny",
        "data": ("chats.jsonl",),
        "global_batch": 4,
        "lora": "r=4",
        "length": 200,
        "epochs": 2,
        "settings": ("data.args.pack=false", "data.args.test_fraction=0"),
    }
    arguments: ClassVar[dict[str, Any]] = {
        "file": "chats.jsonl",
        "length": 200,
        "pack": False,
        "test_fraction": 0.0,
        "turns": "auto",
        "lr": 2e-4,
        "r": 4,
        "optimizer": "AdamW",
        "global_batch": 4,
        "loss": cross_entropy,
        "seed": 0,
        "dropout": 0.0,
    }

    def make(self) -> None:
        """In the current folder."""
        small_model(Path("tiny"), num_hidden_layers=1)
        lines(Path("chats.jsonl"), texts())
        asked = Asked(**self.options)
        write_job("finetuned", make_job(asked, look(asked)), "test")
        alone(Path(JOB), "train.steps=2", "train.epochs=", "export=")
        self.of_a_loop(Change(""), save=True)

    def of_a_job(self, change: Change) -> None:
        """What `hetpipe train` says before it plans, and when it loads."""
        job = Job.read(JOB, change.settings)
        session, newest = open_session(job), list_checkpoints("finetuned/checkpoints")[-1]
        check_data(job, session.content, session.world)
        state = read_state(newest)
        if state.optimizer != job.train.optimizer.name:  # which the run itself says
            alone(Path(JOB), *change.settings)
        layers = session.model.layers
        note = compare(state.job, identity(job) | pinned_base(layers) | config_of(layers), newest, step=state.step)
        materialise(session.model.layers)
        check_numbers(state.base_numbers, numbers_of_base(session.model.layers, session.world), newest)
        sys.stderr.write(note or "")

    def of_finetune(self, change: Change) -> None:
        """What `hetpipe finetune` says, and then its job."""
        settings = (*self.options["settings"], *change.options.get("settings", ()))
        asked = Asked(**{**self.options, **change.options, "settings": settings})
        write_job("finetuned", continued(asked, make_job(asked, look(asked))), "test")
        self.of_a_job(Change(""))

    def of_a_loop(self, change: Change, *, save: bool = False) -> None:
        """A loop over these chats, with a model of its own that has adapters."""
        given = {**self.arguments, **change.loop}
        data = chat(given["file"], "tiny", **{key: given[key] for key in ("length", "pack", "test_fraction", "turns")})
        torch.manual_seed(given["seed"])
        net = nn.Sequential(nn.Embedding(512, 8), nn.Linear(8, 8), nn.Linear(8, 512))
        net = hetpipe.adapt(net, r=given["r"], dropout=given["dropout"], seed=1)
        plan = make_plan([{"cuts": [3], "sizes": [given["global_batch"]]}])
        engine = hetpipe.wrap(net, plan, torch.zeros(1, 8, dtype=torch.long), given["loss"], loss_weight="tokens")
        optimizer = getattr(torch.optim, given["optimizer"])(engine.parameters(), lr=given["lr"])
        if save:
            hetpipe.save_checkpoint(engine, optimizer, "own", 2, data=data)
        else:
            assert hetpipe.load_checkpoint(engine, optimizer, "own", data=data) == 2


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("origin")
    with pytest.MonkeyPatch.context() as patch, ended():
        patch.chdir(place)
        Kept().make()
    return place


@contextmanager
def ended() -> Iterator[None]:
    """With the end of a world of one."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("way", ["a_job", "finetune", "a_loop"])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_changes_in_silence(
    name: str, way: str, origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change = CHANGES[name]
    told = change.told if isinstance(change.told, str) else change.told[("a_job", "finetune", "a_loop").index(way)]
    monkeypatch.chdir(shutil.copytree(origin, tmp_path / "kept"))
    change.edit()
    capfd.readouterr()
    with ended():
        if told and not told.startswith(NOTE):
            with pytest.raises(InputError) as caught:
                getattr(Kept(), f"of_{way}")(change)
            assert told in str(caught.value)
            return
        getattr(Kept(), f"of_{way}")(change)
    said = capfd.readouterr().err
    assert told.removeprefix(NOTE) in said if told else NOTE not in said, said


def test_a_loop_that_does_not_say_its_data_is_told_so(origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Of whose data a checkpoint says nothing, nothing can be compared."""
    monkeypatch.chdir(origin)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with ended():
        engine = hetpipe.wrap(net, make_plan([{"cuts": [2], "sizes": [4]}]), torch.zeros(1, 8), mse)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        rows = TensorDataset(torch.zeros(9, 8), torch.zeros(9, 4))
        for saved, loaded, told in (
            (None, None, "save_checkpoint and load_checkpoint"),
            (rows, None, "load_checkpoint"),
            (None, rows, "save_checkpoint"),
            (rows, rows, None),
        ):
            hetpipe.save_checkpoint(engine, optimizer, "silent", 1, data=saved)
            capfd.readouterr()
            hetpipe.load_checkpoint(engine, optimizer, "silent", data=loaded)
            said = capfd.readouterr().err
            assert (f"To compare them, give {told} data=, the loop's data set" in said) if told else not said


def test_a_loop_that_goes_on_from_a_job_compares_what_that_says(origin: Path, monkeypatch: Any, capfd: Any) -> None:
    """It looked at neither data nor optimizer, and said nothing; the other way round a key was missing."""
    monkeypatch.chdir(origin)
    rows, others = (TensorDataset(torch.full((9, 8), value), torch.zeros(9, 4)) for value in (0.0, 1.0))
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with ended():
        engine = hetpipe.wrap(net, make_plan([{"cuts": [2], "sizes": [4]}]), torch.zeros(1, 8), mse)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        job = {"train.optimizer.name": "SGD", "train.optimizer.lr": 0.1, "train.global_batch": 6, "train.seed": engine.seed}
        unscheduled: dict[str, Any] = {"scheduler": None, "scheduler_state": None, "scheduled": []}
        state = {**STATE, **unscheduled, "optimizer": "SGD", "data": content_of(rows, {}).model_dump(mode="json"), "job": job}
        checkpoint.save("of-a-job", 7, engine.stage, optimizer, state, engine.world, keep=1)
        with pytest.raises(
            InputError, match=r"was saved over other data: sample 0 is another. To resume, set back what has changed, or"
        ):
            hetpipe.load_checkpoint(engine, optimizer, "of-a-job", data=others)
        capfd.readouterr()
        assert hetpipe.load_checkpoint(engine, optimizer, "of-a-job") == 7
        said = capfd.readouterr().err
        assert "was saved. The run resumes with the new values:\n  global_batch was 6, is 4\n" in said
        assert "To compare them, give load_checkpoint data=" in said
        with pytest.raises(InputError, match="saved with another optimizer: optimizer was 'SGD', is 'Adam'"):
            hetpipe.load_checkpoint(engine, torch.optim.Adam(engine.parameters()), "of-a-job", data=rows)
    with pytest.raises(InputError, match=r"comes from a loop of your own \(hetpipe.save_checkpoint\). It stores no position"):
        read_state(list_checkpoints("own")[-1])
