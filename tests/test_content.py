"""What has changed since a checkpoint was saved: of a job, of `hetpipe finetune` and of one's own loop, it is refused, noted,
or the same run; nothing changes in silence."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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
from hetpipe.files.messages import InputError
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.folder import continued, write_job
from hetpipe.finetune.job import make_job
from hetpipe.finetune.looked import look
from hetpipe.language.conversations import chat
from hetpipe.layers.model import cross_entropy, mse
from hetpipe.layers.weights import materialise
from hetpipe.spec.job import Job
from hetpipe.training.session import open_session
from tests.support.chats import chat_of, lines
from tests.support.finetuning import small_model
from tests.support.jobs import STATE
from tests.support.ranks import make_plan
from tests.support.runs import alone

from safetensors.torch import load_file, save_file  # isort: skip

JOB, SAME, NOTE = "finetuned/job.yaml", "", "note: "
Edit = Callable[[], object]


def texts(count: int = 12) -> list[dict[str, Any]]:
    """Each of another length, with one answer or two."""
    last = ("and?", "No.")
    return [chat_of(f"Hello {'the ' * i}fox", f"Yes, {'dog ' * (i % 5)}{i}.", *last[: 2 * (i % 2)]) for i in range(count)]


def written(change: Callable[[list[Any]], object]) -> Edit:
    """The chats with a change."""

    def edit() -> None:
        records = texts()
        change(records)
        lines(Path("chats.jsonl"), records)

    return edit


def in_file(name: str, change: Callable[[Any], object]) -> Edit:
    """A JSON file of the model's folder with a change."""

    def edit() -> None:
        path = Path("tiny", name)
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def swapped(tokenizer: Any) -> None:
    words = tokenizer["model"]["vocab"]
    first, second = (next(w for w, n in words.items() if n == number) for number in (270, 290))
    words[first], words[second] = words[second], words[first]


def joined(tokenizer: Any) -> None:
    tokens = tokenizer["added_tokens"]
    tokens.append({**tokens[-1], "id": 511, "content": "<tool>"})


def in_template(old: str, new: str) -> Edit:
    def edit() -> None:
        path = Path("tiny/chat_template.jinja")
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return edit


def one_row() -> None:
    """Of one word, in the middle of the largest tensor."""
    path = Path("tiny/model.safetensors")
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][201] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def moved() -> None:
    Path("chats.jsonl").rename("others.jsonl")


def mended(records: list[Any]) -> None:
    records[3]["messages"][1]["content"] += " Mended."


def turned(records: list[Any]) -> None:
    records[2], records[7] = records[7], records[2]


