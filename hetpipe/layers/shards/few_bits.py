"""Matrices in few bits (`adapter.base`), cut. The whole matrix is brought into few bits first, so that a shard has, bit by bit,
the numbers that stand in its place on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetpipe.layers.adapters.quantised import BLOCKS, Nf4Linear, QuantisedLinear
from hetpipe.layers.shards.layout import Cut
from hetpipe.layers.untouched.kept import Fixed

DEQUANTISE = "dequantise"  # the method that a shard has in the place of its class's


def parts_cut(held: QuantisedLinear, cut: Cut) -> dict[str, Cut]:
    """How parts of a whole matrix are cut where the matrix is cut so; the others are whole on each device."""
    # Row after row: cut by its outputs, a matrix stays in one piece, and cut by its inputs each row is a matrix of its own
    flat = Cut(0, cut.packed if cut.dimension == 0 else held.out_features)
    ways = {"matrix": cut, "rows": cut if cut.dimension == 0 else None, "flat": flat}
    found = {part: ways[lies] for part, lies in held.LIE.items()}
    return {part: way for part, way in found.items() if way is not None}


def parted(held: QuantisedLinear, cut: Cut, degree: int) -> int | None:
    """How many numbers would lie together in a shard of a whole matrix, where these are no whole blocks; None where they are."""
    rows, columns = held.out_features, held.in_features
    numbers = columns // degree if cut.dimension else rows // (cut.packed * degree) * columns
    return numbers if numbers % held.TOGETHER else None


@dataclass(frozen=True)
class Nf4Shard(Fixed):
    """Makes the numbers of the shard `number` of so many. A shard's blocks lie anywhere among the whole matrix's, so that each
    looks for its scale's scale, which all devices have."""

    cut: Cut
    number: int
    degree: int

    def __call__(self, parts: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The matrix of these parts, [out, in], as `Nf4Linear.dequantise` makes the whole one."""
        codes, scales, above, mean, steps = parts
        every = torch.arange(scales.numel() * self.degree, device=scales.device)
        own = self.cut.shard(every, self.number, self.degree) // BLOCKS
        return Nf4Linear.numbers(codes, steps[scales.long()] * above[own] + mean, shape, dtype)


def become_shard(held: QuantisedLinear, cut: Cut, number: int, degree: int) -> None:
    """Let a layer, whose size is the whole one's until now, make numbers of the parts that a shard has."""
    if isinstance(held, Nf4Linear):
        vars(held)[DEQUANTISE] = Nf4Shard(parts_cut(held, cut)["scales"], number, degree)


def become_whole(held: QuantisedLinear) -> None:
    """Let it make numbers of the parts of the whole matrix."""
    vars(held).pop(DEQUANTISE, None)
