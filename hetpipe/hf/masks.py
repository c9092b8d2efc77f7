"""Masks of padding, and the other tensors that travel beside the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hetpipe.layers.model import Tensors, as_value

_EXPANDED = "_hetpipe_expanded"


def expand(mask: Tensor | None, kind: str, make: Callable[[Tensor | None], Any]) -> tuple[Tensor | None, Tensor | None]:
    """(the mask as attention wants it, the mask to hand on), `make`ing the first from the [b, t] mask once for consecutive
    layers of a stage: it is kept on a view of the mask, so that what arrives from another stage is always expanded anew."""
    if mask is None:
        return make(None), None
    kept: dict[str, Tensor | None] | None = getattr(mask, _EXPANDED, None)
    if kept is None:
        mask, kept = mask.view_as(mask), {}
        setattr(mask, _EXPANDED, kept)
    if kind not in kept:
        kept[kind] = make(mask)
    return kept[kind], mask


def hand_on(*items: Tensor | None) -> Tensors:
    """What a layer returns: without the tensors that are not there."""
    return as_value([item for item in items if item is not None])


def as_mask(mask: Tensor | None) -> Tensor | None:
    """A mask of 0 and 1 as booleans, which are what crosses between devices."""
    return mask.bool() if mask is not None else None
