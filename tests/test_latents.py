"""Cached latents as data: what is mixed and told, by the formulas; the same draws in every run; and folders that are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetpipe.building.content import Content, content_of
from hetpipe.building.data import EpochSampler, fetch
from hetpipe.building.datasets import DataSplits
from hetpipe.diffusion.kinds import _table
from hetpipe.diffusion.latents import Latents, latents
from hetpipe.files.messages import InputError
from hetpipe.layers.model import denoising
from hetpipe.layers.untouched.randomness import drawing
from tests.support.latents import DDPM, FLOW, pipeline
from tests.support.latents import latents as folder_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pipelines and folders of latents by their kind and scheduler, each made once."""
    found = dict[tuple[str, str], tuple[str, str]]()

    def of(kind: str, scheduler: Any = FLOW) -> tuple[str, str]:
        key = kind, json.dumps(scheduler)
        if key not in found:
            root = tmp_path_factory.mktemp(kind)
            found[key] = str(folder_of(kind, root / "latents", (6, 4, 3))), str(pipeline(kind, root / "pipe", scheduler))
        return found[key]

    return of


def train_of(splits: DataSplits) -> Latents:
    return cast(Latents, splits.train)


def stored(folder: str, number: int) -> Tensor:
    return load_file(sorted(Path(folder).glob("*.safetensors"))[number])["latents"]


@pytest.mark.parametrize("number", range(3))
def test_flow_matching_mixes_by_sigma_and_predicts_the_way_to_the_noise(made: Any, number: int) -> None:
    """(1 - σ) x + σ n, told σ; n - x: what is mixed less σ times what is predicted are the latents."""
    folder, weights = made("Flux")
    data = train_of(latents(folder, weights, shift=1.0))
    with drawing(3, number):
        (mixed, sigma, guidance, *_), (wanted, weight) = data[number]
    assert (float(guidance), float(weight), 0 < float(sigma) < 1) == (1.0, 1.0, True)
    assert torch.allclose(mixed - sigma * wanted, stored(folder, number), atol=1e-5)
    with drawing(3, number):
        (again, *_), _ = data[number]
    with drawing(4, number):
        (other, *_), _ = data[number]
    assert torch.equal(mixed, again)
    assert not torch.equal(mixed, other)


def test_other_kinds_are_told_otherwise(made: Any) -> None:
    """Times up to 1000, or from noise to data; and what is predicted may be negated."""
    times: dict[str, Callable[[float], float]] = {"Wan": lambda sigma: 1000 * sigma, "ZImage": lambda sigma: 1 - sigma}
    for kind, told in times.items():
        folder, weights = made(kind)
        sign = -1 if kind == "ZImage" else 1
        with drawing(1):
            (mixed, time, *_), (wanted, _) = train_of(latents(folder, weights))[0]
        clean = stored(folder, 0)
        sigma = float(((mixed - clean) / (sign * wanted)).median())
        assert torch.allclose(mixed - sigma * sign * wanted, clean, atol=1e-4)
        assert float(time) == pytest.approx(told(sigma), rel=1e-3)


def sigmas(made: Any, **said: Any) -> Tensor:
    folder, weights = made("Wan", None)
    data = train_of(latents(folder, weights, **said))
    with drawing(0):
        return torch.stack([data[0][0][1] for _ in range(2000)]) / 1000


def test_times_are_drawn_as_it_is_said(made: Any) -> None:
    uniform, normal = sigmas(made, times="uniform"), sigmas(made, mean=0.5, deviation=0.3)
    shifted = sigmas(made, times="uniform", shift=3.0)
    for times in ("uniform", "logit_normal"):
        whole, part = sigmas(made, times=times, shift=3.0), sigmas(made, times=times, shift=3.0, sigmas=[0.875, 1.0])
        inside = whole[whole >= 0.875]
        assert (float(part.min()) >= 0.8749, float(part.max()) <= 1.0) == (True, True)
        assert float(part.median()) == pytest.approx(float(inside.median()), abs=0.01)
    assert [float(uniform.quantile(q)) for q in (0.1, 0.5, 0.9)] == pytest.approx([0.1, 0.5, 0.9], abs=0.04)
    assert float(normal.logit().mean()) == pytest.approx(0.5, abs=0.03)
    assert float(normal.logit().std()) == pytest.approx(0.3, abs=0.02)
    assert float(shifted.median()) == pytest.approx(3 * 0.5 / (1 + 2 * 0.5), abs=0.04)


