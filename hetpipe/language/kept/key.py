"""The name under which tokens are kept: a digest of all that decides them. Anything else under which they are found again would
be another run's data."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hetpipe

LIBRARIES = ("transformers", "tokenizers", "jinja2", "pyarrow", "datasets")  # that read, write or tokenize texts
ROOMS = ("files", "building", "language")  # whose code makes the arrays


def key_of(said: Mapping[str, Any]) -> str:
    """Return the name, 32 hexadecimal digits, for arguments and digests in plain values."""
    text = json.dumps([dict(said), made_by()], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


@cache
def made_by() -> tuple[str, ...]:
    """Return which code makes the arrays: the releases of Python, hetpipe and the libraries, and a digest of hetpipe's own
    source, which may change within a release."""
    own, home = hashlib.sha256(), Path(hetpipe.__file__).parent
    for room in ROOMS:
        for path in sorted((home / room).rglob("*.py")):
            own.update(f"{path.relative_to(home)}\n".encode() + path.read_bytes())
    found = [f"{name} {_release(name)}" for name in LIBRARIES]
    return (f"python {sys.version}", f"hetpipe {hetpipe.__version__} {own.hexdigest()[:32]}", *found)


def _release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
