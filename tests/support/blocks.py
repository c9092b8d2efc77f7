"""The block of which the tests' small models are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, WORDS, LENGTH = 8, 11, 6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))
