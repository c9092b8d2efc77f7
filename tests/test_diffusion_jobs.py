"""Jobs on cached latents: transformers of diffusers over unequal replicas train as on one device, whatever shapes their samples
have, and what they leave is loaded by diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hetpipe.building.build import build_data, build_layers, build_model
from hetpipe.checkpoints.checkpoint import complete
from hetpipe.checkpoints.stores.folder import FolderStore
from hetpipe.checkpoints.trained import load_weights
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.model import as_tuple
from tests.support.commands import finish, start
from tests.support.diffusers import made
from tests.support.jobs import Folder
from tests.support.jobs import train as train_section
from tests.support.latents import DDPM, FLOW, latents, pipeline
from tests.support.runs import alone, assert_same, reference, trained
from tests.support.writes import until

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers
LORA = {"kind": "lora", "r": 2, "alpha": 6, "targets": ["to_q", "to_v"]}
COUNTS = (6, 4, 3)  # samples of each shape


def job(
    folder: Folder,
    kind: str,
    rows: list[dict[str, Any]],
    *,
    adapter: Any = LORA,
    scheduler: Any = FLOW,
    dtype: str = "float64",
    every_steps: int = 2,
    **said: Any,
) -> Path:
    """A job on 13 samples of three shapes, as far as the type has so many, over these stages."""
    pipe = pipeline(kind, folder.path / "pipe", scheduler)
    args = {"folder": str(latents(kind, folder.path / "latents", COUNTS)), "weights": str(pipe), "test_fraction": 0.2, **said}
    return folder.ready(
        [len(row["cuts"]) for row in rows],
        rows,
        model={"name": "diffusion", "args": {"weights": str(pipe)}},
        data={"name": "latents", "args": args},
        adapter=adapter,
        loss={"name": "denoising"},
        train=train_section(global_batch=5, steps=None, epochs=2, evaluate_samples="all", dtype=dtype),
        checkpoint={"folder": str(folder.path / "saved"), "every_steps": every_steps},
    )


def three_beside_one(layers: int) -> list[dict[str, Any]]:
    """Stages of a chain of so many layers: for 5 samples, and for the fewer of a shape of which no more are left."""
    return [{"cuts": [2, 2, layers - 4], "sizes": [2, 1]}, {"cuts": [layers], "sizes": [2]}]


CASES: dict[str, tuple[int, dict[str, Any], Any]] = {
    "Flux": (6, {"drop_captions": 0.0, "weighting": "cosmap"}, FLOW),
    "QwenImage": (6, {"times": "uniform", "shift": 2.0}, None),
    "ZImage": (6, {}, FLOW),
    "PixArt": (5, {"weighting": "min_snr"}, DDPM),
    "Wan": (6, {"mean": 0.5, "deviation": 2.0}, {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}),
    "LTX": (6, {}, FLOW),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "QwenImage" else pytest.mark.thorough) for kind in CASES]
)
def test_shapes_of_several_kinds_train_over_unequal_replicas_as_on_one_device(kind: str, tmp_path: Path) -> None:
    layers, said, scheduler = CASES[kind]
    file = job(Folder(tmp_path), kind, three_beside_one(layers), scheduler=scheduler, **said)
    assert len(build_layers(Job.read(file))) == layers
    assert_same(trained(file), reference(file))


def output(model: Any, kind: str) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, model(**made(kind, 2)[1])[0])


@pytest.mark.parametrize("kind", ["Flux", pytest.param("Wan", marks=pytest.mark.thorough)])
def test_what_trained_is_loaded_by_diffusers(kind: str, tmp_path: Path) -> None:
    """Adapters, for a transformer and for peft; and all weights. A run that is cut goes on."""
    folder = Folder(tmp_path)
    file = job(folder, kind, [{"cuts": [6], "sizes": [5]}], dtype="float32")
    alone(file, "train.epochs=1")
    alone(file)
    saved = tmp_path / "saved"
    export_weights(build_layers(Job.read(file)), saved, tmp_path / "adapter")
    names = [*load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors")]
    assert all(name.startswith("transformer.") and name.endswith(("lora_A.weight", "lora_B.weight")) for name in names)
    plain, model = made(kind, 2)[0], cast(Any, made(kind, 2)[0])
    model.load_lora_adapter(load_file(tmp_path / "adapter" / "pytorch_lora_weights.safetensors"), prefix="transformer")
    with_peft = cast(Any, made(kind, 2)[0])
    with_peft.load_lora_adapter(str(tmp_path / "adapter"), weight_name="pytorch_lora_weights.safetensors", prefix="transformer")
    own = build_layers(Job.read(file))
    load_weights(own, saved)
    called = build_data(Job.read(file)).called
    assert called is not None
    inputs = {name: value for name, value in made(kind, 2)[1].items() if name != "return_dict"}
    values = [inputs[name] for name in called.values]
    with torch.no_grad():
        found = own(tuple(values))
    assert float((output(model, kind) - found).abs().max()) <= 1e-5
    assert float((output(with_peft, kind) - found).abs().max()) <= 1e-5
    assert float((output(plain, kind) - found).abs().max()) > 1e-3


def test_all_weights_go_into_a_folder_of_diffusers(tmp_path: Path) -> None:
    file = job(Folder(tmp_path), "Wan", [{"cuts": [6], "sizes": [5]}], adapter=None, dtype="float32")
    alone(file, "train.epochs=1")
    export_weights(build_layers(Job.read(file)), tmp_path / "saved", tmp_path / "out")
    before = cast(Any, made("Wan", 2)[0])
    after = type(before).from_pretrained(tmp_path / "out")
    own = build_layers(Job.read(file))
    load_weights(own, tmp_path / "saved")
    inputs = made("Wan", 2)[1]
    with torch.no_grad():
        found = own((inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"]))
    assert torch.equal(after(**inputs)[0], found)
    assert not torch.equal(before(**inputs)[0], found)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["_class_name"], config["num_layers"]) == ("WanTransformer3DModel", 4)


def test_the_sample_of_a_model_is_of_the_largest_shape(tmp_path: Path) -> None:
    read = Job.read(job(Folder(tmp_path), "QwenImage", three_beside_one(6)))
    data = build_data(read)
    model = build_model(read, data)
    assert [tuple(t.shape[1:]) for t in as_tuple(model.inputs)] == [(16, 16), (), (5, 16), (5,), (0, 1), (0, 4), (0, 4)]
    assert [tuple(as_tuple(batch.inputs)[0].shape[1:]) for batch in model.shorter] == [(12, 16), (12, 16)]
    assert sum(batch.share for batch in model.mix(2)) == pytest.approx(1)


def test_data_for_another_type_are_refused(tmp_path: Path) -> None:
    read = Job.read(job(Folder(tmp_path), "Wan", [{"cuts": [6], "sizes": [5]}]))
    other = pipeline("SD3", tmp_path / "other")
    changed = read.model_copy(update={"model": read.model.model_copy(update={"args": {"weights": str(other)}})})
    with pytest.raises(InputError, match="is a SD3Transformer2DModel, and the data are made for a WanTransformer3DModel"):
        build_layers(changed)


def test_a_model_of_named_inputs_needs_data_that_name_them(tmp_path: Path) -> None:
    model = {"name": "diffusion", "args": {"weights": str(pipeline("Wan", tmp_path / "pipe"))}}
    read = Job.read(Folder(tmp_path).job(model=model))
    with pytest.raises(InputError, match="data 'random_classification' has no names for them: use data latents"):
        build_layers(read)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CASES)
def test_a_run_that_is_killed_goes_on_over_other_devices(kind: str, tmp_path: Path) -> None:
    """By SIGKILL, somewhere behind its second step: the losses left are those of one device that was never disturbed."""
    folder, (layers, said, scheduler) = Folder(tmp_path), CASES[kind]
    file = job(folder, kind, three_beside_one(layers), scheduler=scheduler, every_steps=1, **said)
    mark = str(tmp_path)
    run = start(["-m", "hetpipe", "train", str(file)], tmp_path, mark)
    until(lambda: complete(FolderStore(tmp_path / "saved")) or run.poll() is not None)
    run.kill()
    assert finish(run, tmp_path, mark).leftover == []
    done = max(int(found.name.rpartition("-")[2]) for found in complete(FolderStore(tmp_path / "saved")))
    truth = reference(file)
    assert 0 < done < len(truth.losses)
    folder.cluster(2)
    folder.plan([{"cuts": [layers - 3, 3], "sizes": [3, 2]}], model="diffusion")
    found = trained(file)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(truth.losses[done:]), rtol=0, atol=1e-9)
