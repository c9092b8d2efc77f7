"""What files of records hold: a value in each line, a list of them, columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

from hetpipe.files.messages import InputError, counted, cut, reason, shown
from hetpipe.files.parsing import ParseError, checked, parse_json
from hetpipe.language.records.record import TEXT_EXTRA, Record, UnusableError

COLUMNS = {".csv": ",", ".tsv": "\t"}  # what is between two of them
KINDS = (".jsonl", ".json", ".parquet", *COLUMNS)
PACKED = {b"\x1f\x8b": "packed by gzip", b"PK\x03\x04": "a zip file", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
BOM = b"\xef\xbb\xbf"  # which also begins each file that was put behind another
MOST_CHARACTERS = 2**31 - 1  # of a field of a CSV file


def records_of(path: Path) -> Iterator[Record]:
    """The records of a file. InputError where it cannot be read at all."""
    try:
        with path.open("rb") as stream:
            first = stream.read(3).removeprefix(BOM) + stream.read(4_000)
            stream.seek(0)
            for begin, kind in PACKED.items():
                if first.startswith(begin):
                    raise InputError(f"{path} is {kind}. Give it as plain UTF-8")
            suffix = path.suffix.lower()
            if suffix == ".parquet":
                yield from _parquet(path)
            elif suffix in COLUMNS:
                yield from _columns(path, stream.read(), COLUMNS[suffix])
            elif first.lstrip().startswith(b"[") or (suffix == ".json" and _goes_on(stream)):
                yield from _whole(path, stream.read())
            else:
                for number, line in enumerate(stream, 1):
                    yield Record(f"{path}, line {number}", _line(line.removeprefix(BOM)))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {cut(str(path), 200)}: {reason(error)}") from error


def _goes_on(stream: BinaryIO) -> bool:
    """Whether its first line is no value, so that a value goes over several."""
    line = stream.readline().removeprefix(BOM)
    stream.seek(0)
    return bool(line.strip()) and isinstance(_line(line), UnusableError)


def _line(line: bytes) -> Any:
    """A line's value, or why it has none."""
    if not line.strip():
        return UnusableError("the line is empty")
    try:
        return parse_json(line.decode("utf-8").rstrip(), inf)
    except UnicodeDecodeError as error:
        return UnusableError(f"byte {error.start} is not UTF-8")
    except ParseError as error:
        return UnusableError(str(error).replace("line 1, ", ""))


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}") from None


def _whole(path: Path, content: bytes) -> Iterator[Record]:
    """The records of a list, or the only one."""
    try:
        found = parse_json(_decoded(path, content), inf)
    except ParseError as error:
        raise InputError(f"{path} is {error}; expected a list of records, or a record in each line") from None
    for number, value in enumerate(found if isinstance(found, list) else [found], 1):
        yield Record(f"{path}, record {number}", value)


def _columns(path: Path, content: bytes, between: str) -> Iterator[Record]:
    """The rows of a file whose first line names its columns. An empty field is no value."""
    before = csv.field_size_limit(MOST_CHARACTERS)
    try:
        rows = csv.reader(io.StringIO(_decoded(path, content), newline=""), delimiter=between, strict=True)
        names = next(rows, [])
        if double := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"{path}: its first line, which names the columns, has {shown(double)} twice")
        for row in rows:
            if row:
                yield Record(f"{path}, line {rows.line_num}", _row(names, row))
    except csv.Error as error:
        raise InputError(
            f'{path}, line {rows.line_num}: {error}; a field that begins with " ends with it, and has each " within it twice'
        ) from None
    finally:
        csv.field_size_limit(before)


def _row(names: list[str], row: list[str]) -> Any:
    if len(row) != len(names):
        return UnusableError(f"it has {counted(len(row), 'field')}, and the first line of the file names {len(names)}")
    return plain({name: field or None for name, field in zip(names, row, strict=True)})


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path} needs pyarrow to be read: {TEXT_EXTRA}, or give a .jsonl file") from None
    try:
        rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield Record(f"{path}, record {number}", plain(row))
    except OSError:
        raise
    except Exception as error:  # whatever pyarrow says of a file that is none of its
        raise InputError(f"cannot read {path}: {cut(str(error))}") from error


def plain(row: Any) -> Any:
    """Columns make a key of each record, and of each mapping in it, of what only some have: nothing is no value."""
    try:
        return _without_nothing(checked(row, inf))
    except ParseError as error:
        return UnusableError(str(error))


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return [_without_nothing(inner) for inner in value] if isinstance(value, list) else value
