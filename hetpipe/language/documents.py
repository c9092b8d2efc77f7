"""Plain text in windows that follow each other: of its bytes, or of a tokenizer's tokens."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetpipe.building.content import digest_of_tensors
from hetpipe.building.datasets import DataSplits, Sample, Samples, require_count
from hetpipe.files.messages import InputError, counted, shown
from hetpipe.language.formats.columns import Columns
from hetpipe.language.kept.key import key_of
from hetpipe.language.kept.once import once
from hetpipe.language.kept.token_file import Kept
from hetpipe.language.records.contents import Contents, contents_of
from hetpipe.language.records.files import KINDS, records_of
from hetpipe.language.records.record import UnusableError
from hetpipe.language.tokenizer import Tokenizer
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import Activity, warn

TOGETHER = 100  # texts that are tokenized at once


class Windows(Samples):
    """Consecutive windows of a text: inputs int64 [context], and targets, one place later."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context  # text: uint8 [bytes], or int32 [tokens]
        self.words, self.positions = 1 + int(text.max()), context  # that a model must know

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def digests(self) -> tuple[str, None]:
        """Return a digest of the text and of how it is cut, and none in any order."""
        return digest_of_tensors([self.text, torch.tensor([self.context])]), None

    def gather(self, indices: Tensor) -> Sample:
        positions = indices[:, None] * self.context + torch.arange(self.context + 1)  # [b, context + 1]
        windows = self.text[positions].long()
        return windows[:, :-1], windows[:, 1:]


def text(
    context: int = 128,
    files: str | Sequence[str] | None = None,
    test_fraction: float = 0.1,
    limit_bytes: int | None = None,
    tokenizer: str | None = None,
    columns: Mapping[str, str | None] | None = None,
) -> DataSplits:
    """Next-token prediction over texts: int64 [context] bytes or tokens, and the same one place later.

    Args:
        context: bytes, or tokens, in a sample; windows do not overlap.
        files: paths and glob patterns (`**` goes into folders), read in sorted order. Of .jsonl, .json, .csv, .tsv and .parquet
            files each record has a `text`. The default is real text that every machine has: the source of Python's standard
            library (its top level).
        test_fraction: part of the text, at its end, that is held out; 0 for none.
        limit_bytes: use this many bytes from the start; None for all.
        tokenizer: a folder of save_pretrained with a tokenizer, or its name on the hub. Texts, which are UTF-8 then, are joined
            by the token that ends a text. None: samples are bytes, and texts are joined by a line feed.
        columns: what records call their text, as in {text: content}.
    """
    require_count("context", context, "text")
    if limit_bytes is not None:
        require_count("limit_bytes", limit_bytes, "text")
    if not 0 <= test_fraction < 1:
        raise InputError(f"text: test_fraction must be from 0 to below 1, got {test_fraction!r}")
    paths = _standard_library() if files is None else _expand([files] if isinstance(files, str) else files)
    named = Columns(columns)
    made_of = dict[str, Any]()
    if tokenizer is None:
        corpus, unit = _bytes(_read(paths, limit_bytes, named)), "bytes"
    else:
        words = Tokenizer(tokenizer)
        corpus, unit, made_of = _tokens(paths, limit_bytes, named, words), "tokens", {"tokenizer": words.digest}
    held = round(len(corpus) * test_fraction)
    return DataSplits(
        train=_windows("training", corpus[: len(corpus) - held], context, unit),
        test=_windows("test", corpus[len(corpus) - held :], context, unit) if test_fraction else None,
        names=("input_ids",),
        made_of=made_of,
    )


def _windows(name: str, part: Tensor, context: int, unit: str) -> Windows:
    if len(part) <= context:
        raise InputError(
            f"text: the {name} part has {len(part)} {unit}, but one sample of context {context} needs "
            f"{context + 1}. Give more text, a shorter context or another test_fraction"
        )
    return Windows(part, context)


def _standard_library() -> list[Path]:
    """Modules at the top level of the standard library, but for generated ones that describe the machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    if not paths:
        raise InputError(f"text: no Python source in the standard library's folder {folder}; name `files`")
    return paths


def _expand(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and patterns name, sorted, each once."""
    found = dict[str, Path]()  # by the whole path
    for pattern in patterns:
        path = Path(os.path.expanduser(pattern))
        matches = [path] if os.path.lexists(path) else [Path(match) for match in glob.glob(str(path), recursive=True)]
        if not matches:
            raise InputError(f"text: no file matches {pattern!r} (from {Path.cwd()})")
        here = {match for match in matches if match.is_file()}
        if not here:
            raise InputError(f"text: {pattern!r} is a folder. Write {pattern.rstrip('/')}/**/*.txt")
        found |= {os.path.abspath(match): match for match in here}
    if not found:
        raise InputError("text: files is an empty list. Name at least one file, or leave files out")
    return sorted(found.values())


