"""Whether what a checkpoint holds is what was written: the bytes of each file and its digest (BLAKE2b, 256 bits)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedIOBase
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from hetpipe.files.formats import Bytes, Count, Strict
from hetpipe.files.messages import reason

_blake2b = partial(hashlib.blake2b, digest_size=32)
_THREADS = 4  # hashing lets others run, and a disk gives one reader less than it can
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
REMOVE = "remove it to go on from the one before"  # of a checkpoint that is damaged


def _one_of_several(shard: tuple[int, int]) -> tuple[int, int]:
    number, degree = shard
    if number >= degree or degree < 2:
        raise ValueError(f"shard {number} of {degree}: expected the number of one of two or more, from 0 on")
    return shard


class Written(Strict):
    """A file as it was written. `shard`: of what tensor-parallel stages split it holds this shard, of so many; left out where it
    holds tensors whole."""

    size_bytes: Bytes
    blake2b: Digest
    shard: Annotated[tuple[Count, Count], AfterValidator(_one_of_several)] | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in plain(self).items() if value is not None}


def written(content: BufferedIOBase, shard: tuple[int, int] = (0, 1)) -> Written:
    """What a file holds now, as written by a seat with this shard, of so many. OSError where it cannot be read."""
    digest = hashlib.file_digest(content, _blake2b).hexdigest()
    return Written(size_bytes=content.seek(0, os.SEEK_END), blake2b=digest, shard=shard if shard[1] > 1 else None)


def damage(open_file: Callable[[str], BufferedIOBase], files: Mapping[str, Written]) -> list[str]:
    """What is wrong with these files, each of which is read once."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return [fault for fault in pool.map(lambda name: _fault(open_file, name, files[name]), files) if fault]


def _fault(open_file: Callable[[str], BufferedIOBase], name: str, then: Written) -> str:
    try:
        with open_file(name) as content:
            size = content.seek(0, os.SEEK_END)
            if size != then.size_bytes:
                return f"{name} has {size} bytes, and {then.size_bytes} were written"
            content.seek(0)
            now = written(content)
    except OSError as error:
        return f"{name} cannot be read: {reason(error)}"
    if now.blake2b != then.blake2b:
        return f"{name} has other content: its digest is {now.blake2b[:16]}…, and {then.blake2b[:16]}… was written"
    return ""


def digest_of(document: Mapping[str, Any]) -> str:
    """The digest of plain values, of all keys but `digest`."""
    content = {key: value for key, value in document.items() if key != "digest"}
    return _blake2b(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
