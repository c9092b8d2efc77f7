"""What layers make of the rounding of those before them is no coupling (hetpipe/layers/trials): chains of float32 blocks with
adapters of large values, in which a difference in the last place becomes one in the third."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.layers.device import one_thread
from hetpipe.layers.model import named_layers
from hetpipe.layers.trials.compare import MEAN_TOLERANCE, lie_in
from hetpipe.layers.trials.layer_check import Outcome, try_layers
from hetpipe.layers.trials.rows import TrialRows, cut_to_try

TOKENS, WIDTH = 16, 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Else the sums of products are rounded as the machine has time."""
    with one_thread(torch.device("cpu")):
        yield


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, as LoRA has it."""

    def __init__(self, width: int, out: int, scale: float) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(8, width) / width**0.5), nn.Parameter(torch.randn(out, 8) * scale)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + (x @ self.a.T) @ self.b.T
        return result


class Block(nn.Module):
    """Of a transformer. [b, t, d]"""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm, self.q, self.v = nn.LayerNorm(WIDTH), Adapted(WIDTH, WIDTH, scale), Adapted(WIDTH, WIDTH, scale)
        self.up, self.down = Adapted(WIDTH, 4 * WIDTH, scale), Adapted(4 * WIDTH, WIDTH, scale)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.norm(x))
        x = x + F.scaled_dot_product_attention(q, q, self.v(self.norm(x)))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Rounds(nn.Module):
    """Rounds otherwise in a batch of another size, as products of matrices do on some devices."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.37 * len(x) - 0.37 * len(x)


class InLayout(nn.Module):
    """A layer of [b, t, d], in a chain whose tensors are laid out otherwise."""

    def __init__(self, inner: nn.Module, come: Callable[[Tensor], Tensor], go: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.come, self.go = inner, come, go

    def forward(self, x: Tensor) -> Tensor:
        return self.go(self.inner(self.come(x)))


def same(x: Tensor) -> Tensor:
    return x


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # to [b, t, d], and back
    "samples first": (same, same),
    "time first": (turned, turned),
    "samples and time in one": (lambda x: x.reshape(-1, TOKENS, WIDTH), lambda x: x.reshape(-1, WIDTH)),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def tried(layout: str, layers: list[nn.Module]) -> Outcome:
    come, go = LAYOUTS[layout]
    net = nn.Sequential(Rounds(), InLayout(nn.Identity(), same, go), *(InLayout(layer, come, go) for layer in layers))
    rows = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return try_layers(named_layers(net), cut_to_try(rows))


def blocks(count: int, scale: float, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block(scale) for _ in range(count)]


@layouts
@pytest.mark.parametrize(
    ("scale", "seed"),
    [(2.0, 2), (16.0, 0), *(pytest.param(*row, marks=pytest.mark.thorough) for row in ((8.0, 0), (16.0, 1), (16.0, 2)))],
)
def test_large_adapters_make_much_of_rounding_and_couple_nothing(layout: str, scale: float, seed: int) -> None:
    found = tried(layout, blocks(12, scale, seed))
    assert (found.fault, found.untried) == (None, None)


class NotInDouble(nn.Module):
    """As a kernel of somebody's, which there is in a few types only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("not in float64")
        result: Tensor = self.inner(x)
        return result


@layouts
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)])
def test_nor_do_such_that_do_not_run_in_float64(layout: str, seed: int) -> None:
    found = tried(layout, [NotInDouble(block) for block in blocks(12, 16.0, seed)])
    assert (found.fault, found.untried) == (None, None)


class Couples(nn.Module):
    """A little of what it gives depends on the other samples. [b, t, d]"""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.of(x)


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean of the batch": lambda x: x.mean(0, keepdim=True).expand_as(x),
    "its deviation": lambda x: x * x.std(0),
    "the sample before": lambda x: x.roll(1, 0),
    "attention over samples": lambda x: turned(F.scaled_dot_product_attention(turned(x) / 9, turned(x) / 9, turned(x))),
}


@layouts
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("in_double", [True, False])
def test_behind_such_layers_one_that_couples_samples_is_found(layout: str, name: str, in_double: bool) -> None:
    layers = blocks(6, 2.0)
    layers[4] = Couples(COUPLED[name]) if in_double else NotInDouble(Couples(COUPLED[name]))
    fault = tried(layout, layers).fault
    assert fault is not None
    assert fault.startswith("layer '6' (InLayout) couples the samples of a batch: for 4 samples together, and in two parts, ")


def test_a_coupling_that_later_layers_make_much_of_is_not_taken_for_rounding() -> None:
    """Of the largest number it is too little to be seen in the layer that couples, but far more than rounding."""
    torch.manual_seed(0)
    large = torch.where(torch.arange(WIDTH) < 2, 300.0, 1.0)
    layers = [InLayout(Couples(lambda x: 0.1 * x.mean(0)), same, lambda x: x * large), *blocks(4, 1.0)]
    fault = tried("samples first", layers).fault
    assert fault is not None
    assert "couples the samples of a batch" in fault


def test_parts_begin_as_the_whole_where_they_are_that_but_for_rounding() -> None:
    """
    whole   parts      what they begin as
    abcd    ab cd      the same rows
    abcd    ab' cd'    ab cd: only the last places differ
    abcd    ac bd      ac bd: as they are, in another order
    abcd    ab cD      ab cD: as they are, with another number
    mean    mean mean  as they are, since they do not grow with the rows
    """
    torch.manual_seed(0)
    whole = torch.randn(4, 8)
    first, second = whole[:2], whole[2:]
    near, nearer = first * (1 + 2e-6), second * (1 - 2e-6)
    cases: list[tuple[str, Tensor, Tensor, Tensor, int | None]] = [  # and the dimension in which the parts lie
        ("the same", whole, first, second, 0),
        ("rounded", whole, near, nearer, 0),
        ("in the second dimension", whole.T, near.T, nearer.T, 1),
        ("in another order", whole, whole[::2], whole[1::2], None),
        ("another number", whole, first, second * 1.001, None),
        ("means", whole.mean(0), first.mean(0), second.mean(0), None),
        ("in bfloat16", whole.bfloat16(), (first * 1.01).bfloat16(), second.bfloat16(), 0),
        ("in float64", whole.double(), near.double(), nearer.double(), None),
        ("words", torch.arange(4), torch.arange(2), torch.arange(2, 4), 0),
        ("other words", torch.arange(4), torch.arange(2), torch.arange(2), None),
    ]
    for name, own, a, b, dimension in cases:
        assert lie_in(own, (a, b)) is (dimension is not None), name
        found = TrialRows((own,), ((a,), (b,)), (2, 2)).without_rounding()
        wanted = (a, b) if dimension is None else own.split(2, dimension)
        for (part,), other in zip(found.parts, wanted, strict=True):
            assert torch.equal(part, other), name
    assert lie_in(whole, (first, second * 1.001), MEAN_TOLERANCE)
    assert not lie_in(whole, (whole[::2], whole[1::2]), MEAN_TOLERANCE)
