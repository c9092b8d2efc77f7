"""Which copies of a layer's parameters autocast keeps, from the first forward of a step to the step's end: found by running the
layer, since a copy that is still there when nothing of the forward is left is in autocast's cache.

torch keeps the copies of float32 leaves that train. What it casts anew in each forward (a frozen parameter, a view of one) is not
kept, and is saved for backward like any other tensor. Source: ATen/autocast_mode.cpp, `cached_cast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Copy(NamedTuple):
    """A parameter, the type of its copy, and where that lies in memory, of how many bytes."""

    parameter: Tensor
    dtype: torch.dtype
    address: int
    size_bytes: int


def kept_copies(layer: nn.Module, forward: Callable[[], object]) -> list[Copy]:
    """The copies that autocast, which has been entered, keeps of the layer's parameters after a forward."""
    torch.clear_autocast_cache()
    own = {id(parameter) for parameter in layer.parameters()}
    with _Casts() as casts:
        forward()
    found = {copy.address: copy for copy, storage in casts.seen if id(copy.parameter) in own and not storage.expired()}
    return list(found.values())


def cast_again(copies: list[Copy]) -> None:
    """The casts that autocast makes in the first forward of a step."""
    for copy in copies:
        copy.parameter.to(copy.dtype)


class _Casts(TorchDispatchMode):
    """Notes what is cast while it is entered. It holds none of the copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Copy, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            storage = result.untyped_storage()
            copy = Copy(args[0], result.dtype, storage.data_ptr(), storage.nbytes())
            self.seen.append((copy, StorageWeakRef(storage)))
        return result
