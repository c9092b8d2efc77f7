"""Of what each tensor of a forward is computed.

Followed are storages: a view, or what is written into, has the sources of all of them. Numbers of Python that were a tensor's
values are not followed: a forward that is looked at runs on tensors without values, which have none to give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Sources = frozenset[Any]
NONE: Sources = frozenset()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries, in their order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into, of those that it is called with."""
    arguments = func._schema.arguments
    values = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **kwargs}
    return tensors_in([values.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])


class Flow(TorchDispatchMode):
    """While it is entered, it knows of what each tensor is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = dict[int, Sources]()
        self._alive = list[Any]()  # storages, whose addresses no others get

    def begins(self, tensor: Tensor, source: object) -> None:
        """The tensor is a source itself, whatever it was computed of."""
        self._put(tensor, frozenset([source]))

    def sources(self, values: Iterable[Any]) -> Sources:
        """Of all tensors in nested values."""
        found = (self._of.get(self._key(tensor), NONE) for tensor in tensors_in(tuple(values)))
        return NONE.union(*found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = self.sources([args, kwargs])
        output = func(*args, **kwargs)
        if sources:
            for tensor in tensors_in((output, written_by(func, args, kwargs))):
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
