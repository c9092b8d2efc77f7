"""What is run only to be looked at leaves layers, and generators, as they were; and no tensor without values behind."""

from __future__ import annotations

import functools
import gc
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.device import MemoryMeter
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.randomness import Generators, drawing, seed_of

DRAWS: dict[str, Any] = {
    "torch": lambda: torch.rand(3).tolist(),
    "numpy": lambda: np.random.rand(3).tolist(),
    "normal": lambda: np.random.randn(),
    "python": lambda: random.random(),
    "gauss": lambda: random.gauss(0, 1),
}


def fail() -> None:
    raise ArithmeticError


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_inside_is_decided_by_its_place_and_nothing_outside_moves(name: str) -> None:
    draw = DRAWS[name]
    draw()
    before = Generators.now()
    found = []
    for place in ((0, 1, 2), (0, 1, 3), (0, 1, 2)):
        with suppress(ArithmeticError), drawing(*place):
            found.append(draw())
            fail()
    moved = [before.moved]
    assert found[0] == found[2] != found[1]
    draw()
    assert [*moved, before.moved] == [False, True]
    assert seed_of(5) == 5
    assert 0 <= seed_of(5, "test") < 2**64


class Cache:
    """An object of somebody's that is no module."""

    def __init__(self) -> None:
        self.tables: dict[int, Tensor] = {}

    def table(self, width: int) -> Tensor:
        if width not in self.tables:
            self.tables[width] = torch.arange(width) / 10
        return self.tables[width]


@functools.lru_cache
def cached_table(width: int) -> Tensor:
    return torch.arange(width) / 10


def attribute(layer: Any, width: int) -> Tensor:
    if layer.table is None:
        layer.table = torch.arange(width) / 10
    table: Tensor = layer.table
    return table


TABLES: dict[int, Tensor] = {}


def of_module(_: Any, width: int) -> Tensor:
    return TABLES.setdefault(width, torch.arange(width) / 10)


def of_class(layer: Any, width: int) -> Tensor:
    if type(layer).shared is None:
        type(layer).shared = torch.arange(width) / 10
    table: Tensor = type(layer).shared
    return table


class WithTable(nn.Module):
    """A layer that makes a table in its first forward, and keeps it somewhere."""

    shared: Any = None

    def __init__(self, where: Any) -> None:
        super().__init__()
        self.where, self.cache = where, Cache()
        self.table: Tensor | None = None
        self.register_buffer("mask", None)

    mask: Any

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1])
        result: Tensor = x * self.mask + self.where(self, x.shape[-1])
        return result


KEPT: dict[str, Any] = {
    "an attribute": attribute,
    "an object": lambda layer, width: layer.cache.table(width),
    "a cache of functools": lambda _, width: cached_table(width),
}


@pytest.mark.parametrize("where", KEPT)
def test_a_table_of_the_first_forward_is_not_one_of_tracing(where: str) -> None:
    """A fake tensor stayed in the layer, and no real forward went on with it."""
    layer = WithTable(KEPT[where])
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    for _ in range(2):
        trace_boundaries(net, torch.ones(3, 4), backward=True)
        assert layer.table is None
        assert layer.mask is None
        assert layer.cache.tables == {}
    output = net(torch.ones(3, 4))
    assert type(output) is Tensor
    trace_boundaries(net, torch.ones(3, 4))
    assert torch.equal(net(torch.ones(3, 4)), output), "of a table that is real, tracing makes use"


def test_a_cache_of_what_was_imported_before_a_rank_was_forked_is_emptied() -> None:
    """The server of ranks puts all that it has imported where nobody looks for garbage, diffusers' tables of positions too."""
    gc.freeze()
    try:
        test_a_table_of_the_first_forward_is_not_one_of_tracing("a cache of functools")
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("where", "named"), [(of_module, " in tests.test_untouched"), (of_class, " in the class WithTable")])
def test_one_that_is_kept_where_nobody_looks_is_refused_by_name(where: Any, named: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), WithTable(where))
    try:
        with pytest.raises(InputError) as caught:
            trace_boundaries(net, torch.ones(3, 4))
    finally:
        TABLES.clear()
        WithTable.shared = None
    message = str(caught.value)
    assert message.startswith(f"layer '1' (WithTable) keeps a tensor of shape (4,) that it makes in its forward{named}, outside")
    assert "keep it in the module (self.table = …, or register_buffer)" in message


class Busy(nn.Module):
    """Keeps all sorts of things."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]
        self.last: Tensor | None = None
        self.sums = torch.zeros(2)
        self.generator, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.inner = nn.BatchNorm1d(2)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = x
        self.sums += x.detach().sum(0)
        self.more = self.calls
        noise = torch.rand((), generator=self.generator) + float(self.numbers.random())
        with torch.no_grad():
            self.weight.add_(1)
        result: Tensor = self.inner(x) * noise * self.weight
        return result


def test_what_a_module_keeps_is_put_back() -> None:
    layer = Busy()
    expected = layer(torch.ones(3, 2))
    layer, again = Busy(), Busy()
    with suppress(ArithmeticError), kept(layer):
        layer(torch.ones(3, 2))
        layer.eval()
        fail()
    assert (layer.calls, layer.seen, layer.last, layer.training) == (0, [0], None, True)
    assert not hasattr(layer, "more")
    assert torch.equal(layer.sums, torch.zeros(2))
    for name, buffer in again.named_buffers():
        assert torch.equal(layer.get_buffer(name), buffer), name
    assert layer.weight.tolist() == [2.0, 2.0], "the values of parameters are left alone"
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert torch.equal(layer(torch.ones(3, 2)), expected), "its generators are where they were"


class Slope(nn.Module):
    """Takes a gradient in its forward, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(x)).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + slope


class Codes(nn.Module):
    """Its output depends on a buffer that each forward moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        result: Tensor = self.linear(x * (1 + self.mean))
        return result


@pytest.mark.parametrize("kind", [Slope, Codes])
@pytest.mark.parametrize("metered", [False, True])
def test_recomputed_layers_that_take_gradients_or_keep_state_are_exact(kind: type[nn.Module], metered: bool) -> None:
    """A context of the recomputation could be entered once only, and state moved on between a forward and its recomputation."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
        stage, meter = make_stage(net, 0, 3, recompute=recompute), MemoryMeter()
        losses = []
        for _ in range(3):
            x = torch.randn(5, 4, requires_grad=True)
            if metered:
                with meter.hooks():
                    losses.append(stage(x).square().sum())
            else:
                losses.append(stage(x).square().sum())
        for loss in losses:
            loss.backward()
        found.append([*losses, *stage.buffers(), *(p.grad for p in stage.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
