"""Layers that compute the same are traced and measured as one kind, and only they."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetpipe
from hetpipe.files.messages import InputError
from hetpipe.hf.replay.build import build
from hetpipe.layers.model import LOSSES, Loss, Model, as_tuple, evaluating, mse
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.kinds import Kinds
from hetpipe.layers.weights import materialise
from hetpipe.measuring.precision.layer_bytes import saved_bytes
from hetpipe.measuring.profiler import measure_device
from hetpipe.runtime.precision.boundaries import Boundaries
from hetpipe.spec.number_types import AS_BUILT, NumberTypes
from hetpipe.spec.plan import ReplicaPlan, StagePlan
from tests.support.ranks import make_plan

CPU = torch.device("cpu")
SIZES: dict[str, Any] = dict(
    type="qwen3", hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=32,
    max_position_embeddings=64,
)  # fmt: skip


class Scaled(nn.Module):
    """A residual layer whose number is a plain attribute."""

    def __init__(self, factor: float, width: int = 8) -> None:
        super().__init__()
        self.factor, self.inner = factor, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x)
        return x + self.factor * inner.relu()


class Cut(nn.Module):
    """Keeps so many tokens at most."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.most] if x.shape[1] > self.most else x


class Beside(nn.Module):
    """Passes a second tensor on, and uses it or not."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.used, self.inner = used, nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = given
        return (self.inner(x) + y if self.used else self.inner(x)), y


class Centred(nn.Module):
    """Takes so much of the batch's mean away."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor: Tensor
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.factor * x.mean(0, keepdim=True)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def first(*layers: nn.Module, inputs: Tensor | None = None) -> tuple[int, ...]:
    return trace(nn.Sequential(*layers), torch.randn(4, 8) if inputs is None else inputs).kinds.first


def model(*layers: nn.Module) -> Model:
    net, inputs = nn.Sequential(*layers), torch.randn(2, 8)
    with evaluating(net):
        targets = net(inputs).detach()
    return Model(name="test", layers=net, inputs=inputs, targets=targets, loss=Loss(function=LOSSES["mse"]))


def linear(width: int = 8, **options: Any) -> nn.Module:
    return nn.Linear(width, 8, **options)


class Named(nn.Module):
    """A layer that does something or not, as an attribute says."""

    def __init__(self, what: Callable[[Tensor, Any], Any], *, on: Any) -> None:
        super().__init__()
        self.what, self.on, self.inner = what, on, nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.what(x, self)


def checkpointed(x: Tensor, layer: Named) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        found: Tensor = layer.inner(layer.inner(y).tanh())
        return found.tanh()

    return checkpoint(inner, x, use_reentrant=False) if layer.on else inner(x)


def turned(x: Tensor, layer: Named) -> Tensor:
    return x.mT.contiguous().mT if layer.on else x.contiguous()


def sliced(x: Tensor, layer: Named) -> Tensor:
    return x[:, : np.int64(16)] if layer.on else x


def cast(x: Tensor, layer: Named) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=layer.on):
        return layer.inner(x.float())  # type: ignore[no-any-return]


def stopped(x: Tensor, layer: Named) -> Tensor:
    return x.data if layer.on else x


def longer(x: Tensor, layer: Named) -> Tensor:
    return nn.functional.interpolate(x[None], scale_factor=layer.on, mode="nearest")[0, :, :, ::2]


def cut(x: Tensor, layer: Named) -> Tensor:
    return x[:, : np.int64(layer.on)]


def ordered(x: Any, layer: Named) -> Any:
    return tuple(x[k] for k in layer.on)


def unsqueezed(x: Tensor, layer: Named) -> Tensor:
    return x.unsqueeze_(1) if layer.on else x + layer.inner(x)


