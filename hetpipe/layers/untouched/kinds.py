"""Layers of one kind compute the same, each with its own numbers: what is found out of one of them holds for all.

They have modules of the same types, with tensors of the same shapes, and their forwards call the same functions of torch, with
tensors of the same shapes and types. What is not compared: the numbers in tensors, and those that a function is given beside
them, which are only told apart where they are zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, str, type(None), torch.dtype, torch.layout)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Kinds:
    """The kinds of a chain's layers. `first`: for each layer the first one of its kind. `steady`: the layers that give what they
    are given, as far as shapes and types go, so that the next of their kind may be given the same."""

    first: tuple[int, ...]
    steady: frozenset[int]

    @classmethod
    def of(cls, layers: Sequence[Hashable], steady: Sequence[bool]) -> Kinds:
        """The kinds of layers that these tell apart."""
        found = dict[Hashable, int]()
        first = tuple(found.setdefault(layer, index) for index, layer in enumerate(layers))
        return cls(first, frozenset(index for index, same in enumerate(steady) if same))

    @property
    def measured(self) -> tuple[int, ...]:
        """The layers that are to be measured: of a kind the first, the one in the middle and the last; and all layers that do
        not give what they are given."""
        chosen = {index for index in range(len(self.first)) if index not in self.steady}
        for members in self._members().values():
            chosen |= {members[0], members[len(members) // 2], members[-1]}
        return tuple(sorted(chosen))

    def spread(self, found: Mapping[int, float]) -> list[float]:
        """For each layer the median of what was found of those of its kind."""
        medians = {first: statistics.median(found[member] for member in members if member in found)
                   for first, members in self._members().items()}  # fmt: skip
        return [medians[first] for first in self.first]

    def _members(self) -> dict[int, list[int]]:
        members = dict[int, list[int]]()
        for index, first in enumerate(self.first):
            members.setdefault(first, []).append(index)
        return members


def likeness(value: Any) -> Hashable:
    """What a function is given, without the numbers that may differ from layer to layer."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(map(likeness, value))
    if isinstance(value, dict):
        return tuple((name, likeness(item)) for name, item in value.items())
    if isinstance(value, slice):
        return likeness((value.start, value.stop, value.step))
    if isinstance(value, _PLAIN):
        return value
    return type(value), value == 0 if isinstance(value, float) else None


def structure(layer: nn.Module) -> Hashable:
    """The types of a layer's modules, the shapes and types of their tensors, and the hooks that they have."""
    return tuple(
        (name, type(module), module.training, _shapes(module._parameters), _shapes(module._buffers),
         tuple(id(hook) for kind in _HOOKS for hook in getattr(module, kind).values()))
        for name, module in layer.named_modules()
    )  # fmt: skip


def _shapes(tensors: Mapping[str, Tensor | None]) -> Hashable:
    return tuple((name, likeness(tensor)) for name, tensor in tensors.items())
