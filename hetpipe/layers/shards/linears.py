"""Linear layers of which each device of a group has a part. A module becomes one by getting its class, and remains itself under
its names: what holds it sees no other."""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.shards.styles import COLUMN, GATHER, ROW, TAKE
from hetpipe.layers.shards.sums import Group

GROUP = "_hetpipe_group"  # the attribute of a split module


class ColumnLinear(nn.Linear):
    """Makes some of the outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs / degree]."""
        return super().forward(group_of(self).copied(input))


class GatheredLinear(ColumnLinear):
    """Makes some of the outputs, and gets the others."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs]."""
        return group_of(self).joined(super().forward(input))


class RowLinear(nn.Linear):
    """Takes some of the inputs; what the devices make of theirs is added up, and then the bias is added."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs / degree] to […, outputs]."""
        total = group_of(self).summed(_product(self, input))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class TakingLinear(RowLinear):
    """Takes some of the inputs, which are all there."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs]."""
        return super().forward(group_of(self).taken(input))


CLASSES: dict[str, type[nn.Linear]] = {COLUMN: ColumnLinear, GATHER: GatheredLinear, ROW: RowLinear, TAKE: TakingLinear}


@cache
def split_class(kind: type[nn.Linear], style: str) -> type[nn.Linear]:
    """The class of a linear layer of this class that is split in this style."""
    own = CLASSES[style]
    return own if kind is nn.Linear else type(f"{own.__name__} of {kind.__name__}", (own, kind), {})


def _product(linear: nn.Linear, input: Tensor) -> Tensor:
    """What it makes before the bias is added."""
    return linear.product(input) if isinstance(linear, QuantisedLinear) else F.linear(input, linear.weight)


def group_of(module: nn.Module) -> Group:
    """The devices that have its parts."""
    found: Group = vars(module)[GROUP]
    return found
