"""Mutations of every kind of file that is read: what is no such file any more is refused in words, within seconds, and nothing
else happens. 30 for each kind; `--hypothesis-profile=fuzz` draws 5,000 new ones.

Commands run in this process, up to where ranks would start; what ranks read is read by what they call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetpipe.building.build import build_data, build_model, check_training
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.schedule import plain
from hetpipe.checkpoints.stores.folder import STATE_FILE
from hetpipe.documents.job import Job
from hetpipe.fastspeed import Params
from hetpipe.planning.front import Front
from hetpipe.training.observers.json_lines import trim_metrics
from hetpipe.whatif.shared import share_profile
from tests.support import fastspeed_parts as parts
from tests.support.commands import Command
from tests.support.fuzzing import FUZZ, MARKS, Place, called, fuzz_bytes, fuzz_document
from tests.support.jobs import STATE, Folder
from tests.support.mutations import DOCUMENT, Change, mutated
from tests.support.saving import older_version
from tests.support.strategies import make_profile
from tests.test_checkpoint import ALONE, net, steps

pytestmark = MARKS

PLANNING = "--profile profile.json --cluster cluster.yaml"
PLAN = f"plan {PLANNING} --global-batch 4 --partitioner"
SIMULATE = f"simulate --plan plan.json {PLANNING}"
CONVERT = "convert fastspeed args.json"
WHAT_IF = "what-if --global-batch 4 --time-limit 0.1 --json"
COMMANDS = {
    "cluster.yaml": [
        f"{PLAN} even",
        f"{PLAN} chain -o out.json",
        f"{PLAN} auto --json",
        f"{PLAN} even --pareto",
        SIMULATE,
        "train job.yaml",
        f"show plan.json {PLANNING} -o out.svg",
        "export plan.json --to torchrun --cluster cluster.yaml",
        f"{CONVERT} -o out.yaml --cluster cluster.yaml",
    ],
    "catalogue.yaml": [
        "plan --profile profile.json --cluster catalogue.yaml --global-batch 4 --partitioner even --pareto --csv out.csv"
    ],
    "profile.json": [
        f"{PLAN} even",
        f"{PLAN} chain",
        f"{PLAN} auto",
        f"{SIMULATE} --trace out.json",
        f"show plan.json {PLANNING}",
        "train job.yaml",
    ],
    "plan.json": [
        SIMULATE,
        "show plan.json",
        f"show plan.json {PLANNING} -o out.html",
        "export plan.json --to torchrun -o out.sh",
        "export plan.json --to megatron",
        "export plan.json --to deepspeed --cluster cluster.yaml",
        "train job.yaml",
    ],
    "job.yaml": ["train job.yaml", "profile job.yaml -o out.json", "train job.yaml --set train.steps=3 --set log="],
    "cards.yaml": [f"{WHAT_IF} bert-base --gpus mine,t4 --without t4 --cards cards.yaml"],
    "config.json": [
        f"{WHAT_IF} config.json --gpus t4 --without t4 --gpus p40 --network 1GB/s",
        f"{WHAT_IF} config.json --gpus t4 --lora r=8 --base nf4",
    ],
    "shared.json": [f"{WHAT_IF} own --profiles shared.json --gpus t4,p40 --without p40"],
    "args.json": [f"{CONVERT} -o out.yaml", f"{CONVERT} -o out.yaml --data {{name: cifar10}} --json"],
}
CATALOGUE = {
    "format": "hetpipe.catalogue/1",
    "device_types": {"cpu": {"memory": "1 GiB", "price_per_hour": 1.0}},
    "templates": {"a": {"devices": {"cpu": 1}, "link": {"bandwidth": "1 GB/s"}}, "b": {"devices": {"cpu": 2}}},
    "nodes": {"a": "0..1", "b": 1},
    "link": {"bandwidth": "1 GB/s", "latency": "10 us"},
    "links": [{"between": ["a", "b"], "points": [[1, 1e-4], [1000, 2e-4]]}],
}


CARDS = {"mine": {"memory": "4 GiB", "bandwidth": "100 GB/s", "fp32": 1e12, "fp16": 2e12, "aliases": ["me"], "source": "a page"}}
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """All files that commands read, and files that they are to write."""
    folder = Folder(tmp_path_factory.mktemp("fuzz"))
    folder.ready()
    folder.write("catalogue.yaml", CATALOGUE)
    folder.write("cards.yaml", {"format": "hetpipe.cards/1", "cards": CARDS})
    folder.write("config.json", CONFIG)
    share_profile(make_profile({"t4": [0.1, 0.2]}, sizes=(1, 2)), "own", folder.path / "shared.json")
    folder.write("args.json", parts.arguments(manual_partition_list=[9, 6, 3], manual_batchsize_list=[3, 2, 1]))
    for name in ("json", "yaml", "svg", "html", "csv", "sh"):
        folder.write(f"out.{name}", "was here before")
    return Place(folder.path)


def up_to_where_ranks_start(job: Job, *_: object) -> None:
    check_training(job)
    build_model(job, build_data(job))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(run: Command, workplace: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(workplace.path)
    monkeypatch.setattr("hetpipe.training.start.run_everywhere", up_to_where_ranks_start)
    monkeypatch.setattr("hetpipe.training.start.profile_everywhere", lambda job, precision: None)
    monkeypatch.delenv("HETPIPE_DATA", raising=False)
    file = workplace.path / name
    document = (json.loads if name.endswith(".json") else yaml.safe_load)(file.read_text())
    for command in COMMANDS[name]:
        assert run(*_words(command)).code == 0, "the files are right before they are changed"
    workplace.restore()

    @FUZZ
    @given(DOCUMENT, st.sampled_from(COMMANDS[name]))
    def fuzz(changes: list[Change], command: str) -> None:
        workplace.attempt(file, mutated(document, changes, name), lambda: run(*_words(command)))

    fuzz()


def _words(command: str) -> list[str]:
    """The words of a command; what stands in braces is one."""
    before, brace, rest = command.partition("{")
    inside, _, after = rest.partition("}")
    return [*before.split(), *([f"{{{inside}}}"] if brace else []), *after.split()]


def test_a_front(run: Command, workplace: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(workplace.path)
    file = tmp_path / "front.json"
    assert run(*COMMANDS["catalogue.yaml"][0].split()[:-2], "-o", file).code == 0
    fuzz_document(Place(tmp_path), file, lambda: Front.load(file).front)


def test_the_parameters_of_fastspeed(tmp_path: Path) -> None:
    file = parts.write(tmp_path / "args.json", parts.arguments())
    fuzz_document(Place(tmp_path), file, lambda: Params(str(file)))


# ---- what a run leaves


def test_metrics(tmp_path: Path) -> None:
    """Lines that are none are left out, as those that a kill has cut."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": i, "loss": 0.5}) + "\n" for i in range(6)))
    place = Place(tmp_path)
    fuzz_bytes(place, file, lambda: trim_metrics(file, 3))
    for token in (b"[" * 20_000, b'{"step": 1e999}', b'{"step": ' + b"9" * 400 + b"}"):
        place.attempt(file, token + b'\n{"step": 2}\n', lambda: called(lambda: trim_metrics(file, 3)))


