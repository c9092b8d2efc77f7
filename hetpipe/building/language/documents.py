"""Plain text in windows that follow each other: of its bytes, or of a tokenizer's tokens."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hetpipe.building.datasets import DataSplits, Sample, Samples, require_count
from hetpipe.building.language.tokenizer import Tokenizer
from hetpipe.files.messages import InputError
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import Activity

TOGETHER = 100  # files that are tokenized at once


class Windows(Samples):
    """Consecutive windows of a text: inputs int64 [context], and targets, one place later."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context  # text: uint8 [bytes], or int32 [tokens]
        self.words, self.positions = 1 + int(text.max()), context  # that a model must know

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

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
) -> DataSplits:
    """Next-token prediction over text files: int64 [context] bytes or tokens, and the same one place later.

    Args:
        context: bytes, or tokens, in a sample; windows do not overlap.
        files: paths and glob patterns (`**` goes into folders), read in sorted order. The default is real
            text that every machine has: the source of Python's standard library (its top level).
        test_fraction: part of the text, at its end, that is held out; 0 for none.
        limit_bytes: use this many bytes from the start; None for all.
        tokenizer: a folder of save_pretrained with a tokenizer, or its name on the hub. Files, which are UTF-8 then, are joined
            by the token that ends a text. None: samples are bytes, and files are joined by a line feed.
    """
    require_count("context", context, "text")
    if limit_bytes is not None:
        require_count("limit_bytes", limit_bytes, "text")
    if not 0 <= test_fraction < 1:
        raise InputError(f"text: test_fraction must be from 0 to below 1, got {test_fraction!r}")
    paths = _standard_library() if files is None else _expand([files] if isinstance(files, str) else files)
    parts = _read(paths, limit_bytes)
    corpus = _bytes(parts) if tokenizer is None else _tokens(parts, paths, tokenizer, limit_bytes is not None)
    unit, held = "bytes" if tokenizer is None else "tokens", round(len(corpus) * test_fraction)
    return DataSplits(
        train=_windows("training", corpus[: len(corpus) - held], context, unit),
        test=_windows("test", corpus[len(corpus) - held :], context, unit) if test_fraction else None,
        names=("input_ids",),
    )


def _windows(name: str, part: Tensor, context: int, unit: str) -> Windows:
    if len(part) <= context:
        raise InputError(
            f"text: the {name} part has {len(part)} {unit}, one sample of context {context} needs "
            f"{context + 1}: give more text, a shorter context or another test_fraction"
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
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
        if not matches:
            raise InputError(f"text: no file matches {pattern!r} (from {Path.cwd()})")
        here = {match for match in matches if match.is_file()}
        if not here:
            raise InputError(f"text: {pattern!r} is a folder: write {pattern.rstrip('/')}/**/*.txt")
        found |= here
    if not found:
        raise InputError("text: files is an empty list: name at least one file, or leave it out")
    return sorted(found)


def _read(paths: Sequence[Path], limit_bytes: int | None) -> list[bytes]:
    """What the files hold, the last of them cut where so many bytes are read, with one between two."""
    parts: list[bytes] = []
    size = 0
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"text: cannot read {path}: {error.strerror}") from error
        parts.append(content if limit_bytes is None else content[: limit_bytes - size])
        size += len(content) + 1
        if limit_bytes is not None and size > limit_bytes:
            break
    if not any(parts):
        raise InputError(f"text: the {len(paths)} files are empty, the first is {paths[0]}")
    return parts


def _bytes(parts: Sequence[bytes]) -> Tensor:
    """The files one after the other, a line feed between two, as uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def _tokens(parts: Sequence[bytes], paths: Sequence[Path], name: str, cut_off: bool) -> Tensor:
    """The files one after the other, the end of a text between two, as int32 [tokens]."""
    tokenizer, found = Tokenizer(name), list[Tensor]()
    end = torch.tensor([tokenizer.required_end()], dtype=torch.int32)
    with Activity("tokenizing text", len(parts), shown=own_rank() == 0, inner=True) as activity:
        for first in range(0, len(parts), TOGETHER):
            group = range(first, min(first + TOGETHER, len(parts)))
            texts = [_decoded(parts[i], paths[i], cut_off and i == len(parts) - 1) for i in group]
            for numbers in tokenizer.plain(texts):
                found += [torch.tensor(numbers, dtype=torch.int32), end]
                activity.advance()
    return torch.cat(found[:-1])


def _decoded(content: bytes, path: Path, cut_off: bool) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if cut_off and error.end == len(content) and error.reason == "unexpected end of data":
            return content[: error.start].decode("utf-8-sig")
        raise InputError(f"text: {path} is not UTF-8 at byte {error.start}, which a tokenizer needs") from None
