"""A transformer of diffusers without weights, on random numbers in the place of latents; and well-known ones by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hetpipe.building.build import build_data, build_layers, build_model
from hetpipe.building.data import fetch
from hetpipe.diffusion.folder import TransformerFolder
from hetpipe.diffusion.kinds import kind_of
from hetpipe.diffusion.model import build
from hetpipe.diffusion.popular import popular
from hetpipe.diffusion.random import random_latents
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.layers.weights import materialise
from tests.support.commands import ROOT, Command
from tests.support.diffusers import made
from tests.support.latents import pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers
WAN = "WanTransformer3DModel"
SHAPES: Any = [
    {"latents": [4, 1, 8, 8], "encoder_hidden_states": [8, 32]},
    {"latents": [4, 3, 4, 8], "encoder_hidden_states": [8, 32]},
]


def test_samples_are_of_the_shapes_that_are_said_and_the_same_in_every_run() -> None:
    one, two = (random_latents(WAN, SHAPES, samples=7) for _ in range(2))
    data: Any = one.train
    assert [data.groups.tolist().count(group) for group in data.groups.unique()] == [4, 3]
    assert [tuple(data[number][0][0].shape) for number in range(3)] == [(4, 1, 8, 8), (4, 3, 4, 8), (4, 1, 8, 8)]
    for number in (0, 1):
        (mixed, *_), _ = fetch(data, torch.tensor([number]), 3, 0)
        (again, *_), _ = fetch(two.train, torch.tensor([number]), 3, 0)
        assert torch.equal(mixed, again)
    assert data.digests() == two.train.digests() != random_latents(WAN, SHAPES, samples=7, seed=1).train.digests()  # type: ignore[attr-defined]


def test_a_type_that_predicts_noise_has_a_schedule() -> None:
    data: Any = random_latents(
        "PixArtTransformer2DModel", {"latents": [4, 8, 8], "encoder_hidden_states": [8, 32]}, samples=2
    ).train
    assert data.noise.signal is not None


def test_values_are_drawn_by_the_seed_each_layer_its_own() -> None:
    def values(seed: int) -> dict[str, Any]:
        job = Job.read(ROOT / "configs" / "recipes" / "wan2.2-lora-laptop.yaml", ["adapter=null", f"train.seed={seed}"])
        layers = build_layers(job, build_data(job))
        assert all(parameter.is_meta for parameter in layers.parameters())
        materialise(layers)
        return dict(layers.state_dict())

    one, again, other = values(1), values(1), values(2)
    assert one.keys() == again.keys()
    assert all(torch.equal(one[name], again[name]) for name in one)
    matrices = [name for name, value in one.items() if value.ndim == 2]
    assert matrices
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    assert all(value.isfinite().all() for value in one.values())


def test_a_pair_of_tensors_is_one_argument() -> None:
    """CogVideoX's table of positions, which is the same for all samples of a shape: the chain gives the model's own bits."""
    sides = dict.fromkeys(("sample_width", "sample_height", "sample_frames", "attention_head_dim", "text_embed_dim"), 8)
    config: dict[str, Any] = {**sides, "num_attention_heads": 2, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2}
    config |= {"num_layers": 3, "max_text_seq_length": 8, "use_rotary_positional_embeddings": True}
    shapes = {
        "latents": [2, 4, 8, 8],
        "encoder_hidden_states": [8, 8],
        "image_rotary_emb.0": [32, 8],
        "image_rotary_emb.1": [32, 8],
    }
    kind = "CogVideoXTransformer3DModel"
    splits = random_latents(kind, shapes, samples=3)
    data: Any = splits.train
    assert len(data.groups.unique()) == 1
    assert splits.called is not None
    assert splits.names == ("hidden_states", "timestep", "encoder_hidden_states", "image_rotary_emb", "image_rotary_emb")
    layers = build(splits.called, type=kind, **config)
    materialise(layers)
    model = TransformerFolder.of_type(kind, config).made()
    every: Any = layers
    model.load_state_dict({layer.library_names[own]: value for layer in every for own, value in layer.state_dict().items()})
    inputs, _ = fetch(data, torch.arange(3), 1, 0)
    mixed, time, texts, cosines, sines = inputs
    with torch.no_grad():
        wanted = model.eval()(mixed, texts, time, image_rotary_emb=(cosines[0], sines[0]), return_dict=False)[0]
        assert torch.equal(layers.eval()(inputs), wanted)
        assert not torch.equal(model(mixed, texts, time, return_dict=False)[0], wanted)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "give either weights, the folder of a transformer or of a pipeline, or type"),
        ({"type": WAN, "num_layer": 2}, "'num_layer' is no key of the configuration of a WanTransformer3DModel.*num_layers"),
        (
            {"type": "WanTransformer"},
            "type WanTransformer is a WanTransformer, and the data are made for a WanTransformer3DModel",
        ),
        ({"type": "FluxTransformer2DModel"}, "and the data are made for a WanTransformer3DModel"),
        ({"type": WAN, "num_layers": 0}, "cannot be cut into layers: it has no list of blocks"),
    ],
)
def test_what_is_no_model_is_told(args: dict[str, Any], told: str) -> None:
    job = Job.read(ROOT / "configs" / "recipes" / "wan2.2-lora-laptop.yaml")
    job = job.model_copy(update={"model": job.model.model_copy(update={"args": args})})
    with pytest.raises(InputError, match=told):
        build_layers(job, build_data(job))


@pytest.mark.parametrize(
    ("kind", "shapes", "told"),
    [
        (WAN, {"latents": [4, 0]}, r"the shape of 'latents' is \[4, 0\]; expected whole numbers"),
        ("WanTransformer", {"latents": [4]}, "it is not known how a WanTransformer is called"),
        (WAN, {"encoder_hidden_states": [8, 32]}, "has no tensor 'latents'"),
        (WAN, [], r"shapes is \[\]; expected a mapping"),
        (WAN, {"latents": [4, 1, 8, 8], "sizes": [8]}, r"sizes is \[8\]; expected whole numbers by name"),
        (WAN, {"latents": [4, 1, 8, 8], "text": [8, 32]}, "has 'text', which is no argument of the transformer"),
    ],
)
def test_what_are_no_samples_is_told(kind: str, shapes: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        random_latents(kind, shapes)


def test_samples_that_do_not_fit_the_model_are_told_by_their_shapes() -> None:
    """Those of each shape are looked at before anything is measured."""
    small = ROOT / "configs" / "recipes" / "flux.1-dev-lora-laptop.yaml"
    job = Job.read(small)
    shapes = job.data.args["shapes"]
    wrong = [shapes[0], {**shapes[0], "latents": [16, 8]}]
    args = {**job.data.args, "shapes": wrong}
    job = job.model_copy(update={"data": job.data.model_copy(update={"args": args})})
    with pytest.raises(
        InputError, match=r"the samples of the shape of sample 1 do not fit the model: layer 'embed' .*\(1, 16, 8\)"
    ):
        build_model(job, build_data(job))
    lacking = {name: shape for name, shape in shapes[0].items() if name != "pooled_projections"}
    job = job.model_copy(update={"data": job.data.model_copy(update={"args": {**args, "shapes": lacking}})})
    told = r"does not run with such inputs: .*\. It is given hidden_states \[1, 16, 16\].*, and without pooled_projections"
    with pytest.raises(InputError, match=told):
        build_model(job, build_data(job))


PARAMETERS = {  # billions, by those who published them
    "flux.1-dev": 11.9, "flux.1-schnell": 11.9, "flux.2-dev": 32.2, "sd3.5-large": 8.06, "qwen-image": 20.4, "chroma1-hd": 8.9,
    "z-image": 6.15, "wan2.2-a14b": 14.3, "hunyuanvideo": 12.8,
}  # fmt: skip


def test_well_known_transformers_have_their_sizes() -> None:
    assert popular().keys() == PARAMETERS.keys()
    for name, found in popular().items():
        model = TransformerFolder.of_type(found.type, found.config).empty()
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
        shapes = found.at(None)
        data: Any = random_latents(found.type, shapes, samples=1, guidance=found.guidance).train
        assert ("guidance" in data.called().values) == (found.guidance is not None)
        assert kind_of(found.type, None).latents_name in data.called().values
    assert popular()["flux.1-dev"].at(512)["latents"] == [1024, 64]
    assert popular()["qwen-image"].at(512)["sizes"] == {"img_shapes": [[[1, 32, 32]]]}
    with pytest.raises(InputError, match="--side 1000: pictures have sides of 16 pixels or a multiple of that"):
        popular()["flux.1-dev"].at(1000)


def test_what_if_counts_the_transformer_of_a_folder(run: Command, tmp_path: Any) -> None:
    """Of a small SD3, by its folder and by that of its pipeline; full training and adapters; the larger the picture, the more."""
    _, inputs = made("SD3", 2)
    folder = pipeline("SD3", tmp_path)
    wide, pooled = inputs["encoder_hidden_states"].shape[-1], inputs["pooled_projections"].shape[-1]
    own = popular()["sd3.5-large"].model_copy(update={"shapes": {
        "latents": [4, "patch", "patch"], "encoder_hidden_states": [8, wide], "pooled_projections": [pooled],
    }})  # fmt: skip

    def asked(*more: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hetpipe.cli.pictures.popular", lambda: {"sd3": own})
            ended = run(
                "what-if", str(folder), "--gpus", "3090,1080ti", "--global-batch", "8", "--time-limit", "0.2", *more, "--json"
            )
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    small, large = (asked("--lora", "r=4", "--base", "fp8", "--side", side) for side in ("64", "128"))
    full = asked("--side", "64")
    steps = [each["rows"][0]["step_seconds"] for each in (small, large, full)]
    assert steps[0] < steps[1]
    peaks = [max(each["rows"][0]["peak_bytes"].values()) for each in (small, large, full)]
    assert peaks[0] < peaks[1]
    assert peaks[0] < peaks[2]
    assert any("are counted" in note for note in small["notes"])
    assert small["tokens_per_sample"] is None
    assert small["rows"][0]["precision"]["3090"] == "bf16"


def test_what_if_tells_what_it_cannot_count(run: Command, tmp_path: Any) -> None:
    pipeline("PixArt", tmp_path)
    told = run("what-if", str(tmp_path), "--gpus", "3090").err
    assert "is a PixArtTransformer2DModel; what a sample is, is known of" in told
    pipeline("SD3", tmp_path / "small")
    told = run("what-if", str(tmp_path / "small"), "--gpus", "3090").err
    assert "cannot be counted, with samples as well-known models of its type have them: " in told
    assert "encoder_hidden_states [1, 333, 4096]" in told
    told = run("what-if", "flux.1-dev", "--gpus", "3090", "--base", "fp8").err
    assert "--base fp8 is for weights that are frozen beside adapters" in told
    told = run("what-if", "qwen3-8b", "--gpus", "3090", "--side", "64").err
    assert "--side 64 is for models of pictures: flux.1-dev" in told
    assert "models of pictures are flux.1-dev" in run("what-if", "flux.1", "--gpus", "3090").err
