"""Runs whose adapters begin in a folder: from it to their first checkpoint, from that on without it, and to another folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hetpipe import adapt
from hetpipe.building.build import build_layers
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import adapter_keys, base_of, check_begun
from hetpipe.checkpoints.origin.revision import at_revision
from hetpipe.checkpoints.stores.folder import stored_at
from hetpipe.checkpoints.training_state import said_of
from hetpipe.cli import generate
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.weights import materialise, state_of
from hetpipe.models import causal_lm
from hetpipe.processes.world import alone
from hetpipe.training.start import run_everywhere, train_rank
from tests.support.adapted import KINDS, logits, tokens, trained_a_little
from tests.support.commands import Command
from tests.support.jobs import Folder
from tests.support.peft_folders import base_of as base_in
from tests.support.peft_folders import changed, peft_folder, plain, with_peft
from tests.test_adapter_folders import ROWS, job_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_in("qwen3", tmp_path_factory.mktemp("base"))


ONE = ({"cuts": [5], "sizes": [6]},)


def test_a_run_that_began_in_a_folder_goes_on_from_its_checkpoint(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Command
) -> None:
    """With the folder gone, and for all that reads the job or the checkpoint; the folder says what was not said."""
    folder = peft_folder(base, tmp_path / "begun", r=2, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["norm"])
    file = job_of(Folder(tmp_path), base, {"weights": str(folder), "base": "int8"}, ONE)
    train_rank(Job.read(file, ["train.steps=2"]))
    assert "is not read" not in capsys.readouterr().err
    saved = tmp_path / "saved" / "step-00000002"
    said = {key: value for key, value in said_of(stored_at(saved)).items() if key.startswith("adapter.")}
    assert said == {
        "adapter.kind": "lora",
        "adapter.weights": None,
        "adapter.r": 2,
        "adapter.alpha": 6.0,
        "adapter.dropout": 0.0,
        "adapter.targets": ["q_proj"],
        "adapter.rank_stabilized": False,
        "adapter.use_dora": False,
        "adapter.train_also": ["norms"],
        "adapter.base": "int8",
    }
    shutil.rmtree(folder)
    result = train_rank(Job.read(file))
    assert result is not None
    assert len(result.losses) == 2
    assert f"note: adapter.weights ({folder}) is not read, because the run resumes from {saved}" in capsys.readouterr().err
    ended = run("export-weights", file, "-o", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 2
    ended = run("export-weights", "--checkpoint", saved, "-o", tmp_path / "none")
    assert ended.code == 2
    assert "does not say what its adapters are called outside of the model that was trained: name the job" in ended.err
    (tmp_path / "others").mkdir()
    with pytest.raises(
        InputError,
        match=f"began with the adapters in '{folder}'. To begin with the adapters in {tmp_path}/others, name "
        f"another checkpoint.folder. To resume that run, write adapter.weights: {folder}",
    ):
        train_rank(Job.read(file, [f"adapter.weights={tmp_path / 'others'}"]))
    written = build_layers(generate._job_of(said_of(stored_at(saved)), stored_at(saved)))
    assert state_of(written).keys() == state_of(build_layers(at_revision(Job.read(file), said_of(stored_at(saved))))).keys()
    with pytest.raises(InputError, match="adapter.alpha was 6.0, is 8.0"):
        train_rank(Job.read(file, ["adapter.alpha=8"]))
    with pytest.raises(InputError, match=f"adapter.weights: {folder} is no folder of peft"):
        train_rank(Job.read(file, [f"checkpoint.folder={tmp_path / 'new'}"]))


def test_a_run_of_new_adapters_does_not_go_on_as_one_from_a_folder(base: Path, tmp_path: Path) -> None:
    """It did, with a note: the adapters that were named were not read."""
    folder = peft_folder(base, tmp_path / "begun", r=2, lora_alpha=6, target_modules=["q_proj"])
    file = job_of(Folder(tmp_path), base, {"r": 2, "alpha": 6, "targets": ["q_proj"]}, ONE)
    for _ in range(2):
        train_rank(Job.read(file, ["train.steps=2"]))
    with pytest.raises(InputError, match=r"began with new adapters. To begin .* To resume that run, leave adapter.weights"):
        train_rank(Job.read(file, [f"adapter={{weights: {folder}}}"]))


def test_a_run_over_unequal_stages_is_that_of_one_device(base: Path, tmp_path: Path) -> None:
    """In float64, from a folder of DoRA with norms, over a base in 4 bits: every rank reads what is its own."""
    folder = peft_folder(base, tmp_path / "begun", target_modules="all-linear", use_dora=True, modules_to_save=["norm"])
    found = list[dict[str, Tensor]]()
    for name, rows in (("many", ROWS), ("one", ONE)):
        (tmp_path / name).mkdir()
        job = Job.read(job_of(Folder(tmp_path / name), base, {"weights": str(folder), "base": "nf4"}, rows))
        (run_everywhere(job, train_rank) if rows is ROWS else train_rank(job))
        saved = tmp_path / name / "saved" / "step-00000004"
        found.append({key: tensor for part in saved.glob("*.safetensors") for key, tensor in load_file(part).items()})
    many, one = found
    assert many.keys() == one.keys()
    assert max(float((many[key] - one[key]).abs().max()) for key in many) < 1e-10
    first = load_file(folder / "adapter_model.safetensors")["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    assert 0 < (one["model.layer1.layer.mlp.up_proj.lora_B.default.weight"] - first).abs().max() < 0.05, "four steps from there"


def exported(folder: Path, layers: nn.Sequential) -> Path:
    """What comes of a run's checkpoint."""
    extra = {"base": base_of(layers), "adapter": adapter_keys(layers)}
    saved = checkpoint.save(folder / "saved", 1, layers, torch.optim.SGD(layers.parameters()), extra, alone(), keep=1)
    return export_weights(layers, saved, folder / "out")


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "tied"])
@pytest.mark.parametrize("kind", ["DoRA", "rsLoRA of two", "with norms, embedding, head", "of embedding and head"])
def test_from_a_folder_to_a_folder_they_stay_what_they_are(name: str, kind: str, tmp_path: Path) -> None:
    """Also the one that comes of those that came of it."""
    options = (
        KINDS[kind]
        if name != "gpt2"
        else KINDS[kind]
        | (
            {
                "targets": [
                    {"q_proj": "c_attn", "v_proj": "c_proj", "embed_tokens": "wte"}.get(t, t) for t in KINDS[kind]["targets"]
                ]
            }
            if "targets" in KINDS[kind]
            else {}
        )
    )
    base = base_in(name, tmp_path / "base")

    def built(**options: Any) -> nn.Sequential:
        return adapt(causal_lm.build(weights=str(base)), **options).to(torch.float64)

    first = built(seed=1, r=2, **options)
    materialise(first)
    trained_a_little(first)
    folder = exported(tmp_path, first)
    second = built(weights=str(folder))
    materialise(second)
    assert all(torch.equal(a, state_of(first)[key]) for key, a in state_of(second).items())
    assert state_of(first).keys() == state_of(second).keys()
    again = exported(tmp_path / "again", second)
    one, other = (load_file(each / "adapter_model.safetensors") for each in (folder, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    configs = [json.loads((each / "adapter_config.json").read_text()) for each in (folder, again)]
    assert {**configs[0], "target_modules": sorted(configs[0]["target_modules"])} == {
        **configs[1],
        "target_modules": sorted(configs[1]["target_modules"]),
    }
    loaded = with_peft(plain(base), folder)
    assert (logits(second) - loaded.eval()(tokens()).logits).abs().max() < 1e-10


def test_a_note_says_when_they_were_trained_beside_another_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = peft_folder(base, tmp_path / "begun", target_modules=["q_proj"])
    job = Job.read(job_of(Folder(tmp_path), base, {"weights": str(folder)}, ONE))
    for named, noted in ((str(base), False), (f"{base}/../{base.name}", False), ("owner/model", True), (None, False)):
        changed(folder, config=lambda said, named=named: said.update(base_model_name_or_path=named))  # type: ignore[misc]
        check_begun(job, alone())
        err = capsys.readouterr().err
        assert (
            f"note: the adapters in {folder} were trained beside 'owner/model' (base_model_name_or_path), and now train beside "
            f"{str(base)!r} (model.args.weights)" in err
        ) == noted, named


def test_ranks_with_other_folders_of_this_name_are_told(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = peft_folder(base, tmp_path / "begun", target_modules=["q_proj"])
    job = Job.read(job_of(Folder(tmp_path), base, {"weights": str(folder)}, ONE))
    world = replace(alone(), ranks=(0, 1))
    monkeypatch.setattr(type(world), "gather", lambda _, mine: [mine, "another"])
    with pytest.raises(InputError, match=r"the files in .*begun differ between rank 1 \(another\) and rank 0 \(\w{16}\)"):
        check_begun(job, world)
