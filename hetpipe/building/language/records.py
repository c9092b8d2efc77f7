"""The records of a data set, each with its file and line, so that one that cannot be used is told by them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.files.messages import InputError, cut, listed, reason, shown
from hetpipe.files.parsing import ParseError, checked, parse_json

KINDS = (".jsonl", ".json", ".parquet")
HUB = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
PACKED = {b"\x1f\x8b": "packed by gzip", b"PK\x03\x04": "a zip file", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
TEXT_EXTRA = "pip install 'hetpipe[text]'"


class UnusableError(ValueError):
    """Why a record cannot be used."""


class Record(NamedTuple):
    """What a record holds, or why it cannot be used, and where it stands."""

    where: str
    value: Any


class Source(NamedTuple):
    """Where records come from: files, folders, or the name of a data set of the hub, of which `split` and `subset` are read; only
    the first `limit`, if that is said."""

    names: tuple[str, ...]
    split: str = "train"
    subset: str | None = None
    limit: int | None = None

    @classmethod
    def of(cls, file: str | Sequence[str], **options: Any) -> Source:
        """InputError where no file is named."""
        names = (file,) if isinstance(file, str) else tuple(file) if isinstance(file, list | tuple) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"file must be a file, a folder, a data set of the hub, or a list of files, found {shown(file)}")
        return cls(names, **options)

    def __str__(self) -> str:
        return cut(self.names[0], 100) + (f" and {len(self.names) - 1} more" if len(self.names) > 1 else "")

    def records(self) -> Iterator[Record]:
        """All records, in the order of the files' names in a folder. InputError where there are none."""
        return islice(self._all(), self.limit)

    def _all(self) -> Iterator[Record]:
        for name in self.names:
            path = Path(os.path.expanduser(name))
            if os.path.isdir(path):
                for file in _within(path):
                    yield from _file(file)
            elif os.path.exists(path) or not HUB.fullmatch(name) or name.endswith(KINDS):
                yield from _file(path)
            else:
                yield from _hub(name, self.split, self.subset)


class Faults:
    """Records that cannot be used: the first few, and how many."""

    def __init__(self) -> None:
        self.count, self.first = 0, list[str]()

    def add(self, where: str, why: object) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < 8:
            self.first.append(f"{where}: {why}")

    def raise_any(self, what: str, of: int, advice: str = "") -> None:
        """InputError if there is one."""
        if self.count:
            more = self.count - len(self.first)
            lines = listed(self.first) + (f"\n  … and {more} more" if more else "")
            raise InputError(f"{self.count} of {of} records {what}{advice}:\n{lines}")


def _within(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix in KINDS and file.is_file())
    if not found:
        there = sorted(file.name for file in folder.iterdir())
        raise InputError(f"the folder {folder} holds no file that ends in {', '.join(KINDS)}; found: {shown(there)}")
    return found


def _file(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as stream:
            first = stream.read(3).removeprefix(b"\xef\xbb\xbf") + stream.read(4_000)
            stream.seek(0)
            for begin, kind in PACKED.items():
                if first.startswith(begin):
                    raise InputError(f"{path} is {kind}: give it as plain UTF-8")
            if path.suffix == ".parquet":
                yield from _parquet(path)
            elif path.suffix == ".json" and first.lstrip().startswith(b"["):
                yield from _array(path, stream.read())
            else:
                for number, line in enumerate(stream, 1):
                    yield Record(f"{path}, line {number}", _line(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {cut(str(path), 200)}: {reason(error)}") from error


def _line(line: bytes) -> Any:
    """A line's value, or why it has none."""
    if not line.strip():
        return UnusableError("the line is empty")
    try:
        return parse_json(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        return UnusableError(f"byte {error.start} is not UTF-8")
    except ParseError as error:
        return UnusableError(str(error).replace("line 1, ", ""))


def _array(path: Path, content: bytes) -> Iterator[Record]:
    try:
        found = parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None
    except ParseError as error:
        raise InputError(f"{path} is {error}") from None
    for number, value in enumerate(found, 1):
        yield Record(f"{path}, record {number}", value)


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path} needs pyarrow to be read: {TEXT_EXTRA}, or give a .jsonl file") from None
    try:
        rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield Record(f"{path}, record {number}", _plain(row))
    except OSError:
        raise
    except Exception as error:  # whatever pyarrow says of a file that is none of its
        raise InputError(f"cannot read {path}: {cut(str(error))}") from error


def _hub(name: str, split: str, subset: str | None) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"there is no file or folder {name!r} (from {Path.cwd()}); for a data set of this name of the hub, {TEXT_EXTRA}"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # whatever it says of a name, a split, a network
        raise InputError(
            f"there is no file or folder {name!r} (from {Path.cwd()}), and as a data set of the hub, split {split!r}, it cannot "
            f"be had: {cut(' '.join(str(error).split()))}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield Record(f"{name}, split {split}, record {number}", _plain(row))


def _plain(row: Any) -> Any:
    """Columns make a key of each record of what only some have: nothing is no value."""
    try:
        return {key: value for key, value in checked(row).items() if value is not None}
    except ParseError as error:
        return UnusableError(str(error))