def spaced() -> None:
    file = Path("chats.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record, separators=(" , ", " : ")) + "\n" for record in records))


def annotated(records: list[Any]) -> None:
    for number, record in enumerate(records):
        record["id"] = number


class Change(NamedTuple):
    """Files that are edited; options of the command, and the job's settings that say the same; arguments of the loop's data, its
    optimizer, batch and so on. `told`: what is said by all three, or by each of (job, finetune, own loop): a refusal, unless it
    begins with "note: "."""

    told: str | tuple[str, str, str]
    edit: Edit = bool
    options: Mapping[str, Any] = {}
    settings: tuple[str, ...] = ()
    loop: Mapping[str, Any] = {}


OTHERS, ORDER = "samples are others", "the samples are in another order"
ROW = "was saved with adapters of a model with other numbers, under the same names and shapes; layer 'embed' is the first"
EPSILON = "write model.args.weights as it was (tiny)\n  model.config.rms_norm_eps was 1e-06, is 0.01"
CHANGES = {
    "an answer was mended": Change(OTHERS, written(mended)),
    "a word became another": Change(OTHERS, written(lambda r: r[5]["messages"][0].update(content="Hello dog"))),
    "two chats changed places": Change(ORDER, written(turned)),
    "one chat less": Change("there were 12 samples to train on, and there are 11", written(lambda r: r.pop(4))),
    "one chat more": Change("there were 12 samples to train on, and there are 13", written(lambda r: r.append(r[0]))),
    "a chat twice, another gone": Change(OTHERS, written(lambda r: r.__setitem__(4, r[5]))),
    "an answer is not learned": Change(OTHERS, written(lambda r: r[7]["messages"][1].update(weight=0))),
    "an answer that is not learned, at the end": Change(
        SAME,
        written(
            lambda r: r[6]["messages"].extend(
                [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "No.", "weight": 0}]
            )
        ),
    ),
    "a system prompt": Change(OTHERS, written(lambda r: r[0]["messages"].insert(0, {"role": "system", "content": "well"}))),
    "keys that nobody reads": Change("note: of chats.jsonl, nothing reads the keys (each in so many", written(annotated)),
    "spaces between keys": Change(SAME, spaced),
    "the file was moved": Change(
        ("note: data.args.file was 'chats.jsonl', is 'others.jsonl'", "note: data.args.file was 'chats.jsonl'", SAME),
        moved,
        {"data": ("others.jsonl",)},
        ("data.args.file=others.jsonl",),
        {"file": "others.jsonl"},
    ),
    "two words changed their numbers": Change("the tokenizer is another", in_file("tokenizer.json", swapped)),
    "a special token more": Change("the tokenizer is another", in_file("tokenizer.json", joined)),
    "what the tokenizer is called": Change(SAME, in_file("tokenizer_config.json", lambda c: c.update(name_or_path="it"))),
    "the template begins otherwise": Change("the template of chats is another", in_template("{% for", "Hello{% for")),
    "the template in other words": Change("the template of chats is another", in_template("{% for", "{# #}{% for")),
    "one row of the base": Change((ROW, ROW, "was saved with adapters of the model "), one_row, loop={"seed": 1}),
    "how the base computes": Change((EPSILON, EPSILON, SAME), in_file("config.json", lambda c: c.update(rms_norm_eps=0.01))),
    "samples were cut": Change(
        "there were 12 samples to train on, and there are ", bool, {"length": 16}, ("data.args.length=16",), {"length": 16}
    ),
    "a limit that cuts nothing": Change(
        ("note: data.args.length was", "note: data.args.length was", SAME),
        bool,
        {"length": 250},
        ("data.args.length=250",),
        {"length": 250},
    ),
    "packed": Change(
        "there were 12 samples to train on, and there are ",
        bool,
        {"settings": ("data.args.pack=true",)},
        ("data.args.pack=true",),
        {"pack": True},
    ),
    "some are held out": Change(
        "there were 12 samples to train on, and there are 9",
        bool,
        {"settings": ("data.args.test_fraction=0.25",)},
        ("data.args.test_fraction=0.25",),
        {"test_fraction": 0.25},
    ),
    "the last answers only": Change(OTHERS, bool, {"turns": "last"}, ("data.args.turns=last",), {"turns": "last"}),
    "all answers, said by name": Change(
        ("note: data.args.turns was None, is 'all'", "note: data.args.turns was None, is 'all'", SAME),
        bool,
        {"turns": "all"},
        ("data.args.turns=all",),
        {"turns": "all"},
    ),
    "another rank": Change(
        ("adapter.r was 4, is 8", "adapter.r was 4, is 8", "r was 4, is 8"), bool, {"lora": "r=8"}, ("adapter.r=8",), {"r": 8}
    ),
    "another dropout": Change(
        ("note: adapter.dropout was 0.0, is 0.1", "adapter.dropout was 0.0, is 0.1", "note: the model's modules"),
        bool,
        {"lora": "r=4,dropout=0.1"},
        ("adapter.dropout=0.1",),
        {"dropout": 0.1},
    ),
    "another rate": Change(
        (
            "train.optimizer.lr was 0.0002, is 0.001",
            "train.optimizer.lr was 0.0002, is 0.001",
            "note: optimizer.lr was 0.0002, is 0.001",
        ),
        bool,
        {"rate": 1e-3},
        ("train.optimizer.lr=0.001",),
        {"lr": 1e-3},
    ),
    "another optimizer": Change(
        (
            "saved with the optimizer AdamW, the job has SGD",
            "train.optimizer.name was 'AdamW', is 'SGD'",
            "optimizer was 'AdamW', is 'SGD'",
        ),
        bool,
        {"settings": ("train.optimizer.name=SGD",)},
        ("train.optimizer.name=SGD",),
        {"optimizer": "SGD"},
    ),
    "another batch": Change(
        ("note: train.global_batch was 4, is 6", "train.global_batch was 4, is 6", "note: global_batch was 4, is 6"),
        bool,
        {"global_batch": 6},
        ("train.global_batch=6",),
        {"global_batch": 6},
    ),
    "another loss": Change(
        (
            "note: loss.fused was 'auto', is False",
            "loss.fused was 'auto', is False",
            "note: loss was 'cross_entropy', is 'cross_entropy(label_smoothing=0.1)'",
        ),
        bool,
        {"settings": ("loss.fused=false",)},
        ("loss.fused=false",),
        {"loss": partial(nn.functional.cross_entropy, label_smoothing=0.1)},
    ),
}


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
            assert (f"is not looked at: give {told} data=, the loop's data set" in said) if told else not said


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
        with pytest.raises(InputError, match=r"is of other data: sample 0 is another. Set back what has changed to go on, or"):
            hetpipe.load_checkpoint(engine, optimizer, "of-a-job", data=others)
        capfd.readouterr()
        assert hetpipe.load_checkpoint(engine, optimizer, "of-a-job") == 7
        said = capfd.readouterr().err
        assert "was saved, and goes on as it is now:\n  global_batch was 6, is 4\n" in said
        assert "is not looked at: give load_checkpoint data=" in said
        with pytest.raises(InputError, match="saved with another optimizer: optimizer was 'SGD', is 'Adam'"):
            hetpipe.load_checkpoint(engine, torch.optim.Adam(engine.parameters()), "of-a-job", data=rows)
    with pytest.raises(InputError, match=r"is of a loop of one's own \(hetpipe.save_checkpoint\), which says no place"):
        read_state(list_checkpoints("own")[-1])
