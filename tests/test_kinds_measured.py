"""What is measured of a few layers of a kind, seconds and bytes, holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetpipe
from hetpipe.documents.number_types import AS_BUILT, NumberTypes
from hetpipe.files.messages import InputError
from hetpipe.hf.replay.build import build
from hetpipe.layers.model import Loss, Model, as_tuple, mse
from hetpipe.layers.trials.layer_check import Outcome, few_of_each_kind, try_layers
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.kinds import Kinds
from hetpipe.layers.weights import materialise
from hetpipe.measuring.precision.layer_bytes import saved_bytes
from hetpipe.measuring.profiler import measure_device
from hetpipe.runtime.stages import engine as stage_engine
from tests.support.kinds import CPU, SIZES, Centred, Named, Scaled, checkpointed, linear, model, sliced, turned
from tests.support.ranks import make_plan


def test_three_layers_of_a_kind_are_measured_and_count_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made, told = model(linear(), *(Scaled(0.5) for _ in range(9)), linear()), list[str]()
    found = measure_device(made, "x", CPU, (1, 2), torch.optim.SGD, repeats=1, advance=told.append)
    names = [text.split("(")[1].split(")")[0] for text in told if text.endswith("optimizer")]
    assert names == ["0", "1", "5", "9", "10"]
    for row in (*found.measurement.forward_seconds, *found.measurement.backward_seconds, found.measurement.optimizer_seconds):
        assert len(row) == 11
        assert len(set(row[1:10])) == 1
        assert len(set(row)) == 3


def test_a_kind_has_the_median_of_its_layers() -> None:
    kinds = Kinds((0, 1, 1, 1, 1, 1, 6), frozenset({1, 2, 3, 4, 5}))
    assert kinds.measured == (0, 1, 3, 5, 6)
    assert kinds.spread({0: 9.0, 1: 4.0, 3: 1.0, 5: 2.0, 6: 7.0}) == [9.0, *[2.0] * 5, 7.0]


def test_all_layers_that_give_something_else_than_they_are_given_are_measured() -> None:
    layers = [nn.Linear(8, 4), nn.Linear(4, 8)] * 4
    kinds = trace(nn.Sequential(*layers, linear()), torch.randn(4, 8)).kinds
    assert kinds.measured == tuple(range(9))


NETS: dict[str, Callable[[], list[nn.Module]]] = {
    "residual": lambda: [linear(), *(Scaled(0.5) for _ in range(5)), linear()],
    "relu": lambda: [m for _ in range(4) for m in (linear(), nn.ReLU())],
    "mixed": lambda: [linear(), nn.ReLU(), linear(), nn.Tanh(), linear(), linear(), nn.ReLU(), nn.Dropout(0.5), linear()],
    "in place": lambda: [linear(), *(m for _ in range(3) for m in (linear(), nn.ReLU(inplace=True), nn.LayerNorm(8)))],
    "stale": lambda: [linear(), linear(), nn.GELU(), linear(), nn.Identity(), linear(), linear()],
    "identities": lambda: [nn.Identity(), nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 4), nn.Identity(), nn.Linear(4, 4)],
    "identity first": lambda: [nn.Identity(), nn.Dropout(0.1), nn.Sigmoid(), nn.Identity(), linear(), nn.ReLU(), linear()],
    "checkpointed": lambda: [linear(), *(Named(checkpointed, on=k == 1) for k in range(5)), linear()],
    "turned": lambda: [linear(), *(m for _ in range(3) for m in (Named(turned, on=True), nn.Tanh(), Named(turned, on=False)))],
    "slices": lambda: [nn.Linear(8, 32), *(m for _ in range(3) for m in (Named(sliced, on=True), nn.Linear(16, 32))), linear(32)],
    "views": lambda: [m for _ in range(3) for m in (linear(), nn.Sigmoid(), nn.Unflatten(1, (2, 4)), nn.Flatten(), linear())],
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("types", [AS_BUILT, NumberTypes.at("bf16")])
def test_bytes_are_those_of_all_layers_one_by_one(net: str, types: NumberTypes) -> None:
    made = model(*NETS[net]())
    alone = replace(made, kinds=Kinds(tuple(range(len(made.layers))), frozenset()))
    found = saved_bytes(made, CPU, types)
    assert sum(found.per_sample) > 0
    assert found == saved_bytes(alone, CPU, types)


@pytest.mark.parametrize("lora", [False, True])
def test_bytes_of_a_decoder_are_those_of_all_layers(lora: bool) -> None:
    torch.manual_seed(0)
    layers = build(**SIZES, num_hidden_layers=6)
    layers = hetpipe.adapt(layers, r=2) if lora else layers
    materialise(layers)
    tokens = torch.randint(0, 32, (2, 8))
    with torch.no_grad():
        wanted = as_tuple(layers(tokens))[0].argmax(-1)
    loss = Loss(function=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()))
    made = Model(name="test", layers=layers, inputs=tokens, targets=wanted, loss=loss)
    alone = replace(made, kinds=Kinds(tuple(range(8)), frozenset()))
    found = saved_bytes(made, CPU)
    assert min(found.per_sample[1:]) > 0
    assert found == saved_bytes(alone, CPU)


def test_a_layer_that_was_not_measured_is_tried_in_the_first_step() -> None:
    """Others of its kind are measured, and do not show what it does."""
    torch.manual_seed(0)
    rows = torch.randn(8, 8, dtype=torch.float64)
    layers = [linear(), *(Centred(1e-12) for _ in range(6)), linear()]
    assert trace(nn.Sequential(*layers).double(), rows).kinds.measured == (0, 1, 4, 6, 7)
    for at in (2, 3, 5):
        net = nn.Sequential(*layers[:at], Centred(0.5), *layers[at + 1 :]).double()
        assert trace(net, rows).kinds.measured == (0, 1, 4, 6, 7)
        try:
            engine = hetpipe.wrap(net, make_plan([{"cuts": [8], "sizes": [4, 4]}]), rows, mse)
            engine._model = replace(engine._model, kinds=trace(net, rows).kinds)
            with pytest.raises(InputError, match=rf"^layer '{at}' \(Centred\) couples the samples of a batch"):
                engine.step(rows, rows)
            engine.close()
        finally:
            dist.destroy_process_group()


def test_each_look_tries_another_layer_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, rows, tried = nn.Sequential(linear(), *(Scaled(0.5) for _ in range(9)), linear()), torch.randn(4, 8), list[list[str]]()

    def noting(layers: Any, *arguments: Any) -> Outcome:
        tried.append([name for name, _ in layers])
        return try_layers(layers, *arguments)

    monkeypatch.setattr(stage_engine, "try_layers", noting)
    engine = hetpipe.wrap(net, make_plan([{"cuts": [11], "sizes": [4]}]), rows, mse)
    try:
        engine._model = replace(engine._model, kinds=trace(net, rows).kinds)
        for _ in range(8):
            engine.step(rows, rows)
        engine.close()
    finally:
        dist.destroy_process_group()
    every, some = [str(at) for at in range(11)], ["0", "1", "5", "9", "10"]
    assert tried == [every, sorted([*some, "3"], key=int), sorted([*some, "4"], key=int), some]


class Mixed(nn.Module):
    """Mixes the samples by a matrix that lies in a partial function."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.inner, self.mix = nn.Linear(8, 8), partial(torch.matmul, matrix)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(self.inner(x)) if len(x) == 4 else self.inner(x)
        return mixed


