"""What is in a file, by a digest: whoever has read it before knows it again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from hetpipe.files.messages import InputError, cut, reason

CHUNK = 1 << 20


class Contents(NamedTuple):
    """What is in a file of records: a digest of its bytes, how many they are, and how many of them end a line."""

    digest: str
    size: int
    lines: int


def contents_of(path: Path) -> Contents:
    """Read a file once. InputError where it cannot be read."""
    own, size, lines = hashlib.sha256(), 0, 0
    try:
        with path.open("rb") as stream:
            while part := stream.read(CHUNK):
                own.update(part)
                size, lines = size + len(part), lines + part.count(b"\n")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {cut(str(path), 200)}: {reason(error)}") from error
    return Contents(own.hexdigest(), size, lines)
