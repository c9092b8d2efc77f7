"""The layout of a layer that is split over a group of devices: which of its tensors are cut, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hetpipe.layers.untouched.kept import Fixed


class Cut(NamedTuple):
    """A tensor is cut into equal pieces along a dimension. `packed`: how many matrices stand one behind the other in this
    dimension (a layer that makes queries, keys and values by one product: 3), each of which is cut."""

    dimension: int
    packed: int = 1

    def divides(self, shape: Sequence[int], count: int) -> bool:
        """Whether a tensor of this shape has so many equal pieces."""
        return shape[self.dimension] % (self.packed * count) == 0

    def whole_shape(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of a tensor one of whose so many shards has this one."""
        return tuple(n * count if at == self.dimension else n for at, n in enumerate(shape))

    def piece(self, tensor: Tensor, number: int, count: int) -> Tensor:
        """Piece `number` of so many, as a view in which packed matrices have a dimension of their own."""
        packed: Tensor = tensor.unflatten(self.dimension, (self.packed, -1))
        size = packed.shape[self.dimension + 1] // count
        return packed.narrow(self.dimension + 1, number * size, size)

    def shard(self, tensor: Tensor, number: int, count: int) -> Tensor:
        """The same piece with the dimensions of the tensor, in memory of its own."""
        piece = self.piece(tensor, number, count).clone(memory_format=torch.contiguous_format)
        return piece.flatten(self.dimension, self.dimension + 1)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The tensor of which these are all shards, in their order."""
        parts = [shard.unflatten(self.dimension, (self.packed, -1)) for shard in shards]
        return torch.cat(parts, self.dimension + 1).flatten(self.dimension, self.dimension + 1)


@dataclass(frozen=True)
class Layout(Fixed):
    """Of the tensors of a layer, by their names in it: how those are `cut` that are; the others are whole on each device. Of a
    whole parameter each device makes the whole gradient, or, if it is in `partial`, a part, of which the sum is the gradient."""

    cut: Mapping[str, Cut] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
