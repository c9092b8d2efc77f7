"""Tensors in safetensors files, one after the other: no more than a few pieces of them are in memory a second time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hetpipe.checkpoints.digests import PIECE_BYTES, HashedReader, RunningDigest, read_into, two_pieces
from hetpipe.checkpoints.stores.layout import LENGTH_BYTES, Place, header, header_bytes, ordered, places
from hetpipe.files.writing import writing

Open = Callable[[str], BufferedIOBase]
Fill = Callable[[memoryview], None]  # fills memory with what comes next in a file


def write_tensors(
    tensors: Mapping[str, Tensor],
    file: BinaryIO,
    digest: RunningDigest | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Write all tensors into this file, and let the digest follow; it may end later. TypeError, before anything is written, if
    the format has no name for the type of one; InterruptedError once it is `stopped`."""
    for piece, is_kept in _pieces(tensors):
        if stopped():
            raise InterruptedError
        if digest is not None:
            digest.feed(piece)
        file.write(piece)
        if digest is not None and not is_kept:
            digest.settle()


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write all tensors into a new file. WriteError if the system refuses."""
    with writing(path), path.open("wb") as file:
        write_tensors(tensors, file)


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[tuple[memoryview, bool]]:
    """Return the bytes of a file, and of each piece whether it stays as it is when the next is asked for."""
    yield memoryview(header(tensors)), True
    for key in ordered(tensors):
        tensor = tensors[key]
        flat = _flat(tensor.contiguous())  # a copy of this tensor if it is not contiguous
        if flat.is_cpu:
            yield from ((piece, tensor.is_contiguous()) for piece in _cut(_memory(flat)))
            continue
        for part in flat.split(PIECE_BYTES):
            yield _memory(part.cpu()), False


def _flat(contiguous: Tensor) -> Tensor:
    """Return the same memory as bytes [n]. (The stride of a dimension of one may be any, which `view` refuses.)"""
    return contiguous.detach().as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _cut(memory: memoryview) -> Iterator[memoryview]:
    return (memory[at : at + PIECE_BYTES] for at in range(0, memory.nbytes, PIECE_BYTES))


def _memory(flat: Tensor) -> memoryview:
    """Return the memory of bytes [n] on the CPU."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def fill(tensor: Tensor, read: Fill) -> None:
    """Fill a tensor with the bytes that come next."""
    if tensor.is_cpu and tensor.is_contiguous():
        for piece in _cut(_memory(_flat(tensor))):
            read(piece)
        return
    whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    flat, memories = _flat(whole), two_pieces()
    at = 0
    while at < len(flat):
        memory = next(memories)[: len(flat) - at]
        read(memory)
        flat[at : at + memory.nbytes].copy_(torch.frombuffer(memory, dtype=torch.uint8))
        at += memory.nbytes
    if whole is not tensor:
        tensor.copy_(whole)


def take_tensors(reader: HashedReader, room: Callable[[Mapping[str, Place]], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Read a part from its begin on. `room` gets where its tensors lie, and returns tensors for some of them, which are filled.
    InputError if the part is no safetensors file."""
    start = memoryview(bytearray(LENGTH_BYTES))
    reader.read_into(start[: reader.size_bytes])
    text = memoryview(bytearray(header_bytes(bytes(start), reader.size_bytes)))
    reader.read_into(text)
    found = places(bytes(text), reader.size_bytes)
    wanted = room(found)
    for key, place in found.items():
        if key in wanted:
            fill(wanted[key], reader.read_into)
        else:
            reader.skip(place.size_bytes)
    return dict(wanted)


class PartTensors(Mapping[str, Place]):
    """The tensors of a checkpoint's parts: where each lies, by its key, and reading them. InputError if a part is no safetensors
    file."""

    def __init__(self, open_part: Open, parts: Sequence[str]) -> None:
        self._open, self._part_of, self._places = open_part, dict[str, str](), dict[str, Place]()
        for part in parts:
            with open_part(part) as content:
                size = content.seek(0, os.SEEK_END)
                content.seek(0)
                text = content.read(header_bytes(content.read(LENGTH_BYTES), size))
            found = places(text, size)
            self._places |= found
            self._part_of |= dict.fromkeys(found, part)

    def __getitem__(self, key: str) -> Place:
        return self._places[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, key: str) -> Tensor:
        """Return one tensor, without others in memory. OSError if it cannot be read."""
        found = torch.empty(self[key].shape, dtype=self[key].dtype)
        self.read_into({key: found})
        return found

    def read_into(self, wanted: Mapping[str, Tensor]) -> None:
        """Fill these tensors with those that have their keys. OSError if one cannot be read."""
        for part in dict.fromkeys(self._part_of[key] for key in wanted):
            own = [key for key in wanted if self._part_of[key] == part]
            with self._open(part) as content, torch.no_grad():
                for key in sorted(own, key=lambda key: self._places[key].begin):
                    content.seek(self._places[key].begin)
                    fill(wanted[key], lambda memory: read_into(content, memory))
