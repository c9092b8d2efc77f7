"""In which number types a job holds a model of transformers: as `from_pretrained(dtype=…)` does, buffers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.building.build import build_layers
from hetpipe.documents.job import Job
from hetpipe.documents.number_types import NumberTypes
from hetpipe.hf.chain import HFLayer
from hetpipe.layers.device import one_thread
from hetpipe.layers.numbers import StageTypes
from hetpipe.layers.recipe import layer_on, make_stage
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.weights import materialise
from tests.support.zoo import WORDS
from tests.test_causal_lm import tiny


def job_of(model: dict[str, Any], **train: Any) -> Job:
    train = {"global_batch": 2, "steps": 1, **train}
    return Job.parse({"format": "hetpipe.job/1", "model": model, "data": {"name": "text"}, "train": train}, "the test's")


def built(folder: Path, **train: Any) -> nn.Sequential:
    layers: nn.Sequential = build_layers(job_of({"name": "causal_lm", "args": {"weights": str(folder)}}, **train))
    return layers


def in_bfloat16(folder: Path, kind: str) -> Any:
    """The class of a small model, saved in bfloat16."""
    model_class, config = tiny(kind)
    torch.manual_seed(3)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
    return model_class


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "mpt", "deepseek_v3", "bloom", "modernbert-decoder"])
def test_values_are_those_of_from_pretrained(kind: str, dtype: str, tmp_path: Path) -> None:
    """Rotary frequencies in float32 (rounded to bfloat16 they turn a far token by another angle), scales of embeddings as the
    parameters, the bias of DeepSeek's router in float32."""
    model_class = in_bfloat16(tmp_path, kind)
    layers = built(tmp_path, dtype=dtype)
    materialise(layers)
    reference = model_class.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    theirs = tensors_of(reference)
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for own, value in tensors_of(layer).items():
            wanted = theirs[layer.library_names[own]]
            assert value.dtype == wanted.dtype, own
            assert torch.equal(value, wanted), own
    if kind != "deepseek_v3" or dtype == "float32":  # grouped products are for lower types with rows of whole 16 bytes only
        tokens = torch.randint(WORDS, (2, 9))
        with one_thread(torch.device("cpu")), torch.no_grad():
            assert torch.equal(layers.eval()(tokens), reference.eval()(tokens, use_cache=False).logits)


def test_what_does_not_train_is_held_in_bfloat16_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class = in_bfloat16(tmp_path, "qwen3")
    monkeypatch.setattr("tests.test_causal_lm_types.FOLDER", str(tmp_path), raising=False)
    job = job_of({"target": "tests.test_causal_lm_types:half_frozen"}, precision="bf16", frozen_dtype="bfloat16")
    layers = build_layers(job)
    materialise(layers)
    low, full = (tensors_of(model_class.from_pretrained(tmp_path, dtype=t)) for t in (torch.bfloat16, torch.float32))
    kinds = set()
    for layer in layers:
        for own, value in tensors_of(layer).items():
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad and value.ndim > 1
            kinds.add((value.dtype, frozen))
            assert torch.equal(value, (low if frozen else full)[layer.library_names[own]]), own
    assert kinds == {(torch.bfloat16, True), (torch.float32, False)}


def half_frozen() -> nn.Sequential:
    from hetpipe.models import causal_lm

    layers = causal_lm.build(weights=globals()["FOLDER"])
    layers[:3].requires_grad_(False)
    return layers


def test_a_stage_and_its_trial_leave_buffers_as_they_are() -> None:
    args = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
    layers: nn.Sequential = build_layers(job_of({"name": "llama", "args": args}, dtype="bfloat16"))
    types = NumberTypes.of("bfloat16")
    rotary = next(own for own in tensors_of(layers[1]) if own.endswith(".inv_freq"))
    exact = 10000 ** (-torch.arange(0, 8, 2).float() / 8)
    tokens = torch.randint(WORDS, (2, 7))
    with layer_on(layers, layers[1], torch.device("cpu"), types) as layer:
        assert torch.equal(tensors_of(layer)[rotary], exact)
    whole = StageTypes(0, 4, types)
    assert trace_boundaries(layers, tokens, stages=[whole])[-1][0].dtype == torch.bfloat16
    stage = make_stage(layers, 0, 4, types=whole)
    assert torch.equal(tensors_of(layers[1])[rotary], exact)
    assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    assert tensors_of(layers.to(torch.float32).to(torch.bfloat16)[1])[rotary].dtype == torch.float32
