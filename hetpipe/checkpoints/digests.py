"""Whether what a checkpoint holds is what was written: the bytes of each file and its digest (BLAKE2b, 256 bits)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BufferedIOBase
from itertools import cycle
from typing import Annotated, Any, Self

from pydantic import Field

from hetpipe.files.formats import Bytes, Strict
from hetpipe.files.messages import reason

_blake2b = partial(hashlib.blake2b, digest_size=32)
_THREADS = 4  # hashing lets others run, and a disk gives one reader less than it can
PIECE_BYTES = 1 << 22  # hashed in some milliseconds: long beside the microseconds that handing it to a thread takes
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
REMOVE = "remove it to resume from the one before"  # of a checkpoint that is damaged


class Written(Strict):
    """A file as it was written."""

    size_bytes: Bytes
    blake2b: Digest


class RunningDigest:
    """The digest of pieces, each of which is hashed by a thread of its own while others go on. No piece may change before it is
    hashed: see `settle`."""

    def __init__(self) -> None:
        self._hash, self._size, self._last = _blake2b(), 0, Future[None]()
        self._last.set_result(None)
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def feed(self, piece: memoryview) -> None:
        """Add this piece, whose turn comes after those before it."""
        self._size += piece.nbytes
        self._last = self._pool.submit(self._hash.update, piece)

    def settle(self) -> None:
        """Wait until all pieces are hashed."""
        self._last.result()

    def written(self) -> Written:
        """Return what a file of these pieces holds."""
        self.settle()
        return Written(size_bytes=self._size, blake2b=self._hash.hexdigest())


class HashedReader:
    """A part that is hashed as it is read, from its first byte on. When a call returns, at most the last piece is still to be
    hashed, so that whoever reads into two pieces of memory in turn changes none too early."""

    def __init__(self, content: BufferedIOBase, size_bytes: int, digest: RunningDigest) -> None:
        self.size_bytes = size_bytes
        self._content, self._digest, self._left = content, digest, size_bytes

    def read_into(self, memory: memoryview) -> None:
        """Fill this memory. OSError if the part ends before that."""
        read_into(self._content, memory)
        self._digest.settle()
        self._digest.feed(memory)
        self._left -= memory.nbytes

    def skip(self, size: int | None = None) -> None:
        """Read so many bytes, or all that is left, for the digest alone."""
        left, memories = self._left if size is None else size, two_pieces()
        while left:
            memory = next(memories)[:left]
            self.read_into(memory)
            left -= memory.nbytes


def two_pieces() -> Iterator[memoryview]:
    """Return two pieces of memory in turn, one of which can be filled while the other is used."""
    return cycle((memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray(PIECE_BYTES))))


def read_into(content: BufferedIOBase, memory: memoryview) -> None:
    """Fill this memory with what comes next. OSError if there is less."""
    done = 0
    while done < memory.nbytes:
        count = content.readinto(memory[done:])
        if not count:
            raise OSError(errno.EIO, f"it ends {memory.nbytes - done} bytes early")
        done += count


Take = Callable[[str, HashedReader], None]  # gets the name of a part, and reads as much of it as it has a use for


def damage(open_file: Callable[[str], BufferedIOBase], files: Mapping[str, Written], take: Take | None = None) -> list[str]:
    """Return what is wrong with these files, each of which is read once, by `take` first. What that has read is right only where
    nothing is wrong."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return [fault for fault in pool.map(lambda name: _fault(open_file, name, files[name], take), files) if fault]


def _fault(open_file: Callable[[str], BufferedIOBase], name: str, then: Written, take: Take | None) -> str:
    try:
        with open_file(name) as content, RunningDigest() as digest:
            size = content.seek(0, os.SEEK_END)
            if size != then.size_bytes:
                return f"{name} has {size} bytes, and {then.size_bytes} were written"
            content.seek(0)
            reader = HashedReader(content, size, digest)
            if take is not None:
                take(name, reader)
            reader.skip()
            now = digest.written()
    except OSError as error:
        return f"{name} cannot be read: {reason(error)}"
    if now.blake2b != then.blake2b:
        return f"{name} has other content: its digest is {now.blake2b[:16]}…, and {then.blake2b[:16]}… was written"
    return ""


def digest_of(document: Mapping[str, Any]) -> str:
    """The digest of plain values, of all keys but `digest`."""
    content = {key: value for key, value in document.items() if key != "digest"}
    return _blake2b(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
