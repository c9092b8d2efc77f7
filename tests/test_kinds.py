"""Layers that compute the same are of one kind, and only they; one of them is traced for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetpipe
from hetpipe.documents.number_types import AS_BUILT, NumberTypes
from hetpipe.documents.plan import ReplicaPlan, StagePlan
from hetpipe.hf.replay.build import build
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.runtime.precision.boundaries import Boundaries
from tests.support.kinds import (
    SIZES,
    Beside,
    Cut,
    Named,
    Scaled,
    cast,
    checkpointed,
    cut,
    first,
    frozen,
    linear,
    longer,
    model,
    noted_runs,
    ordered,
    stopped,
    unsqueezed,
)

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
        lambda: linear(bias=False),
        lambda: linear(dtype=torch.float32).requires_grad_(False),
        nn.Tanh,
        lambda: nn.Sequential(linear()),
        lambda: Scaled(0.0),
        lambda: nn.Linear(8, 8).eval(),
    ],
)
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
    replica = ReplicaPlan(
        stages=(StagePlan(devices=("a",), layers=(0, 4)), StagePlan(devices=("b",), layers=(4, 8))), microbatch_sizes=(2,)
    )
    found = Boundaries(made, made.layers, replica, [AS_BUILT, NumberTypes.at("bf16")])
    runs = noted_runs(monkeypatch)
    for training in (True, False):
        runs.clear()
        rows = [found.of(size, training=training) for size in (2, 5, 3)]
        assert [runs.count(size) for size in (2, 5, 3)] == [6, 4, 4]  # at the ends of stages numbers are cast
        assert [spec.shape for row in rows for spec in row[-1]] == [(2, 8), (5, 8), (3, 8)]
        alone = Boundaries(made, made.layers, replica, [AS_BUILT, NumberTypes.at("bf16")])
        assert alone.of(5, training=training) == rows[1]


def test_gradients_come_back_through_layers_that_work_in_place() -> None:
    layers = nn.Sequential(linear(), nn.ReLU(True), linear(), nn.ReLU(True), linear(), nn.ReLU(True), linear())
    assert [row[0].requires_grad for row in trace(layers, torch.randn(4, 8)).rows] == [False, *[True] * 7]
    spread_of(layers, torch.randn(4, 8), [torch.randn(3, 8)])


def test_a_layer_that_changes_the_shape_in_place_changes_no_layer_behind_it() -> None:
    same = [Named(unsqueezed, on=False) for _ in range(5)]
    layers = nn.Sequential(linear(), *same[:3], Named(unsqueezed, on=True), nn.Flatten(), *same[3:], linear())
    spread_of(layers, torch.randn(4, 8), [torch.randn(3, 8)])
