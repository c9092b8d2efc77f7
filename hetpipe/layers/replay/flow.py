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


class ByStorage(TorchDispatchMode):
    """Keeps a mark for each storage, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks = dict[int, Any]()
        self._alive = list[Any]()  # storages, whose addresses no others get

    def mark(self, tensor: Tensor) -> Any:
        """The mark of a tensor's storage; None where it has none."""
        return self._marks.get(int(tensor.untyped_storage()._cdata))

    def put(self, tensor: Tensor, mark: object) -> None:
        """Give its storage a mark."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._marks[int(storage._cdata)] = mark


class Flow(ByStorage):
    """While it is entered, it knows of what each tensor is computed."""

    def begins(self, tensor: Tensor, source: object) -> None:
        """The tensor is a source itself, whatever it was computed of."""
        self.put(tensor, frozenset([source]))

    def sources(self, values: Iterable[Any]) -> Sources:
        """Of all tensors in nested values."""
        return NONE.union(*(self.mark(tensor) or NONE for tensor in tensors_in(tuple(values))))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = self.sources([args, kwargs])
        output = func(*args, **kwargs)
        if sources:
            for tensor in tensors_in((output, written_by(func, args, kwargs))):
                self.put(tensor, sources | (self.mark(tensor) or NONE))
        return output
