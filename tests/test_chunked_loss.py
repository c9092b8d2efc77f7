"""The loss of a linear head, a chunk of tokens at a time (hetpipe/layers/losses/chunked.py), is that of whole logits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["HF_HUB_OFFLINE"] = "1"


from hetpipe.layers.device import one_thread
from hetpipe.layers.losses import chunked
from hetpipe.layers.losses.chunked import losses_of_logits, token_losses

F32 = torch.finfo(torch.float32).eps
BF16 = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(torch.device("cpu")):
        yield


class Head:
    """A head's features, weight, bias, and labels of which some are ignored; `upstream`, the gradient of each token's loss."""

    def __init__(self, *, tokens: int = 23, words: int = 50, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.features = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(words, 16, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(words, dtype=dtype, requires_grad=True) if bias else None
        self.labels = torch.randint(words, (tokens,))
        self.labels[::5] = -100
        self.upstream = torch.randn(tokens, dtype=torch.promote_types(dtype, torch.float32))

    def fused(self) -> tuple[Tensor, Tensor]:
        return token_losses(self.features, self.weight, self.bias, self.labels)

    def plain(self) -> tuple[Tensor, Tensor]:
        return losses_of_logits(nn.functional.linear(self.features, self.weight, self.bias), self.labels)

    def gradients(self, losses: Tensor) -> list[Tensor]:
        leaves = [t for t in (self.features, self.weight, self.bias) if t is not None and t.requires_grad]
        return list(torch.autograd.grad(losses, leaves, self.upstream))


def far(found: Tensor, wanted: Tensor) -> float:
    """Relative to the greatest."""
    return float(((found - wanted).abs().max() / wanted.abs().max()).detach())


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    head = Head(bias=bias)
    (losses, right), (wanted, also) = head.fused(), head.plain()
    assert far(losses, wanted) < 1e-13
    assert torch.equal(right, also)
    assert bool((losses[::5] == 0).all())
    for mine, theirs in zip(head.gradients(losses), head.gradients(wanted), strict=True):
        assert far(mine, theirs) < 1e-13


def test_only_ignored_tokens_and_none_at_all() -> None:
    head = Head()
    head.labels[:] = -100
    losses, right = head.fused()
    assert not bool(losses.any() | right.any())
    assert not any(bool(g.any()) for g in head.gradients(losses))
    losses, right = token_losses(head.features[:0].view(2, 0, 16), head.weight, None, head.labels[:0].view(2, 0))
    assert losses.shape == right.shape == (2, 0)
    assert not bool(torch.autograd.grad(losses.sum(), head.weight)[0].any())


def test_what_does_not_train_gets_no_gradient() -> None:
    head = Head()
    head.weight.requires_grad_(False)
    losses, _ = head.fused()
    losses.backward(head.upstream)
    wanted, _ = head.plain()
    assert head.weight.grad is None
    assert far(head.features.grad, torch.autograd.grad(wanted, head.features, head.upstream)[0]) < 1e-13  # type: ignore[arg-type]
    with torch.no_grad():
        assert not head.fused()[0].requires_grad


def test_nothing_as_large_as_the_logits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", 8)
    head, kept, made = Head(tokens=64, words=1000), dict[int, int](), list[int]()

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            every = found if isinstance(found, tuple | list) else (found,)
            made.extend(t.numel() for t in every if isinstance(t, Tensor))
            return found

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Sizes():
        losses, _ = head.fused()
        losses.backward(head.upstream)
    assert sum(kept.values()) == 1000 * 16 + 1000 + 64 * 16 + 64 + 64  # weight, bias, features, labels, sums
    assert max(made) == 1000 * 16  # the weight's gradient; the logits of a chunk are half as many


# ---- a head that does not train ----


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def frozen(dtype: torch.dtype = torch.float64, **options: Any) -> Head:
    head = Head(dtype=dtype, **options)
    for parameter in (head.weight, head.bias):
        if parameter is not None:
            parameter.requires_grad_(False)
    return head


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("frozen", 2, 0),
        ("trained", 1, 3),
        ("only the bias trains", 1, 2),
        ("float32 weight of bfloat16 features", 1, 2),
        ("no gradient is wanted", 1, None),
        ("features want none", 1, None),
    ],
)
def test_how_many_products_there_are(kind: str, forward: int, backward: int | None) -> None:
    """In one chunk. Where the head is frozen, the features' gradient is made in forward, if anything wants it."""
    head = Head() if kind == "trained" else frozen()
    if kind == "only the bias trains":
        assert head.bias is not None
        head.bias.requires_grad_()
    elif kind == "float32 weight of bfloat16 features":
        head.features = head.features.detach().bfloat16().requires_grad_()
        head.weight, head.bias = head.weight.float(), None
    elif kind == "features want none":
        head.features.requires_grad_(False)
    with torch.set_grad_enabled(kind != "no gradient is wanted"), Products() as products:
        losses, _ = head.fused()
    assert products.count == forward
    assert losses.requires_grad == (backward is not None)
    if backward is not None:
        with Products() as products:
            head.gradients(losses)
        assert products.count == backward


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float64, None),
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_a_gradient_made_in_forward_is_as_near(
    dtype: torch.dtype, autocast: torch.dtype | None, bias: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the same bit by bit, and the gradient as near to that of float64 as one that is made in backward."""
    monkeypatch.setattr(chunked, "CHUNK", chunk)
    head = frozen(dtype, tokens=200, words=300, bias=bias)
    exact = frozen(tokens=200, words=300, bias=bias)
    exact.features = head.features.detach().double().requires_grad_()
    exact.weight, exact.bias = head.weight.double(), head.bias.double() if head.bias is not None else None
    exact.labels = head.labels
    (truth,) = torch.autograd.grad(exact.plain()[0], exact.features, head.upstream.double())
    found = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(chunked, "_is_made_early", lambda *_: False)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            losses, right = head.fused()
        (gradient,) = head.gradients(losses)
        assert gradient.dtype == dtype
        assert not bool(gradient[::5].any()), "ignored"
        found.append((losses, right, (gradient.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] <= 1.05 * found[1][2] + 1e-15
    if dtype == torch.float64:
        assert found[0][2] < 1e-14


def test_what_is_kept_of_a_frozen_head_has_the_features_size() -> None:
    kept, head = list[Tensor](), frozen(torch.float32, tokens=64, words=1000)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        losses, _ = head.fused()
    assert {(t.dtype, t.numel()) for t in kept} == {(torch.float32, 64 * 16), (torch.int64, 64)}
    (gradient,) = torch.autograd.grad(losses, head.features, head.upstream.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ---- types ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_product_is_low_and_the_softmax_is_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked loss equals the plain loss: both round the same logits to bfloat16. Sums over words round as float32 does.
    Gradients, whose products are of bfloat16 in both, differ by half a unit of it in what is multiplied, and once a chunk."""
    monkeypatch.setattr(chunked, "CHUNK", 8)
    head = Head(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        (losses, right), (wanted, also) = head.fused(), head.plain()
    assert losses.dtype == torch.float32
    assert far(losses, wanted) < 50 * F32
    assert torch.equal(right, also)
    exact = Head(dtype=dtype)
    with torch.no_grad():
        assert exact.bias is not None
        rounded = nn.functional.linear(*(t.bfloat16().float() for t in (exact.features, exact.weight, exact.bias)))
    assert far(losses, losses_of_logits(rounded, exact.labels)[0]) < 4 * BF16
    for mine, theirs in zip(head.gradients(losses), head.gradients(wanted), strict=True):
        assert mine.dtype == dtype
        assert far(mine.float(), theirs.float()) < 4 * BF16


def test_parameters_in_half_precision_have_a_loss_of_float32() -> None:
    low = Head(dtype=torch.bfloat16)
    losses, _ = low.fused()
    exact = nn.functional.linear(low.features, low.weight, low.bias).double()
    assert losses.dtype == torch.float32
    assert far(losses, losses_of_logits(exact, low.labels)[0]) < 50 * F32


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_that_is_no_word_is_no_loss(label: int) -> None:
    head = Head()
    head.labels[3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head.fused()
