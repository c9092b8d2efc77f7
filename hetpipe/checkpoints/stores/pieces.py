"""Tensors of safetensors files, one after the other. Only those that are read are ever in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetpipe.files.messages import InputError, cut, shown

PIECE_BYTES = 1 << 25


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


def names_in(file: Path) -> dict[str, Path]:
    """The tensors of a safetensors file, each with the file."""
    try:
        with safe_open(file, framework="pt") as content:
            return dict.fromkeys(content.keys(), file)
    except (SafetensorError, OSError) as error:
        raise InputError(cut(f"cannot read {file}: {error}")) from error
