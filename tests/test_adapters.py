"""Adapters: as peft has them, whatever a rank holds; what few bits hold; what is refused. Their folders are in
test_adapter_folders.py, and what trains over unequal stages is in test_transparency.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe import adapt
from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.quantised import LINEAR, QuantisedLinear
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.weights import empty_names, materialise, state_of
from tests.support.adapted import KINDS, logits, qwen3, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_the_meta_device_are_those_of_a_model_with_values(kind: str) -> None:
    """And change nothing before the first step."""
    plain, empty, full = qwen3(), adapt(qwen3(), seed=5, r=4, **KINDS[kind]), qwen3()
    materialise(plain)
    materialise(full)
    full = adapt(full, seed=5, r=4, **KINDS[kind])
    assert all(empty_names(layer) for layer in empty)
    trace_boundaries(empty, tokens())
    materialise(empty)
    assert torch.equal(logits(empty), logits(full))
    assert all(torch.equal(a, b) for a, b in zip(state_of(empty).values(), state_of(full).values(), strict=True))
    off = (logits(empty) - logits(plain)).abs().max()
    assert off == 0 if "base" not in KINDS[kind] else 0 < off < 0.3


def test_another_seed_or_name_gives_other_values() -> None:
    first, other = (adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), seed=s, r=2) for s in (1, 2))
    a, b = (state_of(first)[f"{i}.lora_A.default.weight"] for i in (0, 1))
    assert not torch.equal(a, b)
    assert not torch.equal(a, state_of(other)["0.lora_A.default.weight"])
    assert list(state_of(first)) == [f"{i}.lora_{which}.default.weight" for i in (0, 1) for which in "AB"]


def test_the_callers_random_numbers_are_left_as_they_were() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = torch.random.get_rng_state()
    adapt(layers, seed=1, r=2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("bits", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_bits_compute_as_the_matrix_that_they_hold(bits: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(50, 33)
    few = LINEAR[bits](linear)
    x = torch.randn(5, 50, dtype=dtype, requires_grad=True)
    few(x).sum().backward()
    matrix, given = few.matrix(dtype), x.detach().requires_grad_()
    out = given @ matrix.T + linear.bias.to(dtype)
    out.sum().backward()
    assert torch.equal(few(x), out)
    assert given.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, given.grad)
    step = {"nf4": 0.16, "fp8": 16 / 448, "int8": 0.5 / 127}[bits]  # half the widest, of the largest number in a block, or row
    assert (few.weight - linear.weight).abs().max() <= step * 1.02 * linear.weight.abs().max()


@pytest.mark.parametrize("bits", LINEAR)
def test_few_bits_stay_what_they_are_in_other_types(bits: Any) -> None:
    layers = adapt(nn.Sequential(nn.Linear(70, 40), nn.Linear(40, 2)), seed=1, base=bits)
    few = next(module for module in layers.modules() if isinstance(module, QuantisedLinear))
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in few.named_buffers()}
    layers.to(torch.bfloat16)
    assert all(tensor.dtype == before[name][0] and torch.equal(tensor, before[name][1]) for name, tensor in few.named_buffers())
    assert few.state_dict().keys() == {"bias"}
    few.eval()(torch.randn(2, 70))  # bitsandbytes' own gives no gradient after this on some processors
    x = torch.randn(2, 70, requires_grad=True)
    few.train()(x).sum().backward()
    assert x.grad is not None


def test_nf4_is_that_of_bitsandbytes() -> None:
    import bitsandbytes

    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=False)
    few: Any = bitsandbytes
    theirs = few.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4").to("cpu")
    matrix = few.functional.dequantize_4bit(theirs.data, theirs.quant_state)
    assert torch.allclose(LINEAR["nf4"](linear).weight, matrix, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"r": 0}, "r: Input should be greater than or equal to 1"),
        ({"rank": 4}, r"unknown key 'rank': it is called r: 'adapter: \{r: 16\}'"),
        ({"targets": "q_proj"}, r"Write all-linear, or a list, as in \[q_proj, v_proj\]"),
        ({"targets": ["q_prj"]}, "'q_prj' is no module of the model; did you mean 'q_proj'"),
        (
            {"targets": ["input_layernorm"]},
            "'input_layernorm' is a Qwen3RMSNorm: adapters are added to linear layers and embeddings",
        ),
        ({"targets": ["q_proj", "q_proj"]}, "targets has 'q_proj' twice"),
        ({"train_also": ["heads"]}, "train_also.0: .*'heads'"),
        ({"base": "bf16"}, r"hetpipe.adapt: base bf16: hold the model so before"),
        ({"base": "int4"}, "base: .*'int4'"),
        ({"dropout": 1.0}, "dropout: Input should be less than 1"),
    ],
)
def test_what_cannot_be_adapted_is_told(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        adapt(qwen3(), **options)


@pytest.mark.parametrize(
    ("targets", "where"),
    [
        (["q_proj"], "0 1 2"),
        (["layer1.q_proj"], "1"),
        (["layer1.self_attn.q_proj", "layer2.layer.self_attn.q_proj"], "1 2"),
        (["model.layers.2.self_attn.q_proj"], "2"),
        (["layers.0.self_attn.q_proj"], "0"),
        (["self_attn.q_proj"], "0 1 2"),
    ],
)
def test_modules_are_named_as_in_the_chain_or_as_in_transformers(targets: list[str], where: str) -> None:
    found = [name.partition(".lora_")[0] for name in state_of(adapt(qwen3(), seed=1, targets=targets))]
    assert found[::2] == found[1::2] == [f"layer{number}.layer.self_attn.q_proj" for number in where.split()]


def test_a_name_is_first_that_of_one_module() -> None:
    """And then the end of names: `0` is the chain's first layer, where it can be adapted, and `1` is in others."""
    inner = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    layers = adapt(nn.Sequential(nn.Linear(4, 4), *inner, nn.Linear(4, 4)), seed=1, r=2, targets=["0", "1"])
    assert {name.partition(".lora_")[0] for name in state_of(layers)} == {"0", "1.1", "2.1"}


