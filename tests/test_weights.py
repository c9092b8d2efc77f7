"""Layers on the meta device and their values: own layers only, shared parameters, back to empty, messages."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hetpipe.checkpoints import checkpoint
from hetpipe.files.messages import InputError
from hetpipe.layers.recipe import layer_on
from hetpipe.layers.split import tied_layers
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.weights import empty_names, load_state, materialise, state_of
from tests.support.jobs import STATE
from tests.test_checkpoint import ALONE


class Constant(nn.Module):
    """A layer whose values are one number; it notes for what it was asked."""

    def __init__(self, inner: nn.Module, number: float) -> None:
        super().__init__()
        self.inner, self.number, self.asked = inner, number, list[list[str]]()

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    def values(self, names: Collection[str]) -> dict[str, Tensor]:
        self.asked.append(sorted(names))
        return {n: torch.full(t.shape, self.number) for n, t in tensors_of(self).items() if n in names}


def tied_and_empty() -> nn.Sequential:
    """Layers 0 and 2 share a weight; layer 1 has buffers; layer 3 keeps its weights in a list besides."""
    with torch.device("meta"):
        parts = [nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False), nn.LSTM(5, 3)]
    parts[2].weight = parts[0].weight
    parts[1].bias.requires_grad_(False)
    return nn.Sequential(*[Constant(part, float(number)) for number, part in enumerate(parts)])


def test_own_layers_only_and_a_shared_parameter_everywhere() -> None:
    layers = tied_and_empty().to(torch.float64)
    ties = tied_layers(layers)
    materialise(layers, 1, 3)
    assert [empty_names(layer) == [] for layer in layers] == [True, True, True, False]
    assert layers.get_parameter("0.inner.weight") is layers.get_parameter("2.inner.weight")
    assert tied_layers(layers) == ties == {"0.inner.weight": (0, 2)}
    assert layers.get_parameter("2.inner.weight").unique().tolist() == [2.0]
    assert layers[0].asked == []
    norm = layers.get_submodule("1.inner")
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.weight.dtype == norm.get_buffer("running_mean").dtype == torch.float64
    assert norm.get_buffer("num_batches_tracked").dtype == torch.int64
    assert (norm.weight.requires_grad, norm.bias.requires_grad) == (True, False)
    assert list(norm.state_dict()) == list(nn.BatchNorm1d(4).state_dict())
    materialise(layers)
    assert layers[0].asked == []  # its weight has a value
    assert layers[3](torch.zeros(1, 2, 5, dtype=torch.float64)).shape == (1, 2, 3)
    last = layers[3]
    assert isinstance(last, Constant)
    assert len(last.asked[0]) == 4
    materialise(layers)
    assert len(last.asked) == 1


def test_placed_for_a_while() -> None:
    layers = tied_and_empty()
    before = {name: id(tensor) for name, tensor in tensors_of(layers).items()}
    for layer in layers:
        with layer_on(layers, layer, torch.device("cpu")):
            assert empty_names(layer) == []
        assert {name: id(tensor) for name, tensor in tensors_of(layers).items()} == before
    materialise(layers, 0, 1)
    kept = layers.get_parameter("0.inner.weight")
    with layer_on(layers, layers[2], torch.device("cpu")):
        assert layers.get_parameter("2.inner.weight") is kept
    assert layers.get_parameter("2.inner.weight") is kept
    assert not kept.is_meta


def test_boundaries_are_the_same_however_much_is_empty() -> None:
    tokens, layers = torch.tensor([1, 2, 3]), tied_and_empty()
    found = [trace_boundaries(layers, tokens)]
    for count in (1, 3, 4):
        materialise(layers, 0, count)
        found.append(trace_boundaries(layers, tokens))
    assert found == [found[-1]] * 4
    assert found[0][-1][0].shape == (3, 3)
    assert [row[0].requires_grad for row in found[0]] == [False, True, True, True, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's, as it compiles
def test_compiled_layers_keep_their_names(tmp_path: Path) -> None:
    """A checkpoint of a compiled model is one of the plain model, and the reverse; empty layers get their values."""

    def net(how: str) -> nn.Sequential:
        torch.manual_seed(len(how))
        with torch.device("meta"):
            late = Constant(nn.Linear(2, 2), 3.0)
        layers: list[Any] = [nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.Tanh()), late]
        if how == "compiled":
            layers[0], layers[2] = (torch.compile(layers[at], backend="eager") for at in (0, 2))
            layers[1][0] = torch.compile(layers[1][0], backend="eager")
        found = nn.Sequential(*layers)
        materialise(found)
        return found

    for number, (saving, loading) in enumerate([("compiled", "plain"), ("plain", "compiled")]):
        saver, loader = net(saving), net(loading)
        optimizers = [torch.optim.AdamW(layers.parameters()) for layers in (saver, loader)]
        saver(torch.ones(5, 3)).sum().backward()
        optimizers[0].step()
        saved = checkpoint.save(tmp_path / str(number), 1, saver, optimizers[0], STATE, ALONE, keep=1)
        with safe_open(next(saved.glob("*.safetensors")), framework="pt") as file:
            assert {"model.0.weight", "model.1.0.bias", "optimizer.2.inner.weight.exp_avg"} <= set(file.keys())
            assert not [key for key in file.keys() if "_orig_mod" in key]  # noqa: SIM118
        checkpoint.load(saved, loader, optimizers[1], ALONE, whole=loader)
        assert list(state_of(loader)) == list(state_of(saver)) == list(net("plain").state_dict())
        for name, value in state_of(saver).items():
            assert torch.equal(value, state_of(loader)[name])
        assert len(optimizers[1].state) == len(optimizers[0].state) == 6
        load_state(saver, loader.state_dict())
        load_state(loader, {name: torch.zeros_like(t) for name, t in saver.state_dict().items()})
        assert not any(value.any() for value in state_of(loader).values())


def test_messages() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"layer '0' \(Linear\) is on the meta device \('weight' has no values\), and has no m"):
        materialise(layers)

    class Wrong(Constant):
        def values(self, names: Collection[str]) -> dict[str, Tensor]:
            return {name: torch.zeros(3) for name in names}

    with pytest.raises(InputError, match=r"layer '0': the values of 'inner.weight' have shape \(3,\), the model has \(2, 2\)"):
        materialise(nn.Sequential(Wrong(layers[0], 0.0)))
