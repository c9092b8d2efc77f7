"""Modules of which each device of a group has a part, or computes one: linear layers, and what takes heads out of a tensor. A
module becomes one by getting its class, and remains itself under its names: what holds it sees no other."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.layers.shards.styles import AHEAD, BEHIND, COLUMN, GATHER, HEADS, ROW, TAKE, Style
from hetpipe.layers.shards.sums import Group

GROUP, STYLE = "_hetpipe_group", "_hetpipe_style"  # attributes of a split module


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


class HeadLinear(nn.Linear):
    """Is whole, and makes the unit of its outputs that the heads of this device share."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs / units]."""
        return F.linear(input, self._own(self.weight), None if self.bias is None else self._own(self.bias))

    def _own(self, whole: Tensor) -> Tensor:
        group, style = _group(self), vars(self)[STYLE]
        own: Tensor = style.cut.piece(whole, group.number * style.units // group.degree, style.units)
        return own.flatten(0, 1)


class CopiedHeadLinear(HeadLinear):
    """As that, of what each device has."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] to […, outputs / units]."""
        return super().forward(_group(self).copied(input))


class OwnHeads(nn.Identity):
    """Takes the heads of this device out of a tensor of all."""

    def forward(self, input: Tensor) -> Tensor:
        """[b, heads, …] to [b, heads / degree, …]."""
        return _group(self).taken(input, 1)


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
        module.__class__ = found
        vars(module).update({GROUP: group, STYLE: style})


def undress(module: nn.Module) -> None:
    """Let it work on whole tensors again."""
    if vars(module).pop(GROUP, None) is not None:
        del vars(module)[STYLE]
        module.__class__ = nn.Linear if isinstance(module, nn.Linear) else nn.Identity


def _group(module: nn.Module) -> Group:
    found: Group = vars(module)[GROUP]
    return found
