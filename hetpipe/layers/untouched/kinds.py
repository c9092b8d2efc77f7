"""Layers of one kind compute the same, each with its own parameters: what is found out of one of them holds for all.

They have modules of the same types, with the same attributes and tensors of the same shapes; they are given the same, and give
the same; and their forwards call the same functions of torch, with the same arguments and with tensors of the same shapes. Only
the numbers in tensors are not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 8  # of containers in each other
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL = frozenset(vars(nn.Module()))
# Attributes that only say which layer it is, or, as diffusers' processors, who computes what is seen when it runs: those that a
# class names itself, and those of libraries' modules.
NAMES = "only_names"
_NAMES = {"transformers": ("layer_idx", "layer_id"), "diffusers": ("processor", "layer_id", "layer_idx"), "peft": ("kwargs",)}
LINEAGE = "_hetpipe_made"
SPLIT = "_hetpipe_split"


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
        """The layers that are to be measured, and tried before that: see `few`."""
        return self.few()

    def few(self, turn: int = 0) -> tuple[int, ...]:
        """Choose a few layers: the first, the middle and the last one of each kind, and one more by `turn`; and all layers whose
        output differs in shape or type from their input."""
        chosen = {index for index in range(len(self.first)) if index not in self.steady}
        for members in self._members().values():
            chosen |= {members[0], members[len(members) // 2], members[-1], members[turn % len(members)]}
        return tuple(sorted(chosen))

    def spread(self, found: Mapping[int, float]) -> list[float]:
        """For each layer the median of what was found of those of its kind."""
        medians = {
            first: statistics.median(found[member] for member in members if member in found)
            for first, members in self._members().items()
        }
        return [medians[first] for first in self.first]

    def _members(self) -> dict[int, list[int]]:
        members = dict[int, list[int]]()
        for index, first in enumerate(self.first):
            members.setdefault(first, []).append(index)
        return members


class Same:
    """An object that is like itself only."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def no_numbers(_: Tensor) -> Hashable:
    """What is compared of a tensor's numbers where they may differ."""
    return None


def likeness(value: Any, depth: int = 0, numbers: Callable[[Tensor], Hashable] = no_numbers) -> Hashable:
    """What is compared of an argument or an attribute: of a tensor all but its numbers, of which `numbers` says more."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        return tuple(value.shape), value.dtype, value.requires_grad, strides, numbers(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, np.generic):
        return type(value), value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return np.ndarray, value.shape, value.dtype, value.tobytes()
    inner = partial(likeness, depth=depth + 1, numbers=numbers)
    if depth > DEPTH:
        return Same(value)
    own: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    if own is dict:  # containers are read as Python's own are: the methods of somebody's class may refuse
        return type(value), *((inner(name), inner(item)) for name, item in own.items(value))
    if own is not None:
        items = map(inner, own.__iter__(value))
        return type(value), frozenset(items) if own in (set, frozenset) else tuple(items)
    if isinstance(value, slice):
        return slice, inner(value.start), inner(value.stop), inner(value.step)
    if isinstance(value, partial):
        return partial, inner(value.func), inner(value.args), inner(value.keywords)
    return Same(value)


def structure(layer: nn.Module, numbers: Callable[[Tensor], Hashable] = no_numbers) -> Hashable:
    """A layer's modules, by their names: types, attributes, tensors and hooks."""
    return tuple((name, type(module), module.training, _attributes(module, numbers)) for name, module in layer.named_modules())


def _attributes(module: nn.Module, numbers: Callable[[Tensor], Hashable]) -> Hashable:
    kind = type(module)
    names = {LINEAGE, SPLIT, *getattr(kind, NAMES, ()), *_NAMES.get(kind.__module__.partition(".")[0].partition("_")[0], ())}
    own = {name: value for name, value in vars(module).items() if name not in _OF_ALL and name not in names}
    hooks = [list(getattr(module, kind).values()) for kind in _HOOKS]
    return likeness((own, module._parameters, module._buffers, hooks), numbers=numbers)


def circumstances() -> Hashable:
    """What functions depend on beside their arguments: autocast, and whether gradients are made."""
    cast = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), *cast)
