"""Small models whose layers can be split over several devices."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tests.support.blocks import WIDTH, WORDS, Block


class Wide(nn.Module):
    """Can be split over 2, 3 and 6 devices: column by column, then row by row."""

    base_digest: ClassVar = "the same everywhere"
    tensor_parallel: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """Three matrices in one, as of queries, keys and values; and two linear layers that take the same."""

    base_digest: ClassVar = "the same everywhere"
    tensor_parallel: ClassVar = {"three": "colwise:3/6", "gate": "colwise", "down": "rowwise"}

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.norm, self.three = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * inner)
        self.gate, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        a, b, c = self.three(given).unflatten(-1, (3, -1)).unbind(-2)
        return x + self.down((a * torch.sigmoid(b) + c) * torch.tanh(self.gate(given)))  # type: ignore[no-any-return]


class Gathered(nn.Module):
    """Of one linear layer each device makes a part; another, which nothing splits, takes all of it."""

    base_digest: ClassVar = "the same everywhere"
    tensor_parallel: ClassVar = {"linear": "colwise_gather_output"}

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.other(self.linear(x)))


class Taking(nn.Module):
    """A linear layer that nothing splits; another, of whose inputs each device takes a part."""

    base_digest: ClassVar = "the same everywhere"
    tensor_parallel: ClassVar = {"linear": "rowwise_split_input"}

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.other, self.linear = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(self.other(x)))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Six heads of queries share one of keys, which no device cuts."""

    base_digest: ClassVar = "the same everywhere"
    tensor_parallel: ClassVar = {"queries": "colwise/6", "keys": "colwise/1x6", "down": "rowwise"}

    def __init__(self, inner: int = 12) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner // 6)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x)
        heads = self.queries(x).unflatten(-1, (-1, keys.shape[-1]))
        return x + self.down(torch.tanh(heads * keys.unsqueeze(-2)).flatten(-2))  # type: ignore[no-any-return]


def every_style(inner: int = 12) -> nn.Sequential:
    """Of each way to split a linear layer one, or more."""
    row = [Wide(inner), Fused(inner), Gathered(inner), Taking(inner), Shared(inner)]
    return nn.Sequential(*row, Shared(inner), Gathered(inner), Taking(inner), Block(), Wide(inner))


def in_blocks() -> nn.Sequential:
    """The same, of which two or three devices have whole blocks of nf4."""
    return every_style(384)


def splittable() -> nn.Sequential:
    """Layers that can be split, among others."""
    row = [Wide(), Fused(), Block(), Gathered(), Wide()]
    return nn.Sequential(*row, Fused(), Wide(), Gathered(), Block(), Wide())


def tied_splittable() -> nn.Sequential:
    """Layer 0 embeds, layer 9 predicts with the same weight, and could be split if it were not shared."""
    embedding, head = nn.Embedding(WORDS, WIDTH), Head()
    head.linear.weight = embedding.weight
    return nn.Sequential(embedding, Wide(), Fused(), Wide(), Fused(), Wide(), Fused(), Wide(), Fused(), head)


class Head(nn.Module):
    tensor_parallel: ClassVar = {"linear": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits


def partly_frozen() -> nn.Sequential:
    """Some of what is split does not train, nor does some of what is whole."""
    net, still = splittable(), ("0.", "1.three.", "5.norm.", "6.up.bias.", "6.down.")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not f"{name}.".startswith(still))
    return net