def test_the_scheduler_says_the_shift_unless_it_is_said(made: Any) -> None:
    def shift(scheduler: Any, **said: Any) -> float:
        folder, weights = made("Wan", scheduler)
        return train_of(latents(folder, weights, **said)).noise.shift

    unipc = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 5.0}
    assert [shift(FLOW), shift(FLOW, shift=2.0), shift(None), shift(unipc)] == [3.0, 2.0, 1.0, 5.0]
    assert shift({**FLOW, "use_dynamic_shifting": True}) == 1.0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_schedules_of_ddpm_mix_and_predict_as_diffusers_does(made: Any, prediction: str) -> None:
    folder, weights = made("PixArt", {**DDPM, "prediction_type": prediction})
    scheduler = diffusers.DDPMScheduler.from_config({**DDPM, "prediction_type": prediction})
    data, clean = train_of(latents(folder, weights, weighting="min_snr")), stored(folder, 0)
    with drawing(2):
        (mixed, step, *_), (wanted, weight) = data[0]
    share = scheduler.alphas_cumprod[step]
    noise = (mixed - share.sqrt() * clean) / (1 - share).sqrt()
    assert torch.allclose(scheduler.add_noise(clean[None], noise[None], step[None])[0], mixed, atol=1e-5)
    target = noise if prediction == "epsilon" else scheduler.get_velocity(clean[None], noise[None], step[None])[0]
    assert torch.allclose(wanted, target, atol=1e-4)
    ratio = float(share / (1 - share))
    assert float(weight) == pytest.approx(min(ratio, 5.0) / (ratio if prediction == "epsilon" else ratio + 1), rel=1e-4)


def test_samples_are_weighed_by_their_noise(made: Any) -> None:
    folder, weights = made("Flux")
    known: dict[str, Callable[[float], float]] = {
        "sigma_sqrt": lambda s: 1 / (s * s),
        "cosmap": lambda s: 2 / (math.pi * (1 - 2 * s + 2 * s * s)),
    }
    for weighting, by in known.items():
        with drawing(5):
            (_, sigma, *_), (_, weight) = train_of(latents(folder, weights, weighting=weighting))[0]
        assert float(weight) == pytest.approx(by(float(sigma)), rel=1e-5)
    output, wanted = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    expected = torch.stack([(output - wanted)[i].square().mean() * w for i, w in enumerate((1.0, 2.0, 0.5))]).mean()
    assert torch.allclose(denoising(output, (wanted, torch.tensor([1.0, 2.0, 0.5]))), expected)
    both = torch.cat([output, torch.randn(3, 2, 4)], 1)[..., None]  # [b, channels, height, width], with variances
    truth = denoising(output, (wanted, torch.ones(3)))
    assert torch.equal(denoising(both, (wanted[..., None], torch.ones(3))), truth)
    with pytest.raises(InputError, match=r"predicts \(3, 2, 4\), and is to predict \(3, 2, 5\)"):
        denoising(output, (torch.ones(3, 2, 5), torch.ones(3)))
    packed = torch.cat([output, output], 1)  # of tokens, which are no channels
    with pytest.raises(InputError, match=r"predicts \(3, 4, 4\), and is to predict \(3, 2, 4\)"):
        denoising(packed, (wanted, torch.ones(3)))
    with pytest.raises(InputError, match=r"3 samples have weights of shape \(3, 1\), and need one each"):
        denoising(output, (wanted, torch.ones(3, 1)))
    with pytest.raises(InputError, match="found 1 tensors"):
        denoising(output, wanted)


def test_batches_hold_one_shape_and_one_table_of_positions(made: Any) -> None:
    """Two shapes of Flux differ in their ids only; those of QwenImage in whole numbers."""
    for kind, at in (("Flux", 4), ("QwenImage", 5)):
        folder, weights = made(kind)
        data = train_of(latents(folder, weights))
        assert len(data.sizes) == 3
        for numbers in EpochSampler.of(data, 4):
            inputs, _ = fetch(data, numbers, 0, 0)
            assert all(torch.equal(row, inputs[at][0]) for row in inputs[at])


def test_captions_are_dropped_as_often_as_it_is_said(made: Any, tmp_path: Path) -> None:
    folder, weights = made("Wan")
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    empty = torch.full((5, 16), 7.0)
    save_file({"encoder_hidden_states": empty}, tmp_path / "empty.safetensors")
    splits = latents(str(tmp_path), weights, drop_captions=0.3, test_fraction=0.2)
    data = train_of(splits)
    with drawing(0):
        dropped = [torch.equal(data[number % 3][0][2], empty) for number in range(600)]
    assert sum(dropped) / 600 == pytest.approx(0.3, abs=0.06)
    test = cast(Latents, splits.test)
    assert not any(torch.equal(test[number][0][2], empty) for number in range(len(test)))


