"""Layers that do none of what tests/support/coupled.py has, by name: tables, caches, counters, and blocks as in timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from hetpipe.layers.model import Tensors
from tests.support.coupled import IMAGES, ROWS, WORDS, Checkpointed, D, Drawing, Experts, First, Of, Output, Self, between, tied


class Table(nn.Module):
    """Makes tables in its first forward; remembers what it gave last, and the first number of all; counts, also in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None
        self.last: Any = None
        self.calls, self.rows, self.first = 0, torch.tensor(0), torch.zeros(())
        self.register_buffer("mask", None)

    mask: Any

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows += len(x)
        self.first.copy_(x.detach().flatten()[0])
        if self.table is None:
            self.table, self.mask = torch.arange(x.shape[-1]) / 10, torch.ones(x.shape[-1])
        self.last = x * self.mask + self.table
        result: Tensor = self.last
        return result


def put_back_in_order(x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return torch.tanh(x[order])[order.argsort()]


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.zeros(2, D))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank() -> nn.Linear:
    layer = nn.Linear(D, D)
    register_parametrization(layer, "weight", LowRank())
    return layer


class Slope(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(x).square().sum(), x, create_graph=True)
        return x + slope


class Clamped(nn.Module):
    """Clips the gradients of its numbers, one by one."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return 2 * x


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(0.8) / 0.8


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Windows(nn.Module):
    """Attention in windows of a sequence, which are rows of their own meanwhile, as Swin's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), 3, 2, D).transpose(0, 1).reshape(-1, 2, D)  # the windows of all samples, then those of the next
        result: Tensor = self.inner(rows).reshape(3, len(x), 2, D).transpose(0, 1).reshape(x.shape)
        return result


class ConvNext(nn.Module):
    """A block of it, with a scale for each channel and stochastic depth."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm, self.inner = nn.LayerNorm(channels), nn.Sequential(nn.Linear(channels, 32), nn.GELU(), nn.Linear(32, channels))
        self.scale, self.drop = nn.Parameter(torch.full((channels,), 1e-2)), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(self.depth(x).permute(0, 2, 3, 1))) * self.scale
        result: Tensor = x + self.drop(y.permute(0, 3, 1, 2))
        return result


class Squeeze(nn.Module):
    """A block of EfficientNet without BatchNorm: squeeze and excite, in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels)
        self.inner = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.SiLU(inplace=True), nn.Conv2d(2, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        result: Tensor = x + y * torch.sigmoid(self.inner(y.mean((2, 3), keepdim=True)))
        return result


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.channels, self.norm = nn.Linear(6, 6), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.words(self.norm(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norm(x))
        return result


def images(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 8 * 8, 4))


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Sequential], Tensors]] = {
    "dropout": (lambda: between(nn.Dropout(0.5)), ROWS),
    "alpha dropout": (lambda: between(nn.AlphaDropout(0.5)), ROWS),
    "stochastic depth": (lambda: between(DropPath()), WORDS),
    "random ReLU": (lambda: between(nn.RReLU()), ROWS),
    "Gumbel softmax": (lambda: between(Of(F.gumbel_softmax)), ROWS),
    "noise of a generator of its own": (lambda: between(Drawing("goes on")), ROWS),
    "fixed noise, alike for all samples": (lambda: between(Drawing("of columns")), ROWS),
    "words in another order": (lambda: between(Of(lambda x: x[:, torch.randperm(x.shape[1])])), WORDS),
    "some words, in another order": (lambda: between(Of(lambda x: x[:, torch.rand(x.shape[1]).argsort()[:4]])), WORDS),
    "each sample's words in another order": (
        lambda: between(Of(lambda x: x.gather(1, torch.rand(x.shape[:2]).argsort(1)[:, :, None].expand(-1, -1, D)))),
        WORDS,
    ),
    "an order that is put back": (lambda: between(Of(put_back_in_order)), ROWS),
    "dropout in a checkpoint": (lambda: between(Checkpointed()), ROWS),
    "noise": (lambda: between(Of(lambda x: x + torch.randn_like(x) + torch.distributions.Normal(x, 1.0).rsample())), ROWS),
    "encoder": (lambda: between(nn.TransformerEncoderLayer(D, 2, 32, dropout=0.2, batch_first=True)), WORDS),
    "attention": (lambda: between(Self(batch_first=True)), WORDS),
    "LSTM": (lambda: between(Output(nn.LSTM(D, D, 2, dropout=0.3, batch_first=True))), WORDS),
    "time first in between": (
        lambda: nn.Sequential(Transposed(), nn.TransformerEncoderLayer(D, 2, 32), Output(nn.GRU(D, D)), Transposed()),
        WORDS,
    ),
    "words of all samples as rows": (lambda: between(Of(lambda x: x.transpose(0, 1).reshape(-1, D))), WORDS),
    "windows": (lambda: between(Windows()), WORDS),
    "experts without a capacity": (lambda: between(Experts(4.0)), WORDS),
    "a mean carried along": (lambda: nn.Sequential(nn.Linear(D, D), Of(lambda x: (x, x.square().mean())), First()), ROWS),
    "tables and a memory": (lambda: between(Table()), ROWS),
    "a gradient inside": (lambda: between(Slope()), ROWS),
    "a gradient inside, of the inputs": (lambda: nn.Sequential(Slope(), nn.Linear(D, D)), ROWS),
    "clipped gradients": (lambda: between(Clamped()), ROWS),
    "tied weights": (lambda: tied(registers=True), ROWS),
    "frozen weights of nobody": (lambda: between(Of(lambda x: x @ torch.ones(D, D).to(x))), ROWS),
    "a low-rank change as a parametrization": (lambda: between(low_rank()), ROWS),
    "weight_norm": (lambda: between(parametrizations.weight_norm(nn.Linear(D, D))), ROWS),
    "frozen": (lambda: between(nn.Linear(D, D).requires_grad_(False)), ROWS),
    "words": (lambda: nn.Sequential(nn.Embedding(30, D), nn.LayerNorm(D)), torch.randint(30, (8, 6))),
    "sparse words": (lambda: nn.Sequential(nn.Embedding(30, D, sparse=True), nn.LayerNorm(D)), torch.randint(30, (1, 6))),
    "BatchNorm, accepted": (lambda: images(nn.BatchNorm2d(8), nn.ReLU(inplace=True)), IMAGES),
    "BatchNorm without statistics, accepted": (lambda: images(nn.BatchNorm2d(8, track_running_stats=False)), IMAGES),
    "BatchNorm, frozen": (lambda: images(nn.BatchNorm2d(8).eval()), IMAGES),
    "norms of one sample": (lambda: images(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)), IMAGES),
    "ConvNeXt": (lambda: images(ConvNext(), ConvNext()), IMAGES),
    "EfficientNet": (lambda: images(Squeeze(), nn.Dropout2d(0.2)), IMAGES),
    "Mixer": (lambda: between(Mixer()), WORDS),
    "float64": (lambda: between(nn.LayerNorm(D)).double(), ROWS.double()),
    "bfloat16": (lambda: between(nn.LayerNorm(D)).bfloat16(), ROWS.bfloat16()),
}
