"""Trained weights out of a checkpoint, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hetpipe
from hetpipe.checkpoints.checkpoint import save
from hetpipe.files.messages import InputError
from hetpipe.processes.world import alone
from tests.support.commands import Command
from tests.support.jobs import Folder
from tests.support.user_parts import tied
from tests.test_digests import one_bit


def trained(folder: Path, step: int = 2) -> nn.Sequential:
    """A model two layers of which are tied, saved as a loop of one's own saves it."""
    torch.manual_seed(step)
    model = tied()
    save(folder, step, model, torch.optim.SGD(model.parameters(), lr=0.1), {"steps": step}, alone(), keep=2)
    return model


def same(state: dict[str, torch.Tensor], model: nn.Module) -> bool:
    truth = model.state_dict()
    return state.keys() == truth.keys() and all(torch.equal(value, truth[name]) for name, value in state.items())


def test_weights_go_into_a_plain_model(tmp_path: Path) -> None:
    first, second, model = trained(tmp_path, 2), trained(tmp_path, 3), tied()
    assert hetpipe.load_weights(model, tmp_path) == 3
    assert same(model.state_dict(), second)
    assert model[0].get_parameter("weight") is model[4].get_parameter("weight")
    assert hetpipe.load_weights(model, tmp_path / "step-00000002") == 2
    assert same(model.state_dict(), first)


def test_what_does_not_fit_a_model_is_named_and_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path)
    for model, message in (
        (nn.Sequential(*tied(), nn.Linear(2, 2)), "it has no '6.weight', which the model has"),
        (tied()[:2], "which the model has not"),
        (tied().double(), "is float32, in the model float64"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(InputError) as caught:
            hetpipe.load_weights(model, tmp_path)
        assert (
            f"checkpoint {tmp_path}/step-00000002 holds another model or optimizer; build the model as it was built for training"
            in str(caught.value)
        )
        assert message in str(caught.value)
        assert same(before, model)
    with torch.device("meta"):
        empty = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(InputError, match=r"^'0.weight' of the model is on the meta device, so it has no memory to load into"):
        hetpipe.load_weights(empty, tmp_path)
    with pytest.raises(
        InputError, match=r"nowhere is no checkpoint and holds no checkpoints \(folders step-… with a trainer\.json\)$"
    ):
        hetpipe.load_weights(tied(), tmp_path / "nowhere")
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    one_bit(file)
    with pytest.raises(InputError, match=f"{file.name} has other content"):
        hetpipe.load_weights(tied(), tmp_path)


def test_weights_of_ones_own_model_are_exported_with_a_job_and_without(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, job = trained(tmp_path / "saved"), Folder(tmp_path)
    file = job.job(model={"target": "tests.support.user_parts:tied"}, checkpoint={"folder": str(tmp_path / "saved")})
    ended = run("export-weights", file, "-o", tmp_path / "a", "--set", "train.dtype=float32")
    assert ended == (0, f"weights of {tmp_path}/saved/step-00000002 written to {tmp_path}/a\n", "")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model.safetensors"]
    again = tied()
    again.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    assert same(again.state_dict(), model)

    monkeypatch.setattr("hetpipe.hf.exports.export.SHARD_BYTES", 512)
    ended = run("export-weights", "--checkpoint", tmp_path / "saved", "-o", tmp_path / "b", "--json")
    assert json.loads(ended.out) == {"checkpoint": f"{tmp_path}/saved/step-00000002", "folder": f"{tmp_path}/b"}
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    found = {name: value for part in sorted((tmp_path / "b").glob("*.safetensors")) for name, value in load_file(part).items()}
    assert same(found, model)
    assert index["weight_map"].keys() == found.keys()
    assert len({*index["weight_map"].values()}) > 1

    ended = run("export-weights", file, "-o", tmp_path / "c")  # the job's own type
    assert ended.code == 2
    assert "is not of the job's model:\n" in ended.err
    assert "is float32, in the model float64 (train.dtype)" in ended.err
    (part,) = (tmp_path / "saved" / "step-00000002").glob("*.safetensors")
    one_bit(part)
    assert f"{part.name} has other content" in run("export-weights", "--checkpoint", tmp_path / "saved", "-o", tmp_path / "c").err
    assert not (tmp_path / "c").exists()