def test_a_file_that_is_another_makes_the_data_others(made: Any, tmp_path: Path) -> None:
    """Numbers, or whole numbers of metadata; other names in another order are the same samples."""
    folder, weights = made("QwenImage")
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def content() -> Content:
        return content_of(latents(str(tmp_path), weights).train, {})

    before, first = content(), tmp_path / "000.safetensors"
    assert content().other(before) == ""
    first.rename(tmp_path / "999.safetensors")
    assert content().other(before) == "the samples are in another order"
    (tmp_path / "999.safetensors").rename(first)
    held = load_file(first)
    save_file({**held, "latents": held["latents"] + 1}, first, {"img_shapes": "[[[1, 4, 4]]]"})
    assert content().other(before) == "samples are others"
    save_file(held, first, {"img_shapes": "[[[1, 2, 8]]]"})
    assert content().other(before) == "samples are others"
    save_file(held, first, {"img_shapes": "[[[1, 4, 4]]]"})
    assert content().other(before) == ""


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Wan", {"times": "uniforn"}, {}, "unknown times 'uniforn'; did you mean 'uniform'"),
    ("Wan", {"weighting": "min_snr"}, {}, "weighting 'min_snr' is not for a model that predicts flow: take none, sigma_sqrt or"),
    ("Wan", {"sigmas": [0.9, 0.1]}, {}, "and must be two numbers from 0 to 1, the smaller first"),
    ("Wan", {"shift": 0.0}, {}, "shift 0.0, and both must be above 0"),
    ("Wan", {"drop_captions": 1.0}, {}, "drop_captions is 1.0, and must be from 0 to below 1"),
    ("Wan", {"drop_captions": 0.1}, {}, "has no empty.safetensors with the embeddings of no text"),
    ("Wan", {"guidance": 3.5}, {}, "guidance is 3.5, and this WanTransformer3DModel is not told of it"),
    ("Wan", {"kind": {"tim": 1}}, {}, "'tim'"),
    ("Wan", {}, {"noise": torch.ones(2)}, "has 'noise', which is no argument of the transformer"),
    ("Wan", {}, {"encoder_hidden_state": torch.ones(2)}, "did you mean 'encoder_hidden_states'"),
    ("Wan", {"part": "transformer_2"}, {}, "holds no config.json, and no transformer_2/config.json"),
]


@pytest.mark.parametrize(("kind", "said", "others", "message"), CASES)
def test_what_is_wrong_is_told(
    made: Any, tmp_path: Path, kind: str, said: dict[str, Any], others: dict[str, Tensor], message: str
) -> None:
    folder, weights = made(kind)
    for file in Path(folder).iterdir():
        save_file({**load_file(file), **others}, tmp_path / file.name)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        latents(str(tmp_path), weights, **said)


def test_folders_whose_files_differ_are_refused(made: Any, tmp_path: Path) -> None:
    folder, weights = made("Wan")
    first, second = (load_file(file) for file in sorted(Path(folder).iterdir())[:2])

    def refused(message: str, other: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        save_file(first, tmp_path / "a.safetensors")
        save_file(other, tmp_path / "b.safetensors", metadata)
        with pytest.raises(InputError, match=message):
            latents(str(tmp_path), weights)

    refused("a.safetensors has 'encoder_hidden_states', and .*b.safetensors has not", {"latents": second["latents"]})
    refused(
        r"encoder_hidden_states is F32 of shape \[5, 16\] in .*, and BF16 of shape \[5, 16\] in",
        {**second, "encoder_hidden_states": second["encoder_hidden_states"].bfloat16()},
    )
    refused("its metadata 'height' is .*, expected whole numbers as JSON", second, {"height": "tall"})
    refused("its metadata 'height' is 1.5, expected whole numbers as JSON", second, {"height": "1.5"})
    refused("b.safetensors has 'num_frames', and .*a.safetensors has not", second, {"num_frames": "3"})
    (tmp_path / "b.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="cannot read .*b.safetensors"):
        latents(str(tmp_path), weights)
    with pytest.raises(InputError, match="there is no folder '.*gone' with latents"):
        latents(str(tmp_path / "gone"), weights)
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no .safetensors files: write one for each sample"):
        latents(str(tmp_path / "none"), weights)


def test_a_type_of_which_nothing_is_known_is_asked_for(made: Any, tmp_path: Path) -> None:
    folder, weights = made("Wan")
    config = json.loads(Path(weights, "transformer", "config.json").read_text())

    def of(name: str | None, **said: Any) -> DataSplits:
        (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": name}))
        return latents(folder, str(tmp_path), **said)

    with pytest.raises(InputError, match="it is not known how a WanVACETransformer3DModel is called. Write it as the data's"):
        of("WanVACETransformer3DModel")
    assert train_of(of("WanVACETransformer3DModel", kind={"time": 1})).noise.scale == 1.0
    with pytest.raises(InputError, match="is of a WanTransformer4DModel, which diffusers .* has not"):
        of("WanTransformer4DModel", kind={})
    with pytest.raises(InputError, match="has no _class_name"):
        of(None)
    with pytest.raises(InputError, match="is trained by a schedule of noise, and beside .* is no scheduler"):
        of("WanTransformer3DModel", kind={"prediction": "epsilon"})


def test_the_table_of_kinds_names_types_and_arguments_of_diffusers() -> None:
    for name, keys in _table().items():
        forward = getattr(diffusers, name).forward
        arguments = {*forward.__code__.co_varnames, *getattr(forward, "__wrapped__", forward).__code__.co_varnames}
        named = [keys.get("latents_name", "hidden_states"), keys.get("time_name", "timestep")]
        assert {*named, *keys.get("alone", ()), *keys.get("listed", ())} <= arguments, name