def test_a_name_of_no_module_shows_how_modules_are_named() -> None:
    with pytest.raises(InputError) as caught:
        adapt(qwen3(), targets=["model.layers.9.self_attn.q_proj", "v_proj"])
    assert str(caught.value).endswith(
        "  names are as in 'layer1.layer.self_attn.o_proj', or in the library's model "
        "'model.layers.1.self_attn.o_proj', or the ends of such"
    )
    with pytest.raises(InputError, match="names are as in '0', or the ends of such"):
        adapt(nn.Sequential(nn.Linear(4, 4)), targets=["fc"])


def test_a_model_without_linear_layers_is_told() -> None:
    with pytest.raises(InputError, match="the model has no linear layer before its last layer"):
        adapt(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(InputError, match="adapter.train_also has 'embed', and the model has none"):
        adapt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), train_also=["embed"])


class Taking(nn.Module):
    """Takes the matrix, as the states of Mamba do, and does not call what has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.second.weight)


def test_adapters_that_change_nothing_are_told() -> None:
    x = torch.randn(2, 4)
    for device in ("cpu", "meta"):
        with torch.device(device):
            layers = nn.Sequential(Taking(), nn.Linear(4, 2))
        told = r"the adapter of '0\.second' \(1 such module\) changes nothing"
        with pytest.raises(InputError, match=told):
            trace_boundaries(adapt(layers, seed=1), x, torch.device("cpu"), backward=True)
    trace_boundaries(adapt(nn.Sequential(Taking(), nn.Linear(4, 2)), seed=1, targets=["first"]), x, backward=True)


class Dropping(nn.Module):
    """Calls what nothing is made of, as the last block of Qwen-Image does with the text."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.second(x)
        out: Tensor = self.first(x)
        return out


def test_adapters_that_are_called_for_nothing_stay_as_they_are() -> None:
    layers = adapt(nn.Sequential(Dropping(), nn.Linear(4, 2)), seed=1)
    x = torch.randn(2, 4)
    trace_boundaries(layers, x, backward=True)
    layers(x).sum().backward()
    trained = {name.split(".")[1] for name, p in layers.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert trained == {"first"}


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def hooked() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda _module, _given, out: 3 * out)
    return linear


def infinite() -> nn.Linear:
    linear = nn.Linear(4, 4)
    with torch.no_grad():
        linear.weight[1, 2] = torch.inf
    return linear


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: Twice(), {}, "'0.first' and '0.second' are one module, which would get two adapters"),
        (lambda: adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed=1)[0], {}, "the model has adapters already"),
        (
            lambda: nn.TransformerEncoderLayer(4, 2, 8),
            {"targets": ["linear1"]},
            "which takes its matrix for itself in evaluation",
        ),
        (hooked, {"base": "int8"}, "'0' has hooks, which would be lost with base int8"),
        (infinite, {"base": "int8"}, r"a matrix of shape \[4, 4\] holds infinite numbers"),
        (infinite, {"base": "nf4"}, r"a matrix of shape \[4, 4\] holds infinite numbers"),
        (lambda: nn.Embedding(4, 4), {"targets": ["0"], "use_dora": True}, "'0' is an embedding"),
        (
            lambda: nn.Embedding(4, 4),
            {"targets": ["0"], "train_also": ["embed"]},
            "is in adapter.targets, and trains as a whole by",
        ),
    ],
)
def test_what_would_go_wrong_in_silence_is_told(make: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        adapt(nn.Sequential(make(), nn.Linear(4, 2)), seed=1, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("base", LINEAR)
def test_a_layer_without_any_parameter_beside_few_bits(base: Any, device: str) -> None:
    with torch.device(device):
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    made = adapt(net, base=base, r=2)
    assert {name for name, p in made.named_parameters() if p.requires_grad} == {f"0.lora_{part}.default.weight" for part in "AB"}


def test_a_module_at_two_places_stays_one_beside_few_bits() -> None:
    plain = nn.Sequential(Twice(), nn.Linear(4, 4), nn.Linear(4, 2))
    x, matrix = torch.randn(2, 4), plain[0].get_parameter("first.weight")
    layers = adapt(plain, seed=1, base="int8", targets=["1"])
    assert layers[0].first is layers[0].second
    assert layers[0].get_parameter("first.weight") is matrix
    assert layers(x).shape == (2, 2)


def test_compiled_layers_keep_their_names_and_their_base_elsewhere() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            return out

    compiled: list[Any] = [torch.compile(module, backend="eager") for module in (Block(), nn.Linear(4, 4))]
    layers = adapt(nn.Sequential(compiled[0], nn.Linear(4, 2)), seed=1, r=2)
    assert list(state_of(layers)) == ["0.fc.lora_A.default.weight", "0.fc.lora_B.default.weight"]
    with pytest.raises(InputError, match=r"layer '0' is compiled, and another \(Linear\) takes the place of the Linear in it"):
        adapt(nn.Sequential(compiled[1], nn.Linear(4, 2)), seed=1, r=2)


def test_dora_of_a_layer_that_is_a_linear_layer() -> None:
    layers = adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), seed=1, r=2, use_dora=True)
    assert "0.lora_magnitude_vector.default.weight" in state_of(layers)
