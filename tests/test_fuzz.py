"""Mutations of every kind of file that is read: what is no such file any more is refused in words, within seconds, and nothing
else happens. 60 for each kind; `--hypothesis-profile=fuzz` draws 5,000 new ones.

Commands run in this process, up to where ranks would start; what ranks read is read by what they call."""

from __future__ import annotations

import json
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hetpipe.building.build import build_data, build_layers, build_model, check_training
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import adapter_keys, base_of
from hetpipe.checkpoints.schedule import plain
from hetpipe.checkpoints.stores.folder import STATE_FILE
from hetpipe.exchange.importers import ImportOptions, import_published
from hetpipe.fastspeed import Params
from hetpipe.fastspeed.module import load_optimizer, put_weights, read_checkpoint
from hetpipe.files.messages import clipped, exit_code
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.adapters.adapt import adapt
from hetpipe.layers.weights import materialise
from hetpipe.planning.front import Front
from hetpipe.spec.cluster import Link
from hetpipe.spec.job import Job
from hetpipe.training.observers.json_lines import trim_metrics
from hetpipe.whatif.shared import share_profile
from tests.support import fastspeed_parts as parts
from tests.support.commands import Command, Said
from tests.support.jobs import STATE, Folder
from tests.support.mutations import BINARY, DOCUMENT, Change, damaged, mutated
from tests.support.published import FASOP_SIZES, ZORSE_SIZES, write_fasop, write_sailor, write_zorse
from tests.support.saving import older_version
from tests.support.strategies import UNHURRIED, make_profile
from tests.support.zoo import ZOO, transformers_model
from tests.test_checkpoint import ALONE, net, steps
from tests.test_metis import METIS, write_metis

MANY = settings.get_current_profile_name() == "fuzz"
FUZZ = settings(**UNHURRIED, max_examples=5_000 if MANY else 60)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7_200 if MANY else 300)]
SECONDS = 10.0  # of processor time


class TooLong(BaseException):
    """A command that took more."""


@contextmanager
def limited() -> Iterator[None]:
    """At most so many seconds of this process's time, however busy the machine."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def called(function: Callable[[], object]) -> Said:
    """What a command would say that does nothing but this."""
    try:
        function()
    except Exception as error:
        code = exit_code(error)
        return Said(code, "", clipped(f"error: {error}") if code != 1 else traceback.format_exc())
    return Said(0, "", "")


class Place:
    """A folder whose files are put back after each attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def attempt(self, file: Path, data: bytes, command: Callable[[], Said]) -> None:
        file.write_bytes(data)
        try:
            with limited():
                said = command()
            assert said.code in (0, 2, 3), said.err
            now = {found: found.read_bytes() for found in self.path.rglob("*") if found.is_file()}
            if said.code:
                lines = said.err.splitlines()
                assert "error: " in [line[:7] for line in lines[:3]], said.err  # after what it begins, and what it notes
                assert "Traceback" not in said.err
                assert len(lines) <= 10, said.err
                assert max(map(len, lines)) <= 1_007, said.err
                assert now == self.files | {file: data}, "a file was written though the command failed"
            assert not (self.path / "seen").exists(), "code of the file was run"
            assert all(now[found] == content for found, content in self.files.items() if found not in (file, self.out(found)))
        finally:
            self.restore()

    def restore(self) -> None:
        for found in self.path.rglob("*"):
            if found.is_file() and found not in self.files:
                found.unlink()
        for found, content in self.files.items():
            found.write_bytes(content)

    @staticmethod
    def out(file: Path) -> Path | None:
        """The file itself if commands may write it."""
        return file if file.name.startswith("out.") else None


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
    build_model(job, build_data(job).train)


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


def fuzz_document(place: Place, file: Path, read: Callable[[], object]) -> None:
    """100 changes of a document that `read` reads."""
    document = json.loads(file.read_text())
    read()

    @FUZZ
    @given(DOCUMENT)
    def fuzz(changes: list[Change]) -> None:
        place.attempt(file, mutated(document, changes, file.name), lambda: called(read))

    fuzz()


def fuzz_bytes(place: Place, file: Path, read: Callable[[], object]) -> None:
    """100 changes of the bytes of a file that `read` reads."""
    whole = file.read_bytes()
    read()

    @FUZZ
    @given(BINARY)
    def fuzz(changes: list[Change]) -> None:
        place.attempt(file, damaged(whole, changes), lambda: called(read))

    fuzz()


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


