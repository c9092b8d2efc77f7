"""Models by their names on Hugging Face: found in the cache, of one revision from the first step to the last, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoints.origin.revision import check_same_revision, revision_of
from hetpipe.files.messages import InputError
from hetpipe.hf import hub
from hetpipe.hf.folder import WeightFolder
from hetpipe.layers.weights import materialise
from hetpipe.models import bert, causal_lm, gpt2, t5
from hetpipe.processes.world import alone
from tests.support.commands import hetpipe
from tests.support.hub import FIRST, SECOND, cache_here, put, qwen, tokenizer
from tests.support.jobs import Folder, train
from tests.support.zoo import ZOO, transformers_model

NAME = "tiny/qwen"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return cache_here(tmp_path / "cache", monkeypatch)


@pytest.fixture
def two(cache: Path, tmp_path: Path) -> Path:
    """The cache with a model of two revisions, of which `main` is the second and `old` the first."""
    put(cache, NAME, FIRST, qwen(tmp_path / "a", 1), "old")
    put(cache, NAME, SECOND, tokenizer(qwen(tmp_path / "b", 2)))
    return cache


@pytest.mark.parametrize(
    ("weights", "commit", "source"),
    [(NAME, SECOND, "b"), (f"{NAME}@old", FIRST, "a"), (f"{NAME}@{FIRST}", FIRST, "a"), ("a", None, "a")],
)
def test_a_name_is_a_folder_of_the_cache(weights: str, commit: str | None, source: str, two: Path, tmp_path: Path) -> None:
    layers = causal_lm.build(weights=weights)
    assert revision_of(layers) == commit
    materialise(layers, 0, 1)
    wanted = WeightFolder(tmp_path / source).read("model.embed_tokens.weight")
    assert torch.equal(layers[0].get_parameter("embed_tokens.weight"), wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_every_model_of_transformers_takes_one(name: str, cache: Path, tmp_path: Path) -> None:
    transformers_model(name, ZOO[name].config).save_pretrained(tmp_path / "x")
    put(cache, "tiny/model", FIRST, tmp_path / "x")
    layers = ZOO[name].build(weights="tiny/model")
    assert revision_of(layers) == FIRST
    materialise(layers)


def test_a_folder_of_that_name_wins(two: Path, tmp_path: Path) -> None:
    qwen(tmp_path / NAME, 7)
    layers = causal_lm.build(weights=NAME)
    assert revision_of(layers) is None
    (tmp_path / NAME / "config.json").unlink()
    with pytest.raises(InputError, match=f"^{NAME} is no folder of save_pretrained: it has no config.json$"):
        causal_lm.build(weights=NAME)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("tiny/none", r"tiny/none is no folder here, and it is not \(or not whole\) in hugging\S+ cache .*; HF_HUB_OFFLINE is"),
        (
            f"{NAME}@v9",
            r"tiny/qwen@v9 is no folder here, and revision 'v9' of it is not \(or not whole\) in huggingface_hub's cache",
        ),
        ("tiny/a--b", r"tiny/a--b is no folder here, and it is no name that a model on Hugging Face can have: "),
        (
            "nowhere",
            r"nowhere is no folder of save_pretrained: it has no config.json, and no name of a model on Hugging \S+ \(own",
        ),
        ("a/b/c", r"a/b/c is no folder of save_pretrained: it has no config.json, and no name"),
        ("./tiny/qwen", "tiny/qwen is no folder of save_pretrained"),
        ("tiny/qwen@", "tiny/qwen@ is no folder of save_pretrained"),
    ],
)
def test_what_is_not_in_the_cache_is_told(weights: str, message: str, two: Path) -> None:
    for build in (causal_lm.build, gpt2.build, bert.build, t5.build):
        with pytest.raises(InputError, match=f"^{message}") as caught:
            build(weights=weights)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "tiny/none on Hugging Face is gated: ask for access on its page there, and log in"),
        ("RepositoryNotFoundError", "Hugging Face has no model of this name, or a private one"),
        ("RevisionNotFoundError", "tiny/none on Hugging Face has no revision 'v2': name a branch, a tag or a commit's hash"),
        ("LocalEntryNotFoundError", "revision 'v2' of it could not be had from Hugging Face: no way"),
    ],
)
def test_what_the_hub_says_is_one_line(error: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    cache_here(tmp_path, monkeypatch, offline=False)
    kind = getattr(errors, error)
    made = kind("no\nway") if error.startswith("Local") else kind.__new__(kind)  # without the answer of a server

    def download(*_: Any, **__: Any) -> str:
        raise made

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(InputError, match=message) as caught:
        causal_lm.build(weights="tiny/none@v2")
    assert "\n" not in str(caught.value)


def test_only_what_is_read_is_downloaded_and_one_process_shows_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

    asked = list[dict[str, Any]]()

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(qwen(tmp_path / FIRST))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = WeightFolder("tiny/none")
    assert (folder.path, folder.revision) == (tmp_path / FIRST, FIRST)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    enable_progress_bars()  # another test in this process may have let them be
    hub.folder_of("tiny/none", code=True)
    assert are_progress_bars_disabled()
    enable_progress_bars()
    first, second = asked
    chosen = filter_repo_objects(
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "run.py",
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "consolidated.safetensors",
            "onnx/model.onnx",
            "generation_config.json",
        ],
        allow_patterns=first["allow_patterns"],
    )
    assert "adapter_config.json" in first["allow_patterns"], "by which a base with adapters is known"
    assert [*chosen] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "generation_config.json",
    ]
    assert {*second["allow_patterns"]} == {*first["allow_patterns"], "*.py"}


@pytest.mark.thorough
def test_a_run_keeps_its_revision(two: Path, tmp_path: Path) -> None:
    """From the checkpoint on, whatever `main` is then."""
    folder = Folder(tmp_path)
    rows = [{"cuts": [2, 3], "sizes": [2, 2]}]
    keys: dict[str, Any] = {
        "model": {"name": "causal_lm", "args": {"weights": NAME}},
        "data": {"name": "text", "args": {"context": 8, "limit_bytes": 2000}},
        "loss": {"name": "cross_entropy", "weight": "tokens"},
        "checkpoint": {"folder": str(tmp_path / "saved"), "every_steps": 1},
    }
    file = folder.ready(counts=(2,), rows=rows, train=train(steps=1, global_batch=4, dtype="float32"), **keys)
    ended = hetpipe("train", str(file), "--json", folder=tmp_path)
    assert ended.code == 0, ended.err
    state = json.loads((tmp_path / "saved" / "step-00000001" / "trainer.json").read_text())
    assert (state["job"]["model.revision"], state["job"]["model.args.weights"]) == (SECOND, NAME)
    (two / "models--tiny--qwen" / "refs" / "main").write_text(FIRST)
    more = ("train", str(file), "--json", "--set", "train.steps=2")
    ended = hetpipe(*more, folder=tmp_path)
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    assert f"model.revision was {SECOND}, is {FIRST}: write model.args.weights: {NAME}@{SECOND}" in ended.err
    ended = hetpipe("generate", str(tmp_path / "saved"), "w1 w2", "--tokens", "4", folder=tmp_path)
    assert (ended.code, len(ended.out.split())) == (0, 4), ended.err  # that revision has a tokenizer, and main none
    ended = hetpipe("export-weights", str(file), "-o", "out", folder=tmp_path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "out" / "tokenizer.json").exists(), "of the revision that was trained"
    ended = hetpipe(*more, "--set", f"model.args.weights={NAME}@{SECOND}", folder=tmp_path)
    assert ended.code == 0, ended.err
    assert f"model.args.weights was {NAME!r}, is '{NAME}@{SECOND}'" in ended.err


def test_a_repository_of_adapters_is_no_base(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": NAME}))
    put(cache, "tiny/adapter", FIRST, folder)
    with pytest.raises(InputError, match=rf"tiny/adapter holds adapters .*, and no model.*the base that they name, '{NAME}'"):
        causal_lm.build(weights="tiny/adapter")


def test_ranks_with_other_revisions_are_named(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = causal_lm.build(weights=NAME)
    check_same_revision(layers, alone())
    world = replace(alone(), ranks=(0, 1))
    monkeypatch.setattr(type(world), "gather", lambda _, mine: [mine, FIRST])
    with pytest.raises(InputError, match=f"different revisions of the model: rank 0 has {SECOND}, rank 1 has {FIRST}. Write one"):
        check_same_revision(layers, world)
