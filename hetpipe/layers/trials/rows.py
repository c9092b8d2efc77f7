"""The rows that layers are tried on: a few of a batch, together and in two parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.layers.model import Tensors, alongside, as_tuple, batch_size
from hetpipe.layers.numbers import without_autocast
from hetpipe.layers.transforms import uncompiled
from hetpipe.layers.trials.compare import growing, lie_in

ROWS = 4  # that a model is tried on, at most


class TrialRows(NamedTuple):
    """The tensors at one place of the chain: of all rows together, and of two parts of them, of so many `rows` each."""

    whole: tuple[Tensor, ...]
    parts: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    rows: tuple[int, int]

    def double(self) -> TrialRows:
        """These numbers in float64."""
        return self.each(lambda t: t.double() if t.is_floating_point() else t)

    def to(self, device: torch.device) -> TrialRows:
        """These numbers on a device."""
        return self.each(lambda t: t.to(device))

    def cut_anew(self) -> TrialRows:
        """Return these rows with parts that are cut from the whole, as they lie in it."""
        parts = []
        for whole, first, second in zip(self.whole, *self.parts, strict=True):
            d = growing(whole, (first, second))
            sizes = None if d is None else [first.shape[d], second.shape[d]]
            cut = (whole, whole) if d is None or sizes is None else torch.split(whole.detach(), sizes, d)
            anew = [t.detach().requires_grad_(whole.requires_grad) for t in cut]
            parts.append([alongside(new, old) for new, old in zip(anew, (first, second), strict=True)])
        return TrialRows(self.whole, (tuple(first for first, _ in parts), tuple(second for _, second in parts)), self.rows)

    def without_rounding(self, most: float | None = None) -> TrialRows:
        """Return these rows with parts of the whole where these are but for rounding (see `lie_in`): both begin alike."""
        own, cut = (list(zip(*rows.parts, strict=True)) for rows in (self, self.cut_anew()))
        parts = [b if lie_in(whole, a, most) else a for whole, a, b in zip(self.whole, own, cut, strict=True)]
        return TrialRows(self.whole, (tuple(first for first, _ in parts), tuple(second for _, second in parts)), self.rows)

    def each(self, change: Callable[[Tensor], Tensor]) -> TrialRows:
        """Other tensors in the places of these."""

        def other(tensor: Tensor) -> Tensor:
            return alongside(change(tensor.detach()).requires_grad_(tensor.requires_grad), tensor)

        whole, first, second = (tuple(map(other, tensors)) for tensors in (self.whole, *self.parts))
        return TrialRows(whole, (first, second), self.rows)


def rows_to_try(inputs: Tensors, first: nn.Module | None = None) -> tuple[Tensor, ...]:
    """A few rows of a batch of the model's inputs, no two alike: where they are, or there is one, others are made by turning.
    `first`: the layer that takes them, which may have inputs whose rows are all the same (`shared_inputs`, by number)."""
    shared = getattr(uncompiled(first), "shared_inputs", ()) if first is not None else ()
    rows = min(ROWS, batch_size(inputs))
    taken = tuple(t[:rows].detach() for t in as_tuple(inputs))
    flat = taken[0].reshape(rows, -1)
    if rows == 1 or bool((flat == flat[:1]).all()):
        with without_autocast(taken[0].device):
            turns = [t.ndim > 1 and number not in shared for number, t in enumerate(taken)]
            every = range(max(2, rows))
            return tuple(
                torch.cat([t[:1].roll(k, 1) if turn else t[:1] for k in every]) for t, turn in zip(taken, turns, strict=True)
            )
    return taken


def sizes_to_try(samples: int) -> tuple[int, int, int]:
    """Return how many rows the whole has, and each of its two parts, where there are so many samples."""
    rows = max(2, min(ROWS, samples))
    return rows, rows // 2, rows - rows // 2


def cut_to_try(inputs: Tensors, first: nn.Module | None = None) -> TrialRows:
    """A few rows of a batch of the model's inputs, together and in two parts. `first`: see `rows_to_try`."""
    rows = rows_to_try(inputs, first)
    _, middle, rest = sizes_to_try(len(rows[0]))
    return TrialRows(rows, (tuple(t[:middle] for t in rows), tuple(t[middle:] for t in rows)), (middle, rest))
