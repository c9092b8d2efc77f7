"""Where each tensor lies in a safetensors file: 8 bytes with the length of a JSON header, the header, and the tensors' bytes.

The header's format: https://github.com/huggingface/safetensors#format. Its library has no writer that takes one tensor after the
other, and opens files only, which a store need not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetpipe.files.messages import InputError, shown
from hetpipe.files.parsing import parse_json

LENGTH_BYTES = 8  # of the header's length, which is little-endian
MOST_HEADER_BYTES = 100_000_000  # the library's own limit
METADATA = "__metadata__"
TYPES: dict[str, torch.dtype] = {  # in the order of the library, which writes those that come last first
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


@dataclass(frozen=True)
class Described:
    """What is known of a tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """How many bytes its numbers take."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Place(Described):
    """`begin` is the offset of its first byte in the whole file."""

    begin: int


def ordered(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the keys in the order of a file: wide types first, then by name. TypeError if the format has no name for a type."""
    for key, tensor in tensors.items():
        if tensor.dtype not in _RANKS:
            raise TypeError(f"{shown(key)} is of type {tensor.dtype}, which safetensors files do not hold")
    return sorted(tensors, key=lambda key: (-_RANKS[tensors[key].dtype], key.encode()))


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return all that precedes the tensors' bytes, as the library writes it for PyTorch."""
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for key in ordered(tensors):
        tensor = tensors[key]
        size = tensor.numel() * tensor.element_size()
        entries[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(start: bytes, size: int) -> int:
    """Return the length of the header of a file with `size` bytes that begins with these. InputError if there is none."""
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
        raise InputError(f"it is no safetensors file: its {size} bytes have no room for a header of {length}")
    return length


def places(text: bytes, size: int) -> dict[str, Place]:
    """Return where tensors lie, in that order, in a file with `size` bytes and this header. InputError if the header does not
    account for each byte once."""
    entries, at = _entries(text), LENGTH_BYTES + len(text)
    found, begin = dict[str, Place](), at
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        place = Place(tuple(entry["shape"]), TYPES[entry["dtype"]], at)
        due = [at - begin, at - begin + place.size_bytes]
        if entry["data_offsets"] != due:
            raise InputError(f"{shown(key)} lies at {entry['data_offsets']}, but should lie at {due}")
        found[key], at = place, at + place.size_bytes
    if at != size:
        raise InputError(f"its tensors end at byte {at}, but it has {size} bytes")
    return found


def _entries(text: bytes) -> dict[str, Any]:
    """The header's tensors, each with the right keys."""
    try:
        found = parse_json(text.decode())
    except ValueError as error:  # no text, no JSON
        raise InputError(f"its header is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("its header is no mapping")
    entries = {key: entry for key, entry in found.items() if key != METADATA}
    for key, entry in entries.items():
        if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
            raise InputError(f"{shown(key)} is described by {shown(entry)}")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in TYPES:
            raise InputError(f"{shown(key)} is of the type {shown(entry['dtype'])}")
        if not (_counts(entry["shape"]) and _counts(entry["data_offsets"])):
            raise InputError(f"{shown(key)} has the shape {shown(entry['shape'])} and lies at {shown(entry['data_offsets'])}")
    return entries


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
