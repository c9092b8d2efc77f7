"""Rows of words, for jobs with adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.zoo import LENGTH, WORDS


def words() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """48 samples, and 6 for testing."""
    draw = torch.Generator().manual_seed(8)
    rows = torch.randint(WORDS, (54, LENGTH + 1), generator=draw)
    pairs = [(row[:-1], row[1:]) for row in rows]
    return pairs[:48], pairs[48:]
