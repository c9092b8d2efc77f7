"""A model that takes its time asleep and has much to send: a busy machine still keeps its times, and a gradient is there only
when its layer's time is over."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02  # of a layer, for a sample


class _Scaled(torch.autograd.Function):
    """x · weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS * len(x))
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        time.sleep(BACKWARD_SECONDS * len(x))
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    """[b, features] to [b, features], with as many parameters as features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = _Scaled.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return scaled


class Means(nn.Module):
    """Of each of some groups of scaled features: [b, features] to [b, groups]."""

    def __init__(self, features: int, groups: int) -> None:
        super().__init__()
        self.scale, self.groups = Scale(features), groups

    def forward(self, x: Tensor) -> Tensor:
        grouped: Tensor = self.scale(x).reshape(len(x), self.groups, -1)  # [b, groups, features / groups]
        return grouped.mean(2)


def build(layers: int, features: int, groups: int) -> nn.Sequential:
    """`layers` scalings, the last with the means of its groups."""
    return nn.Sequential(*(Scale(features) for _ in range(layers - 1)), Means(features, groups))
