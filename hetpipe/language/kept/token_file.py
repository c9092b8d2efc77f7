"""A file of arrays, in safetensors, which is mapped into memory: ranks of a host share what they read of it.

Its name is `KEY-DIGEST.safetensors`: by the key it is found, and by the digest of all its bytes it is checked when it is opened.
It is written under another name, so that a file of this name is whole. Names that begin with a key belong to whoever holds the
lock of this key (see `once`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from hetpipe.files.writing import make_folder

FOLDER = Path(".hetpipe", "tokens")
MOST_BYTES = 16 * 2**30  # of all files in the folder: when one joins them, those that were used longest ago make room
ENDING, WRITING = ".safetensors", ".writing"
DIGITS = 32
FACTS = "facts"
NAME = re.compile(rf"[0-9a-f]{{{DIGITS}}}-([0-9a-f]{{{DIGITS}}}){re.escape(ENDING)}")


class Kept(NamedTuple):
    """Arrays by their names, and what is said of them in plain values."""

    arrays: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class DamagedError(ValueError):
    """A file is not as it was written."""


def find(key: str) -> Path | None:
    """Return the file of this key; None where there is none."""
    return next((path for path in sorted(FOLDER.glob(f"{key}-*{ENDING}")) if NAME.fullmatch(path.name)), None)


def open_file(path: Path) -> Kept:
    """Map the arrays of a file. Changes of them stay in this process. DamagedError where a byte is another than was written."""
    named = NAME.fullmatch(path.name)
    if named is None or digest_of(path) != named[1]:
        raise DamagedError(f"{path} is not as it was written")
    found = _mapped(path)
    with contextlib.suppress(OSError):  # of another user, say
        os.utime(path)  # `_make_room` keeps what was used last
    return found


def save(key: str, kept: Kept) -> Kept:
    """Write the file of this key, whole or not at all, and map it. OSError where it cannot be written."""
    make_folder(FOLDER)
    temporary = FOLDER / f"{key}-{os.getpid()}{WRITING}"
    try:
        arrays = {name: array.numpy() for name, array in kept.arrays.items()}
        save_file(arrays, temporary, metadata={FACTS: json.dumps(kept.facts)})
        temporary.chmod(0o644)  # as other files of a run (see `files/writing`)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        path = FOLDER / f"{key}-{digest_of(temporary)}{ENDING}"
        os.replace(temporary, path)
    except SafetensorError as error:  # which tells the system's errors as texts
        raise OSError(errno.EIO, str(error), str(temporary)) from error
    finally:
        temporary.unlink(missing_ok=True)
    _make_room(path)
    return _mapped(path)


def remove(key: str) -> None:
    """Delete what there is under this key, as far as this user may: a damaged file, and what a process that was killed has left
    half written."""
    for path in FOLDER.glob(f"{key}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


def digest_of(path: Path) -> str:
    """Return the digest of all bytes of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:DIGITS]


def _mapped(path: Path) -> Kept:
    with safe_open(path, "pt") as stream:
        facts = json.loads(stream.metadata()[FACTS])
        return Kept({name: stream.get_tensor(name) for name in stream.keys()}, facts)  # noqa: SIM118


def _make_room(newest: Path) -> None:
    """Delete files that were used longest ago until the others have `MOST_BYTES` at most; never the newest one. (Who has mapped
    a file that is deleted keeps it.)"""
    found = list[tuple[float, int, Path]]()
    for path in FOLDER.iterdir():
        with contextlib.suppress(OSError):  # another process deletes, too
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MOST_BYTES:
            return
        if path != newest and path.suffix in (ENDING, WRITING):
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
