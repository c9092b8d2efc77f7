"""What the data are: chats, pairs of a prompt and its completion, or plain text, told by the files' names or the first record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hetpipe.building.language.records import KINDS, Source, UnusableError
from hetpipe.files.messages import InputError, shown

Kind = Literal["chat", "instructions", "text"]
PLAIN = (".txt", ".md")
KEYS: dict[str, Kind] = {
    "messages": "chat", "conversations": "chat", "prompt": "instructions", "completion": "instructions",
    "instruction": "instructions", "output": "instructions",
}  # fmt: skip
EXPECTED = "messages (or conversations), prompt and completion, or instruction and output"
COUNTED: dict[str, str] = {"chat": "chat", "instructions": "pair", "text": "window"}


class Found(NamedTuple):
    """The data as a job names them: by which function, with which arguments for the files."""

    kind: Kind
    files: dict[str, Any]


def kind_of(data: str) -> Found:
    """InputError where a file, a folder or the first record is of none of these kinds."""
    path = Path(os.path.expanduser(data))
    if path.suffix.lower() in PLAIN and not path.is_dir():
        return Found("text", {"files": data})
    if path.is_dir() and not any(file.suffix in KINDS for file in path.iterdir()):
        endings = [end for end in PLAIN if next(path.rglob(f"*{end}"), None) is not None]
        if endings:
            return Found("text", {"files": [f"{data.rstrip('/')}/**/*{end}" for end in endings]})
    first = next(Source.of(data).records(), None)
    if first is None:
        raise InputError(f"{data} holds no records")
    if isinstance(first.value, UnusableError):
        raise InputError(f"{first.where}: {first.value}")
    keys = list(first.value) if isinstance(first.value, dict) else []
    kind = next((kind for key, kind in KEYS.items() if key in keys), None)
    if kind is None:
        what = f"a record with the keys {shown(keys)}" if keys else f"a {type(first.value).__name__}"
        plain = ", or give plain text as .txt or .md files" if keys in (["text"], []) else ""
        raise InputError(f"{first.where} is {what}; expected a record with {EXPECTED}{plain}")
    return Found(kind, {"file": data})
