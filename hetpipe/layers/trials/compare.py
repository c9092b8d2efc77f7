"""Numbers of a few rows together, beside those of the same rows apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hetpipe.layers.numbers import without_autocast

EXACT = 1e-9  # by which numbers of float64 may differ, of the largest
ALIKE = 1e-12  # by which they may differ before it, for that
FEW_NUMBERS = 0.01  # of all numbers: where so few are off, rounding may have decided (which expert a word goes to)
LAYER_ROUNDING = 64  # units of the last place that layers' rounding parts numbers by which began alike, on average
MEAN_TOLERANCE = 0.1  # how far apart, of a mean number, what is known to be rounding may be on average
MOST_SORTED = 1 << 24  # numbers of a tensor whose rows are nobody knows where


class Difference(NamedTuple):
    """The greatest distance, of the largest number; and which share of all numbers is farther apart than rounding explains."""

    greatest: float = 0.0
    share: float = 0.0

    def __or__(self, other: Difference) -> Difference:
        return Difference(max(self.greatest, other.greatest), max(self.share, other.share))


NONE = Difference()


def tolerance(base: float, tensors: Sequence[Tensor], *, exact: bool = False) -> float:
    """`base`, or what numbers of so few bits may differ by, also where autocast computes with such. Less than `base` for those of
    float64 on the way to which none had fewer bits (`exact`)."""
    types = {t.dtype for t in tensors if t.is_floating_point()}
    base = EXACT if exact and types == {torch.float64} else base
    types |= {torch.get_autocast_dtype(t.device.type) for t in tensors if torch.is_autocast_enabled(t.device.type)}
    return max(base, *(4 * torch.finfo(dtype).eps for dtype in types), 0.0)


def of_rows(whole: Tensor, parts: Sequence[Tensor], rows: Sequence[int], most: float) -> Difference:
    """Of what rows are together and what the parts are, of so many `rows` each. A tensor that does not grow with the rows must be
    the parts' mean, as a mean over samples is. Of tensors that cannot be compared: none. (Autocast would join no tensors of the
    other half precision.)"""
    with without_autocast(whole.device):
        return _of_rows(whole, parts, rows, most)


def _of_rows(whole: Tensor, parts: Sequence[Tensor], rows: Sequence[int], most: float) -> Difference:
    if all(part.shape == whole.shape for part in parts):
        if whole.is_floating_point() or whole.is_complex():
            parts = [torch.stack([n * p.to(_wide(p)) for n, p in zip(rows, parts, strict=True)]).sum(0) / sum(rows)]
        return max((_of(whole, part, most) for part in parts), default=NONE)
    if (grows := growing(whole, parts)) is not None:
        found = _of(whole, torch.cat(list(parts), grows), most)
        if found.share == 0 or whole.numel() > MOST_SORTED:
            return found
    if sum(p.numel() for p in parts) != whole.numel() or whole.numel() > MOST_SORTED:
        return NONE
    both = [t.reshape(-1).to(_wide(t)) for t in (whole, torch.cat([p.reshape(-1) for p in parts]))]
    a, b = (torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in both)
    return _of(a.sort().values, b.sort().values, most)


def growing(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The one dimension in which the parts together are as large as the whole, if they differ in no other."""
    if any(part.ndim != whole.ndim for part in parts):
        return None
    found = [d for d in range(whole.ndim) if any(part.shape[d] != whole.shape[d] for part in parts)]
    return found[0] if len(found) == 1 and sum(p.shape[found[0]] for p in parts) == whole.shape[found[0]] else None


def lie_in(whole: Tensor, parts: Sequence[Tensor], most: float | None = None) -> bool:
    """Whether the parts, one behind the other, are the whole but for rounding: on average numbers are no farther apart than
    `most`, of a mean number; None: than layers leave them that round what began alike."""
    grows = growing(whole, parts)
    if grows is None:
        return False
    if most is None:
        wide = whole.dtype in (torch.float32, torch.float64)
        most = tolerance(LAYER_ROUNDING * torch.finfo(whole.dtype).eps if wide else 0.0, [whole])
    with without_autocast(whole.device):
        own, other = (t.detach().to(_wide(t)) for t in (whole, torch.cat(list(parts), grows)))
    return own.numel() == 0 or float((own - other).abs().mean()) <= most * float(own.abs().mean())


def of_sums(whole: Sequence[Tensor | None], parts: Sequence[Sequence[Tensor | None]], most: float) -> Difference:
    """Of gradients of all rows, and of the sums of the parts'. Those of a parameter whose gradients are but rounding, of a bias
    before a norm for instance, are measured by the largest of all."""
    found = [g for g in whole if g is not None]
    least = 0.01 * max((float(g.abs().max()) for g in found if g.numel()), default=0.0)
    result = NONE
    for own, *others in zip(whole, *parts, strict=True):
        made = [g.to(_wide(g)) for g in others if g is not None]
        like = next((g for g in (own, *made) if g is not None), None)
        if like is not None and like.numel():
            zero = torch.zeros_like(like, dtype=_wide(like))
            result |= _of(zero if own is None else own, sum(made, zero), most, least)
    return result


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _of(a: Tensor, b: Tensor, most: float, least: float = 0.0) -> Difference:
    """Of two tensors of one shape. What is no number in both is alike."""
    if a.numel() == 0:
        return NONE
    a, b = a.detach().to(_wide(a)), b.detach().to(_wide(b))
    greatest, scale = float((a - b).abs().max()), max(float(a.abs().max()), least)
    if scale > 0 and math.isfinite(scale) and greatest <= most * scale:
        return Difference(greatest / scale)
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    known = a.abs()[a.isfinite()]
    scale = max(float(known.max()) if known.numel() else 0.0, least)
    if scale == 0:
        return Difference(float(off.max() > 0), float((off > 0).double().mean()))
    return Difference(float(off.max()) / scale, float((off > most * scale).double().mean()))
