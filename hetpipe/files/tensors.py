"""Tensors of safetensors files, one after the other. Only those that are read are ever in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetpipe.files.messages import InputError, cut, shown

if TYPE_CHECKING:
    from hashlib import _Hash

PIECE_BYTES = 1 << 25
END_NUMBERS = 16  # numbers at each end of a tensor, by which it is told from others


class TensorFiles:
    """Tensors in safetensors files. Only those that are read are ever in memory."""

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        self._file_of = dict(file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, copied a piece at a time, since the pages of a file that is open count as this process's memory."""
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as content:
                whole = content.get_slice(name)
                shape = whole.get_shape()
                first: Tensor = (whole[:1] if shape else whole[...]).clone()
            if not shape:
                return first
            result = torch.empty(shape, dtype=first.dtype)
            rows = max(1, PIECE_BYTES // max(1, first.numel() * first.element_size()))
            for at in range(0, shape[0], rows):
                with safe_open(file, framework="pt") as content:
                    result[at : at + rows] = content.get_slice(name)[at : at + rows]
        except (SafetensorError, OSError) as error:
            raise InputError(cut(f"cannot read {shown(name)} from {file}: {error}")) from error
        return result

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor."""
        found = dict[str, tuple[int, ...]]()
        for file in dict.fromkeys(self._file_of.values()):
            with safe_open(file, framework="pt") as content:
                found |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys() if name in self}  # noqa: SIM118
        return {name: found[name] for name in self}

    def type_of(self, name: str) -> torch.dtype:
        """In which number type a tensor is."""
        with safe_open(self._file_of[name], framework="pt") as content:
            part = content.get_slice(name)
            return part[_corners(part.get_shape())[0]].dtype  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Of all names, types, shapes, and a few numbers of each tensor; nothing else is read."""
        found = hashlib.sha256()
        for name, file in sorted(self._file_of.items()):
            try:
                with safe_open(file, framework="pt") as content:
                    note_slice(found, name, content.get_slice(name))
            except (SafetensorError, OSError) as error:
                raise InputError(cut(f"cannot read {shown(name)} from {file}: {error}")) from error
        return found.hexdigest()


def _corners(shape: Sequence[int]) -> list[Any]:
    """The first and the last few numbers of a tensor's first and last row."""
    if not shape:
        return [...]
    first = (*[slice(0, 1)] * (len(shape) - 1), slice(0, END_NUMBERS))
    last = (*[slice(max(0, n - 1), n) for n in shape[:-1]], slice(max(0, shape[-1] - END_NUMBERS), shape[-1]))
    return [first, last]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def note_slice(digest: _Hash, name: str, part: Any) -> None:
    """Note a tensor of an open file: its name, type and shape, and a few of its numbers; nothing else is read."""
    shape = part.get_shape()
    digest.update(repr((name, part.get_dtype(), shape)).encode())
    for corner in _corners(shape):
        digest.update(_bytes(part[corner]))


def note_tensor(digest: _Hash, name: str, tensor: Tensor) -> None:
    """The same of a tensor that is in memory, which may be on the meta device."""
    digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
    for corner in [] if tensor.is_meta else _corners(tensor.shape):
        digest.update(_bytes(tensor[corner]))


def names_in(file: Path) -> dict[str, Path]:
    """The tensors of a safetensors file, each with the file."""
    try:
        with safe_open(file, framework="pt") as content:
            return dict.fromkeys(content.keys(), file)
    except (SafetensorError, OSError) as error:
        raise InputError(cut(f"cannot read {file}: {error}")) from error
