"""Modules of which each device of a group has a part, or computes one: linear layers, and what takes heads out of a tensor. A
module becomes one by getting its class, and remains itself under its names: what holds it sees no other."""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.shards.layout import Cut
from hetpipe.layers.shards.styles import AHEAD, BEHIND, COLUMN, GATHER, HEADS, ROW, TAKE, Style
from hetpipe.layers.shards.sums import Group

GROUP, STYLE = "_hetpipe_group", "_hetpipe_style"  # attributes of a split module


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


class HeadLinear(nn.Linear):
    """Is whole, and makes the unit of its outputs that the heads of this device share."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs / units]."""
        bias = None if self.bias is None else self.own(self.bias)
        if not isinstance(self, QuantisedLinear):
            return F.linear(input, self.own(self.weight), bias)
        made = self.own(self.product(input), input.ndim - 1)
        return made if bias is None else made + bias.to(made.dtype)

    def own(self, whole: Tensor, dimension: int = 0) -> Tensor:
        """Take this device's unit out of what lies along all outputs in this dimension."""
        group, style = group_of(self), vars(self)[STYLE]
        piece = Cut(dimension, style.packed).piece(whole, group.number * style.units // group.degree, style.units)
        return piece.flatten(dimension, dimension + 1)


class CopiedHeadLinear(HeadLinear):
    """Does the same with an input whose gradient is summed over the devices."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs / units]."""
        return super().forward(group_of(self).copied(input))


class OwnHeads(nn.Identity):
    """Takes the heads of this device out of a tensor of all."""

    def forward(self, input: Tensor) -> Tensor:
        """[b, heads, …] to [b, heads / degree, …]."""
        return group_of(self).taken(input, 1)


CLASSES: dict[str, type[nn.Module]] = {
    COLUMN: ColumnLinear,
    AHEAD: ColumnLinear,
    GATHER: GatheredLinear,
    ROW: RowLinear,
    TAKE: TakingLinear,
    HEADS: OwnHeads,
}
SHARED: dict[str, type[nn.Module]] = {COLUMN: CopiedHeadLinear, BEHIND: HeadLinear}  # if several devices share a unit


def dress(module: nn.Module, style: Style, group: Group) -> None:
    """Let a module work on its shards."""
    found = (SHARED if style.is_shared(group.degree) else CLASSES).get(style.kind)
    if found is not None:
        module.__class__ = _both(found, type(module))  # type: ignore[arg-type]
        vars(module).update({GROUP: group, STYLE: style})


@cache
def _both(split: type[nn.Module], whole: type[nn.Module]) -> type[nn.Module]:
    """The class of a split module that is of this class where it is whole."""
    return split if whole in (nn.Linear, nn.Identity) else type(f"{split.__name__} of {whole.__name__}", (split, whole), {})


def _product(linear: nn.Linear, input: Tensor) -> Tensor:
    """What it makes before the bias is added."""
    return linear.product(input) if isinstance(linear, QuantisedLinear) else F.linear(input, linear.weight)


def group_of(module: nn.Module) -> Group:
    """The devices that have its parts."""
    found: Group = vars(module)[GROUP]
    return found
