"""What a model is called with, as tensors that have a row for each sample: what a chain takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.layers.untouched.kept import Fixed


class _Leaf(NamedTuple):
    """One value: what goes through the chain as a tensor with a row for each sample (`is_tensor`), or another value that is the
    same in all calls (`plain`). `alone`: a tensor without samples, which is the same for all of them. `listed`: the model takes a
    list, with an entry for each sample. `sized`: a whole number, which goes as the shape [b, 0, number] of an empty tensor."""

    is_tensor: bool
    plain: Any = None
    alone: bool = False
    listed: bool = False
    sized: bool = False

    def tensor(self, value: Any, samples: int) -> Tensor:
        """What goes through the chain."""
        if self.sized:
            return torch.empty((samples, 0, value), dtype=torch.uint8)
        if self.listed:
            return torch.stack(value)
        return value.expand(samples, *value.shape) if self.alone else value  # type: ignore[no-any-return]

    def value(self, tensor: Tensor) -> Any:
        """What the model is given."""
        if self.sized:
            return tensor.shape[2]
        return list(tensor.unbind()) if self.listed else tensor[0] if self.alone else tensor


class Given(Fixed):
    """How a model is called: with these arguments by name, of which `tensors` are taken, in this order, by the chain. `labels`:
    the arguments that they are of."""

    def __init__(self, inputs: Mapping[str, Any], samples: int, alone: Sequence[str] = (), sizes: Sequence[str] = ()) -> None:
        """`inputs`: of so many samples; `alone`: names of tensors that have no samples, though their first dimension may be as
        long; `sizes`: names of values that hold whole numbers which may be others in another call. InputError where a list has
        entries of several shapes."""
        self.names = tuple(inputs)
        self.leaves, self.specs, self.labels = list[_Leaf](), list[TreeSpec](), list[str]()
        if strange := sorted({*alone, *sizes} - {*inputs}):
            raise InputError(f"there is no argument {strange[0]!r}{nearest(strange[0], self.names)}")
        for name, value in inputs.items():
            whole = None if name in sizes else lambda each: isinstance(each, list) and len(each) == samples
            flat, spec = tree_flatten(value, is_leaf=whole)
            self.specs.append(spec)
            for leaf in flat:
                found = _size(name, leaf) if name in sizes else _leaf(name, leaf, samples, alone=name in alone)
                self.leaves.append(found)
                if found.is_tensor:
                    self.labels.append(name)

    def tensors(self, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Make the chain's tensors [samples, …] of such arguments. InputError for others than the model was cut with, and for
        values that are no tensors and differ from those."""
        if strange := sorted({*inputs} ^ {*self.names}):
            has = "is given, and was not" if strange[0] in inputs else "is missing, and was given"
            raise InputError(f"{strange[0]} {has} when the model was cut: call hetpipe.chain with the same arguments")
        for leaf, value in self._flat(inputs):
            own = [leaf.plain] * len(value) if leaf.listed and isinstance(value, list) else leaf.plain
            if not leaf.is_tensor and value != own:
                raise InputError(
                    f"an argument is {shown(value)}, and was {shown(own)} when the model was cut; values that are no tensors "
                    "stay the same in all calls: cut the model again with this one, or name it in sizes=[…], if it holds whole "
                    "numbers"
                )
        flat = [(leaf, value) for leaf, value in self._flat(inputs) if leaf.is_tensor]
        samples = next(len(value) for leaf, value in flat if not (leaf.alone or leaf.sized))
        return tuple(leaf.tensor(value, samples) for leaf, value in flat)

    def arguments(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments of these tensors."""
        left, values, samples = iter(tensors), list[Any](), len(tensors[0])
        for leaf in self.leaves:
            if leaf.is_tensor:
                values.append(leaf.value(next(left)))
            else:
                values.append([leaf.plain] * samples if leaf.listed else leaf.plain)
        every, found = iter(values), dict[str, Any]()
        for name, spec in zip(self.names, self.specs, strict=True):
            found[name] = tree_unflatten([next(every) for _ in range(spec.num_leaves)], spec)
        return found

    def _flat(self, inputs: Mapping[str, Any]) -> Iterator[tuple[_Leaf, Any]]:
        leaves = iter(self.leaves)
        for name, spec in zip(self.names, self.specs, strict=True):
            for value in spec.flatten_up_to(inputs[name]):
                yield next(leaves), value


def _size(name: str, value: Any) -> _Leaf:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name} is to hold whole numbers, and holds {shown(value)}")
    return _Leaf(is_tensor=True, sized=True)


def _leaf(name: str, value: Any, samples: int, *, alone: bool) -> _Leaf:
    if isinstance(value, Tensor):
        return _Leaf(is_tensor=True, alone=alone or not value.ndim or len(value) != samples)
    if not isinstance(value, list):
        return _Leaf(is_tensor=False, plain=value)
    if all(isinstance(each, Tensor) for each in value):
        if len({each.shape for each in value}) > 1:
            raise InputError(f"{name} is a list of tensors of several shapes, and samples of one batch must be alike")
        return _Leaf(is_tensor=True, listed=True)
    if any(each != value[0] for each in value):
        raise InputError(f"{name} is a list, {shown(value)}, whose entries differ from sample to sample: give tensors instead")
    return _Leaf(is_tensor=False, listed=True, plain=value[0])
