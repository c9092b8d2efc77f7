"""What the data are: chats, questions with their answers, plain text, or latents, told by the files' names or the first record;
and what is fine-tuned on them: a language model, or a diffusion transformer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hetpipe.files.messages import InputError, shown
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.formats import EXPECTED, Kind, kind_of_record
from hetpipe.language.formats.preferences import sides_of
from hetpipe.language.records.files import KINDS
from hetpipe.language.records.record import UnusableError
from hetpipe.language.records.source import Source

PLAIN = (".txt", ".md")
LATENTS: Literal["latents"] = "latents"
TENSORS = "*.safetensors"
COUNTED: dict[str, str] = {"chat": "chat", "instructions": "pair", "text": "window", "preferences": "question", LATENTS: "sample"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """`model`: of a job; `library`: the package that its folders are of; `loss`: the job's section; `rates`: learning rates with
    adapters and without; `batch`: samples of a step at most, unless they are asked for."""

    model: str
    library: str
    batch: int
    loss: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


TEXTS = Task(
    model="causal_lm",
    library="transformers",
    batch=32,
    loss={"name": "cross_entropy", "weight": "tokens", "fused": "auto"},
    rates={"lora": 2e-4, "full": 1e-5},
)
PICTURES = Task(model="diffusion", library="diffusers", batch=4, loss={"name": "denoising"}, rates={"lora": 1e-4, "full": 1e-5})


def task_of(kind: str) -> Task:
    """The task of data of this kind."""
    return PICTURES if kind == LATENTS else TEXTS


class Found(NamedTuple):
    """The data as a job names them: by which function, with which arguments for the files."""

    kind: Kind | Literal["preferences", "latents"]
    files: dict[str, Any]


def kind_of(data: Sequence[str], columns: Mapping[str, str | None] | None = None, *, preferences: bool = False) -> Found:
    """`preferences`: these are asked for. InputError where a file, a folder or the first record is of none of these kinds, or
    where plain texts are named beside records."""
    if len(data) == 1 and _holds_latents(data[0]):
        return Found(LATENTS, {"folder": data[0]})
    plain = [part for part in map(_plain, data) if part is not None]
    if plain and len(plain) < len(data):
        raise InputError(f"{shown(list(data))}: some of these are plain texts, and others hold records. Give one kind")
    if plain:
        files = [file for part in plain for file in part]
        return Found("text", {"files": files[0] if len(files) == 1 else files})
    names: str | list[str] = data[0] if len(data) == 1 else list(data)
    first = next(Source.of(names).records(), None)
    if first is None:
        raise InputError(f"{shown(names)} holds no records")
    try:
        if isinstance(first.value, UnusableError):
            raise first.value
        if preferences:
            sides_of(first.value, Columns(columns))
            return Found("preferences", {"file": names})
        kind = kind_of_record(first.value, Columns(columns))
    except UnusableError as error:
        raise InputError(f"{first.where}: {error}") from None
    if kind is None:
        raise InputError(
            f"{first.where} is a record with the keys {shown(list(first.value))}; expected one with {EXPECTED}, or "
            "text. If the keys have other names, give --columns, as in --columns prompt=ask,completion=reply. "
            "Give plain texts as .txt or .md files"
        )
    return Found(kind, {"files" if kind == "text" else "file": names})


def _holds_latents(name: str) -> bool:
    path = Path(os.path.expanduser(name))
    return path.is_dir() and next(path.rglob(TENSORS), None) is not None


def _plain(name: str) -> list[str] | None:
    """The files of a name that stands for plain texts; None where it stands for records."""
    path = Path(os.path.expanduser(name))
    if path.suffix.lower() in PLAIN and not path.is_dir():
        return [name]
    if path.is_dir() and not any(file.suffix.lower() in KINDS for file in path.iterdir()):
        endings = [end for end in PLAIN if next(path.rglob(f"*{end}"), None) is not None]
        return [f"{name.rstrip('/')}/**/*{end}" for end in endings] or None
    return None