# ---- what others have left


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_checkpoint_of_fastspeed(tmp_path: Path, zipped: bool) -> None:
    module, file = parts.Net(), tmp_path / "Net.pth"
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.zeros(2, parts.FEATURES)).sum().backward()
    optimizer.step()
    whole = {"epoch": 4, "model": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, file, _use_new_zipfile_serialization=zipped)

    def resume() -> None:
        again, state = parts.Net(), read_checkpoint(str(file))
        put_weights(again, state, str(file))
        other = torch.optim.Adam(again.parameters())
        load_optimizer(other, state, str(file))
        for parameter in again.parameters():
            parameter.grad = torch.zeros_like(parameter)
        other.step()

    fuzz_bytes(Place(tmp_path), file, resume)


@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "t5"])
def test_a_folder_of_transformers(tmp_path: Path, model: str, part: str) -> None:
    """Of one model all three parts are changed, of the others what is their own."""
    if model != "gpt2" and part != "config.json":
        pytest.skip("these parts are read alike for all models")
    folder = tmp_path / "folder"
    with warnings.catch_warnings(action="ignore"):
        transformers_model(model, ZOO[model].config).save_pretrained(folder)
    if part == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = [name for name, _ in transformers_model(model, ZOO[model].config).named_parameters()]
        (folder / part).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    text = {"name": "random_classification"}
    job = {
        "format": "hetpipe.job/1",
        "model": {"name": model, "args": {"weights": str(folder)}},
        "data": text,
        "train": {"global_batch": 1, "steps": 1},
    }

    def build() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*drawn at random")
            layers = build_layers(Job.parse(job, "job"))
            if part != "config.json":
                materialise(layers)

    fuzz = fuzz_bytes if part == "model.safetensors" else fuzz_document
    fuzz(Place(tmp_path), folder / part, build)


@pytest.mark.parametrize("part", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_of_peft(tmp_path: Path, part: str) -> None:
    layers = adapt(net(), seed=1, r=2, train_also=["head"])
    extra = {"base": base_of(layers), "adapter": adapter_keys(layers)}
    saved = checkpoint.save(tmp_path / "saved", 1, layers, torch.optim.SGD(layers.parameters()), extra, ALONE, keep=1)
    folder = tmp_path / "folder" / "adapter"
    export_weights(layers, saved, folder)
    fuzz = fuzz_bytes if part == "adapter_model.safetensors" else fuzz_document
    fuzz(Place(folder), folder / part, lambda: adapt(net(), weights=str(folder)))


@pytest.mark.parametrize("part", ["layer_times", "layer_sizes", "intra_node_bandwidths", "multizone_bandwidths_het"])
def test_profiles_of_sailor(tmp_path: Path, part: str) -> None:
    write_sailor(tmp_path)
    options = ImportOptions(model="net", nodes="2xfastx2,1xslowx4", zone="zone", memory={"fast": 10**9, "slow": 10**8})
    fuzz_document(Place(tmp_path), tmp_path / f"{part}.json", lambda: import_published("sailor", [tmp_path], options))


@pytest.mark.parametrize("part", ["profile/DeviceType.T4_tp1_bs1.json", "clusterfile.json", "hostfile"])
def test_profiles_of_metis(tmp_path: Path, part: str) -> None:
    write_metis(tmp_path)
    keys = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")
    hosts = {"h0": ("A100", 10, 300, 40), "h1": ("T4", 5, 30, 16)}
    (tmp_path / "clusterfile.json").write_text(json.dumps({h: dict(zip(keys, row, strict=True)) for h, row in hosts.items()}))
    (tmp_path / "hostfile").write_text("h0 2\nh1 slots=2\n")
    sources = [tmp_path / name for name in ("profile", "clusterfile.json", "hostfile")]
    fuzz = fuzz_document if part.endswith(".json") else fuzz_bytes
    fuzz(Place(tmp_path), tmp_path / part, lambda: import_published("metis", sources, ImportOptions(model="gpt", **METIS)))


def test_profiles_of_fasop(tmp_path: Path) -> None:
    write_fasop(tmp_path)
    links = {kind: Link(bandwidth=2e11) for kind in ("A100", "A10")}
    options = ImportOptions(model="net", nodes="1xA100x4,1xA10x2", link=Link(bandwidth=5e9), inside=links, **FASOP_SIZES)
    assert len(np.load(tmp_path / "net_A100_1.npy")) == 4
    fuzz_bytes(Place(tmp_path), tmp_path / "net_A100_1.npy", lambda: import_published("fasop", [tmp_path], options))


@pytest.mark.parametrize("part", ["model_latencies", "model_stats", "cluster_info"])
def test_profiles_of_zorse(tmp_path: Path, part: str) -> None:
    write_zorse(tmp_path)
    options = ImportOptions(model="net", **ZORSE_SIZES)
    fuzz_document(Place(tmp_path), tmp_path / f"{part}.json", lambda: import_published("zorse", [tmp_path], options))
