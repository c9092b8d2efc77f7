"""Layers that are, or are not, of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetpipe.layers.model import LOSSES, Loss, Model, evaluating
from hetpipe.layers.untouched.boundaries import trace

CPU = torch.device("cpu")
SIZES: dict[str, Any] = dict(
    type="qwen3",
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=32,
    max_position_embeddings=64,
)


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


def noted_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward of a `Scaled` is given."""
    runs, run = list[int](), Scaled.forward

    def noted(layer: Scaled, x: Tensor) -> Tensor:
        runs.append(len(x))
        return run(layer, x)

    monkeypatch.setattr(Scaled, "forward", noted)
    return runs
