"""A look at a replayed model costs what its own layers cost: of the rest of the model there is one, which is lent to them, and
what it gives a layer goes along to the next."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hetpipe
from hetpipe.files.messages import InputError
from hetpipe.hf.replay.build import build
from hetpipe.hf.replay.skeleton import LeftOut, Skeleton
from hetpipe.layers.model import named_layers
from hetpipe.layers.trials.layer_check import Outcome, try_layers
from hetpipe.layers.trials.rows import cut_to_try
from hetpipe.layers.trials.still import Still
from hetpipe.layers.untouched.kept import _Walk, kept
from hetpipe.layers.weights import materialise
from tests.support.kinds import SIZES


def chain(layers: int, *, lora: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    made = build(**SIZES, num_hidden_layers=layers)
    made = hetpipe.adapt(made, r=2) if lora else made
    materialise(made)
    return made


def tried(layers: nn.Sequential) -> Outcome:
    return try_layers(named_layers(layers), cut_to_try(torch.randint(0, 32, (4, 8))))


def remembered(layer: nn.Module) -> tuple[int, int]:
    walk = _Walk()
    walk.remember(layer, 0)
    return len(walk.undo), len(walk.empty)


@pytest.mark.parametrize("lora", [False, True])
def test_what_a_look_at_a_layer_puts_back_does_not_grow_with_the_layers(lora: bool) -> None:
    few, many = chain(2, lora=lora), chain(9, lora=lora)
    assert remembered(few[1]) == remembered(many[1]) == remembered(many[8])
    assert remembered(few[0]) == remembered(many[0])


@pytest.mark.parametrize("lora", [False, True])
def test_the_rest_of_the_model_runs_as_often_whatever_the_layers(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = list[int](), Skeleton.run

    def counted(self: Skeleton, *args: Any, **kwargs: Any) -> Any:
        runs.append(self.count)
        return run(self, *args, **kwargs)

    few, many = chain(2, lora=lora), chain(9, lora=lora)
    monkeypatch.setattr(Skeleton, "run", counted)
    assert tried(few)[:2] == tried(many)[:2] == (None, None)
    assert runs.count(2) == runs.count(9) > 0


def held(skeleton: Skeleton) -> Mapping[str, Tensor]:
    return dict([*skeleton.named_parameters(), *skeleton.named_buffers()])


def test_what_is_lent_is_given_back() -> None:
    layers = chain(3)
    (skeleton,) = {layer.__dict__["skeleton"] for layer in layers}
    assert sum(isinstance(module, LeftOut) for module in skeleton.modules()) == 3
    before = held(skeleton)
    layers(torch.randint(0, 32, (2, 8))).sum().backward()
    assert {name: id(tensor) for name, tensor in held(skeleton).items()} == {name: id(t) for name, t in before.items()}
    assert all(tensor.is_meta or not tensor.numel() for tensor in before.values())
    assert not hasattr(skeleton.turn, "act")
    with pytest.raises(RuntimeError):  # labels that are no whole numbers, say: a forward that fails gives back, too
        layers[2](torch.randn(2, 8, 15))
    assert {name: id(tensor) for name, tensor in held(skeleton).items()} == {name: id(t) for name, t in before.items()}


def test_layers_that_run_in_two_threads_at_once_are_refused() -> None:
    layers = chain(2)
    skeleton = layers[0].__dict__["skeleton"]
    with skeleton.lent({}, {}), pytest.raises(RuntimeError, match="run in two threads at once, and share the rest of it"):
        layers(torch.randint(0, 32, (2, 8)))
    layers(torch.randint(0, 32, (2, 8)))


def test_a_forward_that_sets_what_layers_would_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward would set the attribute of what stands in the layer's place, and the layer would not know of it."""
    kind = transformers.Qwen3Model
    plain = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.layers[1].scale = 2.0
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(InputError, match="cannot be cut into layers: .*'scale' of a layer is set by what runs around the layers"):
        build(**SIZES, num_hidden_layers=2)


def test_a_copy_of_a_chain_computes_with_its_own_values() -> None:
    layers, tokens = chain(2), torch.randint(0, 32, (2, 8))
    other = copy.deepcopy(layers).double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        found = [net(tokens) for net in (layers, other, layers)]
    assert torch.equal(found[0], found[2])
    assert found[1].dtype == torch.float64
    assert not torch.allclose(found[0], found[1].float(), atol=1e-3)


def test_a_layer_after_the_first_sees_the_mask_of_its_own_rows() -> None:
    """What goes along is of the whole, or of a part: a mask of other rows would couple samples, or not fit."""
    torch.manual_seed(0)
    layers = build(**SIZES, num_hidden_layers=3)
    materialise(layers)
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[0, 6:], mask[3, 3:] = 0, 0
    given = torch.randint(0, 32, (4, 8)), mask
    found = try_layers(named_layers(layers), cut_to_try(given))
    assert found[:2] == (None, None)
    assert found.found is not None
    with torch.no_grad():
        assert torch.allclose(found.found.whole[0], layers(given), atol=1e-5)


class Forgetful(nn.Module):
    """Draws nothing in the first runs of a trial, and in those of two rows with gradients something, about half."""

    def __init__(self, drawn: Any) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(4, 4), drawn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + (self.drawn(y) if torch.is_grad_enabled() and len(x) == 2 else 0)


def test_draws_that_come_late_are_found_and_come_out_alike() -> None:
    layer = Forgetful(lambda y: torch.rand_like(y) - 0.5)
    layers = nn.Sequential(nn.Linear(4, 4), layer)
    assert try_layers(named_layers(layers), cut_to_try(torch.randn(4, 4)))[:2] == (None, None)
    layer.drawn = torch.rand_like
    fault = try_layers(named_layers(layers), cut_to_try(torch.randn(4, 4))).fault
    assert fault is not None
    assert "couples the samples" in fault


@pytest.mark.parametrize(("chance", "drew"), [(0.0, False), (0.5, True)])
def test_attention_draws_where_it_drops_out(chance: float, drew: bool) -> None:
    q = torch.randn(1, 2, 4, 8)
    with Still() as still:
        nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=chance)
    assert still.drew == drew
    with Still() as still:
        nn.functional.dropout(q, chance)
    assert still.drew == drew


class Filled(nn.Module):
    """Fills containers in which nothing was, of Python's own classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.names, self.parts = dict[str, int](), set[str](), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.table["a"] = 1
        self.names.add("b")
        self.parts.append(2)
        self.register_forward_hook(lambda *_: None)
        return x


def test_what_was_empty_is_empty_again() -> None:
    layer = Filled()
    table, hooks = layer.table, layer._forward_hooks
    with kept(layer):
        layer(torch.ones(1))
        assert layer.table
        assert layer._forward_hooks
    assert (layer.table, layer.names, layer.parts) == ({}, set(), [])
    assert layer.table is table
    assert layer._forward_hooks is hooks
    assert not hooks