DECIDING: dict[str, tuple[Callable[[Any, Any], Any], Sequence[Any]]] = {
    "autocast": (cast, [False, False, True, False]),
    "no history": (stopped, [False, False, True, False]),
    "another size by a float": (longer, [2.0, 2.0, 4.0, 2.0]),
    "a slice by numpy's number": (cut, [7, 7, 5, 5]),
    "checkpointing": (checkpointed, [False, False, True, False]),
    "in place": (unsqueezed, [False, False, False, True]),
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_layer_that_decides_by_an_attribute_is_not_like_one_that_decides_otherwise(name: str) -> None:
    what, choices = DECIDING[name]
    layers = nn.Sequential(nn.LayerNorm(8), *(Named(what, on=choice) for choice in choices), nn.Flatten())
    inputs = torch.randn(2, 8, 8)
    kinds = trace(layers, inputs).kinds
    for size in (3, 1):
        given = torch.randn(size, 8, 8)
        assert trace(layers, given, kinds=kinds).rows == trace(layers, given).rows
    groups = {choice: {kinds.first[1 + k] for k, own in enumerate(choices) if own == choice} for choice in choices}
    for one, other in combinations(groups.values(), 2):
        assert not one & other


def test_layers_that_pass_tensors_on_in_another_order_are_of_other_kinds() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    orders = [(0, 1), (0, 1), (1, 0), (1, 0), (0, 0), (0, 1)]
    layers = nn.Sequential(Pair(), *(Named(ordered, on=order) for order in orders), Named(ordered, on=(0,)), nn.Linear(8, 8))
    kinds = trace(layers, torch.randn(4, 8)).kinds
    assert kinds.first[1:7] == (1, 1, 3, 3, 5, 6)
    spread_of(layers, torch.randn(4, 8), [torch.randn(3, 8)])


def test_a_layer_that_makes_whole_numbers_is_of_its_own() -> None:
    """A layer that comes later would be given numbers that are too large, if others had not run."""

    class Halved(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            return words // 2

    words = torch.full((4, 3), 200)
    layers = nn.Sequential(*(Halved() for _ in range(5)), nn.Embedding(8, 8), nn.Linear(8, 8))
    assert trace(layers, words).kinds.measured == tuple(range(7))


def test_layers_that_differ_in_their_numbers_only_are_of_one_kind() -> None:
    """The first gets what needs no gradient; the loss follows the last."""
    assert first(linear(), *(linear() for _ in range(5))) == (0, 1, 1, 1, 1, 5)
    assert first(linear(), *(Scaled(f) for f in (0.1, 0.5, 0.5)), linear(), linear()) == (0, 1, 2, 2, 4, 5)
    assert first(linear(), *(nn.Dropout(p) for p in (0.1, 0.2, 0.0, 0.0)), linear()) == (0, 1, 2, 3, 3, 5)


@pytest.mark.parametrize(
    "other",
    [
        lambda: linear(bias=False), lambda: linear(dtype=torch.float32).requires_grad_(False), nn.Tanh,
        lambda: nn.Sequential(linear()), lambda: Scaled(0.0), lambda: nn.Linear(8, 8).eval(),
    ],
)  # fmt: skip
def test_layers_that_compute_something_else_are_not(other: Callable[[], nn.Module]) -> None:
    layers = (linear(), linear(), other(), linear(), linear())
    assert first(*layers) == (0, 1, 2, 1, 4)


def test_a_layer_with_a_hook_is_of_its_own() -> None:
    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    assert first(linear(), linear(), hooked, linear(), linear()) == (0, 1, 2, 1, 4)


def test_layers_that_do_otherwise_by_their_attributes_are_not() -> None:
    x = torch.randn(2, 9, 8)
    assert first(linear(), Scaled(1), Cut(7), Cut(7), Cut(3), linear(), inputs=x) == (0, 1, 2, 3, 4, 5)
    assert first(linear(), Scaled(1), Cut(9), Cut(10), Cut(10), linear(), inputs=x) == (0, 1, 2, 3, 3, 5)


def spread_of(layers: nn.Sequential, inputs: Any, others: list[Any]) -> None:
    kinds = trace(layers, inputs).kinds
    for given in others:
        assert trace(layers, given, kinds=kinds).rows == trace(layers, given).rows


def noted_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward of a `Scaled` is given."""
    runs, run = list[int](), Scaled.forward

    def noted(layer: Scaled, x: Tensor) -> Tensor:
        runs.append(len(x))
        return run(layer, x)

    monkeypatch.setattr(Scaled, "forward", noted)
    return runs


def test_one_layer_of_a_kind_runs_for_all_that_are_given_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(linear(), *(Scaled(0.5) for _ in range(6)), linear())
    kinds, runs = trace(layers, torch.randn(4, 8)).kinds, noted_runs(monkeypatch)
    rows = trace(layers, torch.randn(3, 8), kinds=kinds).rows
    assert runs == [3]
    assert rows == trace(layers, torch.randn(3, 8)).rows
    assert runs == [3] * 7


@pytest.mark.parametrize("used", [True, False])
def test_gradients_that_come_back_are_those_of_a_whole_trace(used: bool) -> None:
    start = nn.Linear(8, 8)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = start, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    class One(nn.Module):
        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            return given[0]

    layers = nn.Sequential(Two(), *(Beside(used=False) for _ in range(3)), Beside(used=used), Beside(used=False), One())
    spread_of(layers, torch.randn(4, 8), [torch.randn(3, 8), torch.randn(1, 8)])
    rows = trace(layers, torch.randn(4, 8)).rows
    found = [[spec.requires_grad for spec in row] for row in rows]
    assert found == [[False], *[[True, used]] * 4, [True, False], [True, False], [True]]


def test_frozen_layers_below_others_need_no_gradient_under_other_inputs() -> None:
    layers = nn.Sequential(*(frozen(Scaled(1.0)) for _ in range(4)), *(Scaled(1.0) for _ in range(4)))
    spread_of(layers, torch.randn(4, 8), [torch.randn(3, 8)])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", [{}, {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 5}])
def test_a_decoder_is_traced_as_if_all_its_layers_ran(lora: bool, kind: dict[str, Any]) -> None:
    sizes = {**SIZES, "type": "gemma3_text"} if kind else SIZES
    layers = build(**sizes, num_hidden_layers=6, **kind)
    layers = hetpipe.adapt(layers, r=2) if lora else layers
    shapes = [(4, 8), (2, 8), (3, 17), (1, 3)]
    spread_of(layers, torch.zeros(4, 8, dtype=torch.int64), [torch.zeros(*shape, dtype=torch.int64) for shape in shapes])
    masked = [(torch.zeros(*shape, dtype=torch.int64), torch.ones(*shape, dtype=torch.int64)) for shape in shapes]
    spread_of(layers, masked[0], list(masked))


def test_layers_that_are_given_something_else_run_again() -> None:
    layers = nn.Sequential(Scaled(1.0), Cut(9), Cut(9), Cut(9), Scaled(1.0))
    assert trace(layers, torch.randn(2, 5, 8)).kinds.first == (0, 1, 1, 1, 4)
    spread_of(layers, torch.randn(2, 5, 8), [torch.randn(2, 11, 8)])


def test_boundaries_find_kinds_once_and_use_them_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(linear(), *(Scaled(0.5) for _ in range(6)), linear())
    replica = ReplicaPlan(stages=(StagePlan(devices=("a",), layers=(0, 4)),
        StagePlan(devices=("b",), layers=(4, 8))), microbatch_sizes=(2,))
    found = Boundaries(made, made.layers, replica, [AS_BUILT, NumberTypes.at("bf16")])
    runs = noted_runs(monkeypatch)
    for training in (True, False):
        runs.clear()
        rows = [found.of(size, training=training) for size in (2, 5, 3)]
        assert [runs.count(size) for size in (2, 5, 3)] == [6, 4, 4]  # at the ends of stages numbers are cast
        assert [spec.shape for row in rows for spec in row[-1]] == [(2, 8), (5, 8), (3, 8)]
        alone = Boundaries(made, made.layers, replica, [AS_BUILT, NumberTypes.at("bf16")])
        assert alone.of(5, training=training) == rows[1]


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
}  # fmt: skip


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
    """Of its kind, others are measured, which do not show what it does."""
    torch.manual_seed(0)
    rows = torch.randn(8, 8, dtype=torch.float64)
    layers = [linear(), *(Centred(1e-12) for _ in range(6)), linear()]
    assert trace(nn.Sequential(*layers).double(), rows).kinds.measured == (0, 1, 4, 6, 7)
    for at in (2, 3, 5):
        net = nn.Sequential(*layers[:at], Centred(0.5), *layers[at + 1 :]).double()
        assert trace(net, rows).kinds.measured == (0, 1, 4, 6, 7)
        try:
            engine = hetpipe.wrap(net, make_plan([{"cuts": [8], "sizes": [4, 4]}]), rows, mse)
            with pytest.raises(InputError, match=rf"^layer '{at}' \(Centred\) couples the samples of a batch"):
                engine.step(rows, rows)
            engine.close()
        finally:
            dist.destroy_process_group()
