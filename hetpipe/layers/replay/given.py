"""What a model is called with, as tensors that have a row for each sample: what a chain takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetpipe.files.messages import InputError, shown
from hetpipe.layers.untouched.kept import Fixed


class _Leaf(NamedTuple):
    """One value: a tensor with a row for each sample (`is_tensor`), or another value that is the same in all calls. `alone`: a
    tensor without samples, which is the same for all of them. `listed`: the model takes a list, with an entry for each sample."""

    is_tensor: bool
    plain: Any = None
    alone: bool = False
    listed: bool = False


class Given(Fixed):
    """How a model is called: with these arguments by name, of which `tensors` are taken, in this order, by the chain."""

    def __init__(self, inputs: Mapping[str, Any], samples: int, alone: Sequence[str]) -> None:
        """`inputs`: of so many samples; `alone`: names of tensors that have no samples, though their first dimension may be as
        long. InputError where a list has entries of several shapes."""
        self.names = tuple(inputs)
        self.leaves, self.specs, self.labels = list[_Leaf](), list[TreeSpec](), list[str]()
        for name, value in inputs.items():
            flat, spec = tree_flatten(value, is_leaf=lambda each: isinstance(each, list) and len(each) == samples)
            self.specs.append(spec)
            for leaf in flat:
                found = _leaf(name, leaf, samples, alone=name in alone)
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
                    "stay the same in all calls: cut the model again with this one"
                )
        found, samples = list[Tensor](), None
        values = [each for leaf, each in self._flat(inputs) if leaf.is_tensor and not leaf.alone]
        samples = len(values[0])
        for leaf, value in self._flat(inputs):
            if leaf.is_tensor:
                found.append(torch.stack(value) if leaf.listed else value.expand(samples, *value.shape) if leaf.alone else value)
        return tuple(found)

    def arguments(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments of these tensors."""
        left, values, samples = iter(tensors), list[Any](), len(tensors[0])
        for leaf in self.leaves:
            tensor = next(left) if leaf.is_tensor else None
            if tensor is None:
                values.append([leaf.plain] * samples if leaf.listed else leaf.plain)
            else:
                values.append(list(tensor.unbind()) if leaf.listed else tensor[0] if leaf.alone else tensor)
        every, found = iter(values), dict[str, Any]()
        for name, spec in zip(self.names, self.specs, strict=True):
            found[name] = tree_unflatten([next(every) for _ in range(spec.num_leaves)], spec)
        return found

    def _flat(self, inputs: Mapping[str, Any]) -> Iterator[tuple[_Leaf, Any]]:
        leaves = iter(self.leaves)
        for name, spec in zip(self.names, self.specs, strict=True):
            for value in spec.flatten_up_to(inputs[name]):
                yield next(leaves), value


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