def test_the_state_of_a_run(tmp_path: Path) -> None:
    def parts_of_training() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        both = [schedulers.LinearLR(optimizer, total_iters=2), schedulers.OneCycleLR(optimizer, 0.5, total_steps=9)]
        return optimizer, schedulers.SequentialLR(optimizer, both, milestones=[2])

    def resume() -> None:
        optimizer, scheduler = parts_of_training()
        state = checkpoint.read_state(tmp_path)
        state.check(plain(scheduler.state_dict()), 1, str(tmp_path))
        scheduler.load_state_dict(state.scheduler_state or {})
        optimizer.param_groups[0].update(state.scheduled[0].model_dump(exclude_none=True))
        optimizer.step()

    own = plain(parts_of_training()[1].state_dict())
    whole = {"format": "hetpipe.checkpoint/1", "step": 3, **STATE, "scheduler_state": own, "scheduled": [{"lr": 0.1}]}
    file = tmp_path / STATE_FILE
    file.write_text(json.dumps(whole))
    fuzz_document(Place(tmp_path), file, resume)


def test_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    layers = net()
    optimizer = torch.optim.AdamW(layers.parameters())
    steps(layers, optimizer, 1)
    saved = checkpoint.save(tmp_path, 3, layers, optimizer, STATE, ALONE, keep=1)
    (file,) = saved.glob("*.safetensors")
    older_version(saved)  # else any change is refused by its digest

    def resume() -> None:
        again = net(seed=5)
        other = torch.optim.AdamW(again.parameters())
        checkpoint.load(saved, again, other, ALONE)
        steps(again, other, 1)

    fuzz_bytes(Place(tmp_path), file, resume)
