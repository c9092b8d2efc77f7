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

    def shard_shape(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of each of so many shards of a tensor of this shape."""
        return tuple(n // count if at == self.dimension else n for at, n in enumerate(shape))

    def piece(self, tensor: Tensor, number: int, count: int) -> Tensor:
        """Piece `number` of so many, as a view in which packed matrices have a dimension of their own."""
        packed: Tensor = tensor.unflatten(self.dimension, (self.packed, -1))
        size = packed.shape[self.dimension + 1] // count
        return packed.narrow(self.dimension + 1, number * size, size)

    def shard(self, tensor: Tensor, number: int, count: int) -> Tensor:
        """Return this piece with as many dimensions as the tensor has, in memory of its own."""
        piece = self.piece(tensor, number, count).clone(memory_format=torch.contiguous_format)
        return piece.flatten(self.dimension, self.dimension + 1)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The tensor of which these are all shards, in their order."""
        parts = [shard.unflatten(self.dimension, (self.packed, -1)) for shard in shards]
        return torch.cat(parts, self.dimension + 1).flatten(self.dimension, self.dimension + 1)


@dataclass(frozen=True)
class Layout(Fixed):
    """The tensors of a layer, by their names in it: `cut` says how some are cut, and the others are whole on each device. Each
    device makes the whole gradient of a whole parameter; if the parameter is in `partial`, it makes a part, and the sum over the
    devices is the gradient."""

    cut: Mapping[str, Cut] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
