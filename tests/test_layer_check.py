"""Layers that couple samples, keep state or add gradients are found; others are not taken for such."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hetpipe
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, as_tuple, mse, named_layers
from hetpipe.layers.trials.layer_check import Outcome, try_layers
from hetpipe.layers.trials.rows import cut_to_try, rows_to_try
from hetpipe.layers.untouched.randomness import Generators
from hetpipe.layers.weights import materialise
from tests.support.coupled import REFUSED, ROWS, TWO_PARTS, WORDS, Counting, D, Of, between, tied
from tests.support.ordinary import LEFT_ALONE
from tests.support.ranks import make_plan


def tried(net: nn.Sequential, inputs: Tensors) -> Outcome:
    """The outcome; the net, and all generators, must be as they were."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes, generators = [m.training for m in net.modules()], Generators.now()
    found = try_layers(named_layers(net), cut_to_try(inputs))
    assert not generators.moved
    assert [m.training for m in net.modules()] == modes
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in net.parameters())
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_what_couples_samples_keeps_state_or_adds_gradients_is_named(case: str) -> None:
    torch.manual_seed(0)
    make, inputs, words = REFUSED[case]
    found = tried(make(), inputs)
    assert found.fault is not None
    assert words in found.fault
    assert found.fault.startswith("layer '")
    assert "write 'coupled_layers: per_microbatch' in the job's model section, or coupled_layers=\"per_mi" in found.fault


