"""What each tensor of a forward is, without its values: two tensors of one name are computed by the same operations of the same
tensors, in the same order, so that all their bits are the same.

This is value numbering (Cocke and Schwartz 1970, Programming Languages and Their Compilers) of storages. A view has the name of
its storage and its place in it; what is written into a storage gives it another name; a copy of a whole storage has its name.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from hetpipe.layers.replay.flow import ByStorage, tensors_in, written_by


class Numbered(ByStorage):
    """While it is entered, it knows the name of each tensor. Numbers that are drawn are named by their turn, too: two draws are
    never alike."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = 0

    def begins(self, tensor: Tensor, name: object) -> None:
        """Give a tensor, and all that is a view of it, a name."""
        self.put(tensor, _short(repr(name)))

    def name(self, tensor: Tensor) -> str:
        """The name of a tensor: of its storage, its place in it, and its type."""
        if self.mark(tensor) is None:
            self.put(tensor, _contents(tensor))
        place = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)
        return f"{self.mark(tensor)} {place}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with_names = tree_map(lambda leaf: self.name(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        output = func(*args, **kwargs)
        if func is torch.ops.aten.clone.default and _is_whole(args[0]) and output.stride() == args[0].stride():
            self.put(output, self.mark(args[0]))
            return output
        called = f"{func} {with_names}"
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws += 1
            called += f" draw {self._draws}"
        known = {int(tensor.untyped_storage()._cdata) for tensor in tensors_in((args, kwargs))}
        for number, tensor in enumerate(tensors_in(output)):
            if int(tensor.untyped_storage()._cdata) not in known:
                self.put(tensor, _short(f"{called} {number}"))
        for number, tensor in enumerate(written_by(func, args, kwargs)):
            self.put(tensor, _short(f"{called} into {number}"))
        return output


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is all of its storage."""
    return tensor.storage_offset() == 0 and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _contents(tensor: Tensor) -> str:
    """Return a digest of a storage that was there before, or, where it has no bytes to look at, its address."""
    storage = tensor.untyped_storage()
    if isinstance(tensor, FakeTensor) or storage.device.type != "cpu":
        return f"at {storage._cdata}"
    held = ctypes.string_at(storage.data_ptr(), storage.nbytes())  # no operation, which would give a tensor without values here
    return hashlib.blake2b(held, digest_size=16).hexdigest()


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
