"""Which tensors come beside tokens, and for which rows of a batch a model of transformers makes a mask because of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hetpipe.layers.model import Tensors, as_tuple


def extras_of(layers: nn.Sequential) -> tuple[str, ...] | None:
    """What a model takes beside tokens, by name; None where its layers do not say so."""
    every = (getattr(layer, "extras", None) for layer in layers)
    return next((own for own in every if isinstance(own, tuple)), None)


def masked_first(inputs: Tensors, names: Sequence[str] | None) -> Tensor:
    """The order of a batch's rows, int64 [b], that puts those first for which a model of transformers makes a mask: whose
    positions begin anew, or in which a mask leaves tokens out. A micro-batch with such a row has a mask for all of its rows, each
    of the square of its length, and a micro-batch without one has none, so it is by such rows that a model must be measured.
    `names`: as in DataSplits."""
    rows, masked = as_tuple(inputs), torch.zeros(len(as_tuple(inputs)[0]), dtype=torch.bool)
    for name, given in zip(names or (), rows, strict=False):
        if name == "position_ids" and given.ndim == 2:
            masked |= (given.diff() != 1).any(1)
        elif name == "attention_mask" and given.ndim == 2:
            masked |= (given == 0).any(1)
    return masked.logical_not().to(torch.int64).argsort(stable=True)