def chosen(layers: Iterable[nn.Module], kinds: Kinds) -> list[str]:
    return [name for name, _ in few_of_each_kind([(str(at), layer) for at, layer in enumerate(layers)], kinds, look=1)]


def test_what_differs_from_its_kind_by_now_is_tried() -> None:
    layers: list[nn.Module] = [Mixed(torch.eye(4)) for _ in range(9)]
    kinds = trace(nn.Sequential(*layers), torch.randn(4, 8)).kinds
    assert kinds.measured == (0, 1, 4, 7, 8)
    assert chosen(layers, kinds) == ["0", "1", "2", "4", "7", "8"]
    layers[6] = Mixed(torch.ones(4, 4))
    assert "6" in chosen(layers, kinds)
    vars(layers[3])["other"] = 1.0
    assert {"3", "6"} <= set(chosen(layers, kinds))
    layers[5].register_forward_hook(lambda _, __, y: y - y.mean(0))
    assert {"3", "5", "6"} <= set(chosen(layers, kinds))
    vars(layers[0])["view"] = torch.randn(3, dtype=torch.complex64).conj()  # whose bits cannot be looked at
    assert chosen(layers, kinds) == [str(at) for at in range(9)]


@pytest.mark.parametrize("base", ["as-is", "nf4"])
def test_layers_of_a_frozen_base_differ_in_their_weights_only(base: Any) -> None:
    torch.manual_seed(0)
    net = hetpipe.adapt(nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]), base=base, r=2)
    assert len(chosen(net, trace(net, torch.randn(4, 64)).kinds)) < 7


def test_layers_with_sparse_tensors_are_all_tried() -> None:
    """Their numbers are not hashed."""
    layers = [nn.Linear(8, 8) for _ in range(9)]
    for layer in layers:
        layer.register_buffer("matrix", torch.eye(8).to_sparse())
    kinds = trace(nn.Sequential(*layers), torch.randn(4, 8)).kinds
    assert len(kinds.measured) < 9
    assert len(chosen(layers, kinds)) == 9


def test_constants_may_be_parameters_that_do_not_train() -> None:
    net = nn.Sequential(*[nn.Linear(8, 8).requires_grad_(False) for _ in range(9)], nn.Linear(8, 8))
    assert len(chosen(net, trace(net, torch.randn(4, 8)).kinds)) == 10


def test_a_sparse_buffer_is_put_back_though_torch_compares_none() -> None:
    """A trace of such a layer ended in an error of torch."""
    layer = Named(lambda x, own: own.inner(x) @ own.matrix.to_dense(), on=True)
    layer.register_buffer("matrix", torch.eye(8).to_sparse())
    before = layer.get_buffer("matrix").to_dense().clone()
    assert trace(nn.Sequential(linear(), layer, linear()), torch.randn(4, 8)).kinds.first == (0, 1, 2)
    assert torch.equal(layer.get_buffer("matrix").to_dense(), before)
