"""Linear layers of which each device of a group has a part. A module becomes one by getting its class, and remains itself under
its names: what holds it sees no other."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.layers.shards.styles import COLUMN, GATHER, ROW, TAKE
from hetpipe.layers.shards.sums import Group

GROUP = "_hetpipe_group"  # the attribute of a split module


class ColumnLinear(nn.Linear):
    """Makes some of the outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs / degree]."""
        return super().forward(_group(self).copied(input))


class GatheredLinear(ColumnLinear):
    """Makes some of the outputs, and gets the others."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs]."""
        return _group(self).joined(super().forward(input))


class RowLinear(nn.Linear):
    """Takes some of the inputs; what the devices make of theirs is added up, and then the bias is added."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs / degree] to […, outputs]."""
        total = _group(self).summed(F.linear(input, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class TakingLinear(RowLinear):
    """Takes some of the inputs, which are all there."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs]."""
        return super().forward(_group(self).taken(input))


CLASSES: dict[str, type[nn.Linear]] = {COLUMN: ColumnLinear, GATHER: GatheredLinear, ROW: RowLinear, TAKE: TakingLinear}


def _group(module: nn.Module) -> Group:
    found: Group = vars(module)[GROUP]
    return found