@pytest.mark.parametrize("entered", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_are_tried_on_what_comes_in_another_half_precision(entered: torch.dtype, given: torch.dtype) -> None:
    """Autocast joins no tensors of the other one, which was told of an innocent layer, and what coupled samples trained."""
    rows = torch.randn(4, D).to(given)
    with torch.autocast("cpu", entered):
        found = tried(nn.Sequential(nn.Linear(D, D), Of(lambda x: x - x.mean(0))), rows)
        assert tried(nn.Sequential(nn.Linear(D, D), nn.Tanh()), rows)[:2] == (None, None)
    assert found.fault is not None
    assert found.fault.startswith("layer '1' (Of) couples the samples of a batch")


def test_a_weight_that_a_layer_uses_and_does_not_register_is_refused() -> None:
    """Its gradient was that of one of two layers, without a word."""
    said = tried(tied(registers=False), ROWS).fault
    assert said is not None
    assert said.startswith("layer '2' (Decoder) uses a tensor of shape (32, 16) that requires a gradient and is no parameter of")
    weight = torch.ones(D, requires_grad=True)
    said = tried(between(Of(lambda x: x * weight)), ROWS).fault
    assert said is not None
    assert "uses a tensor of shape (16,)" in said


def test_the_message_has_its_numbers() -> None:
    fault = tried(between(Of(lambda x: x - x.mean(0))), ROWS).fault
    assert fault is not None
    assert f"layer '1' (Of) couples the samples of a batch: {TWO_PARTS} 0." in fault
    assert "A batch is cut into micro-batches and shared out, so gradients would be wrong." in fault


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_does_neither_is_left_alone(case: str) -> None:
    torch.manual_seed(0)
    make, inputs = LEFT_ALONE[case]
    found = tried(make(), inputs)
    assert (found.fault, found.untried) == (None, None)
    assert found.found is not None


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_nor_is_it_refused_in_float64(case: str) -> None:
    """Where numbers may differ by less."""
    torch.manual_seed(0)
    make, inputs = LEFT_ALONE[case]
    found = tried(make().double(), as_tuple(inputs)[0].double() if as_tuple(inputs)[0].is_floating_point() else inputs)
    assert (found.fault, found.untried) == (None, None)


class Single(nn.Module):
    """Computes in float32 what is rounded otherwise in a batch of another size."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() + 1.1 * len(x) - 1.1 * len(x)).to(x)


def test_numbers_of_float64_may_have_been_rounded() -> None:
    found = tried(between(Single()).double(), WORDS.double())
    assert (found.fault, found.untried) == (None, None)


def test_under_autocast_what_is_rounded_is_no_coupling() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = tried(between(nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)), WORDS)
    assert (found.fault, found.untried) == (None, None)


class Threshold(nn.Module):
    """Decides by a number that is rounded otherwise in a batch of another size, as the logits of a router are."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x + 1.1 * len(x) - 1.1 * len(x) > 0.5, x, -x)


def test_what_rounding_decides_is_no_coupling() -> None:
    """In float64 it decides alike."""
    near = 0.5 + torch.arange(-40, 40) * 2.0**-25
    together, apart = (Threshold()(near.repeat(n, 1)) for n in (4, 2))
    decided = near[(together[0] != apart[0]) & (near != 0.5)]
    assert len(decided), "in float32 it does not"
    values = torch.rand(4, D)
    values[1, :] = decided[0]
    found = tried(nn.Sequential(Threshold()), values)
    assert (found.fault, found.untried) == (None, None)
    words = torch.rand(4, 32, D)
    words[0, 1, :] = decided[0]
    found = tried(nn.Sequential(Threshold(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), words)
    assert (found.fault, found.untried) == (None, None), "the layers behind it are given the same, together and apart"


def test_a_layer_that_does_not_run_on_a_few_samples_is_told() -> None:
    def fours(x: Tensor) -> Tensor:
        return x.reshape(-1, 4, D).reshape(-1, D)

    found = tried(between(Of(fours)), ROWS)
    assert found.fault is None
    assert found.untried is not None
    assert found.untried.startswith("layer '1' (Of): RuntimeError: shape '[-1, 4, 16]' is invalid for input of size 32")


@pytest.mark.parametrize(("count", "rows"), [(1, 2), (2, 2), (3, 3), (9, 4)])
def test_rows_to_try_are_few_and_no_two_alike(count: int, rows: int) -> None:
    inputs = torch.randint(20, (count, 7)), torch.rand(count, 7), torch.arange(count)
    found = rows_to_try(inputs)
    assert [len(t) for t in found] == [rows] * 3
    assert len({tuple(row.tolist()) for row in found[0]}) == rows
    assert all(torch.equal(t[0], whole[0]) for t, whole in zip(found, inputs, strict=True))


@pytest.mark.parametrize("backend", get_args(Backend))
def test_every_back_end_tries_layers_in_its_first_step_and_takes_the_word(backend: Backend) -> None:
    plan = make_plan([{"cuts": [3] if backend == "torch" else [1, 1, 1], "sizes": [4, 4]}], schedule="gpipe")

    def wrapped(**more: Any) -> Any:
        torch.manual_seed(0)
        return hetpipe.wrap(between(Of(lambda x: x - x.mean(0))), plan, ROWS, mse, backend=backend, **more)

    try:
        engine = wrapped()
        with pytest.raises(InputError, match=r"^layer '1' \(Of\) couples the samples of a batch: for 4 samples"):
            engine.step(ROWS, ROWS)
        assert all(p.grad is None for p in engine.parameters())
        engine.close()
        engine = wrapped(coupled_layers="per_microbatch")
        assert engine.step(ROWS, ROWS) > 0
        engine.close()
        with pytest.raises(InputError, match="unknown coupled_layers 'per_batch'; did you mean 'per_microbatch'"):
            wrapped(coupled_layers="per_batch")
    finally:
        dist.destroy_process_group()


def test_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(InputError, match=r"^layer '1' \(Counting\) keeps state: 'steps' changes in its forward"):
            hetpipe.auto(between(Counting()), (ROWS, ROWS), mse, global_batch=8)
    finally:
        dist.destroy_process_group()
    assert list(tmp_path.iterdir()) == []


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 1, "n_head": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16},
}


class Whole(nn.Module):
    """A model of transformers as one layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=words, use_cache=False).logits
        return logits


@pytest.mark.parametrize("kind", PUBLISHED)
def test_no_model_of_transformers_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **PUBLISHED[kind])).train()
    found = tried(nn.Sequential(Whole(model)), torch.randint(3, 90, (4, 12)))
    assert (found.fault, found.untried) == (None, None)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_no_model_of_the_zoo_is_refused(name: str) -> None:
    from tests.support.zoo import ZOO, batch

    torch.manual_seed(0)
    net = ZOO[name].build(**ZOO[name].config)
    materialise(net)
    found = try_layers(named_layers(net), cut_to_try(as_tuple(batch(name, 0)[0])))
    assert (found.fault, found.untried) == (None, None)