class Part(NamedTuple):
    """A text, in UTF-8 where it is to be tokenized, and where it stands."""

    where: str
    content: bytes


def _texts_of(path: Path, columns: Columns) -> Iterator[Part]:
    """The text of a file, or those of its records."""
    if path.suffix.lower() not in KINDS:
        try:
            yield Part(str(path), path.read_bytes())
        except OSError as error:
            raise InputError(f"text: cannot read {path}: {error.strerror}") from error
        return
    for where, value in records_of(path):
        found = columns.of(value, ("text",)).get("text") if isinstance(value, dict) else None
        if not isinstance(found, str):
            why = value if isinstance(value, UnusableError) else f"it has no text; found {shown(value)}"
            raise InputError(f"text: {where}: {why}")
        yield Part(where, found.encode())


def _read(paths: Sequence[Path], limit_bytes: int | None, columns: Columns) -> list[Part]:
    """The texts of the files, the last of them cut where so many bytes are read, with one between two."""
    parts: list[Part] = []
    size = 0
    for part in (part for path in paths for part in _texts_of(path, columns)):
        parts.append(part if limit_bytes is None else part._replace(content=part.content[: limit_bytes - size]))
        size += len(part.content) + 1
        if limit_bytes is not None and size > limit_bytes:
            break
    if not any(part.content for part in parts):
        raise InputError(f"text: the {len(paths)} files are empty, the first is {paths[0]}")
    columns.check_seen()
    return parts


def _bytes(parts: Sequence[Part]) -> Tensor:
    """The texts one after the other, a line feed between two, as uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"\n".join(part.content for part in parts)), dtype=torch.uint8)


def _tokens(paths: Sequence[Path], limit_bytes: int | None, columns: Columns, tokenizer: Tokenizer) -> Tensor:
    """The tokens of the texts, made by one process of this host, now or at an earlier start: int32 [tokens]. What a user should
    know of them is said each time."""
    found = _found(paths)
    key = key_of(
        {
            "text": [str(path) for path in paths],
            "contents": found,
            "limit_bytes": limit_bytes,
            "columns": columns.given,
            "tokenizer": tokenizer.exact,
        }
    )

    def make() -> Kept:
        parts = _read(paths, limit_bytes, columns)
        tokens, told = _tokenized(parts, tokenizer, limit_bytes is not None)
        note = (
            f"note: {told} of {counted(len(parts), 'text')} hold special tokens of the tokenizer (an end of a text, say), "
            "which are read as these tokens, and not as text"
        )
        return Kept({"text": tokens}, {"notes": [note] if told else []})

    kept = once(key, sum(each.size for each in found), make, lambda: _found(paths) == found)
    for note in kept.facts["notes"] if own_rank() == 0 else ():
        warn(note)
    return kept.arrays["text"]


def _found(paths: Sequence[Path]) -> list[Contents]:
    try:
        return [contents_of(path) for path in paths]
    except InputError as error:
        raise InputError(f"text: {error}") from error


def _tokenized(parts: Sequence[Part], tokenizer: Tokenizer, cut_off: bool) -> tuple[Tensor, int]:
    """The texts one after the other, the end of a text between two, as int32 [tokens]; and how many hold special tokens."""
    found = list[Tensor]()
    end = torch.tensor([tokenizer.required_end()], dtype=torch.int32)
    told = 0
    with Activity("tokenizing text", len(parts), shown=own_rank() == 0, inner=True) as activity:
        for first in range(0, len(parts), TOGETHER):
            group = range(first, min(first + TOGETHER, len(parts)))
            texts = [_decoded(parts[i], cut_off and i == len(parts) - 1) for i in group]
            for numbers in tokenizer.plain(texts):
                told += not tokenizer.special_numbers.isdisjoint(numbers)
                found += [torch.tensor(numbers, dtype=torch.int32), end]
                activity.advance()
    return torch.cat(found[:-1]), told


def _decoded(part: Part, cut_off: bool) -> str:
    try:
        return part.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if cut_off and error.end == len(part.content) and error.reason == "unexpected end of data":
            return part.content[: error.start].decode("utf-8-sig")
        raise InputError(f"text: {part.where} is not UTF-8 at byte {error.start}, which a tokenizer needs") from None
