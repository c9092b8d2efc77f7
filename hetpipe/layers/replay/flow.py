"""Of what each tensor of a forward is computed, and which of them it looks into.

Followed are storages: a view, or what is written into, has the sources of all of them. Nothing is said of arithmetic on numbers
that are no tensors any more, so a tensor that is looked into is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Sources = frozenset[Any]
NONE: Sources = frozenset()
_AS_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)
_AS_PLAIN = {
    *(Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
}


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries, in their order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Flow(TorchDispatchMode):
    """While it is entered, it knows of what each tensor is computed. `looked_at`: the sources of tensors whose values became
    numbers of Python, on which shapes and branches may depend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looked_at: Sources = NONE
        self._of = dict[int, Sources]()
        self._alive = list[Any]()  # storages, whose addresses no others get
        self._functions = _Functions(self)

    def __enter__(self) -> Flow:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def begins(self, tensor: Tensor, source: object) -> None:
        """The tensor is a source itself, whatever it was computed of."""
        self._put(tensor, frozenset([source]))

    def sources(self, values: Iterable[Any]) -> Sources:
        """Of all tensors in nested values."""
        found = (self._of.get(self._key(tensor), NONE) for tensor in tensors_in(tuple(values)))
        return NONE.union(*found)

    def look_into(self, tensor: Any) -> None:
        """Its values are looked at."""
        self.looked_at |= self.sources([tensor])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = self.sources([args, kwargs])
        if func in _AS_NUMBERS:
            self.looked_at |= sources
        output = func(*args, **kwargs)
        if sources:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in tensors_in((output, written)):
                self._put(tensor, sources | self._of.get(self._key(tensor), NONE))
        return output

    def _put(self, tensor: Tensor, sources: Sources) -> None:
        key = self._key(tensor)
        if key not in self._of:
            self._alive.append(tensor.untyped_storage())
        self._of[key] = sources

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)


class _Functions(TorchFunctionMode):
    """Sees what makes plain values of a tensor without an operation."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_PLAIN:
            self.flow.look_into(args[0])
        return func(*args, **(kwargs or {}))
