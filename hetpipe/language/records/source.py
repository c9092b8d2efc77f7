"""Where records come from: files, patterns of their names, folders, or a data set of the hub."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.files.messages import InputError, cut, shown
from hetpipe.language.records.contents import Contents, contents_of
from hetpipe.language.records.files import KINDS, plain, records_of
from hetpipe.language.records.record import TEXT_EXTRA, Record

HUB = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
LINES = ".jsonl"  # the ending of files with a record in each line
HELD_OUT = re.compile(r"(?:^|[^a-z])(test|valid|validation|val|dev|eval|evaluation|heldout)(?:[^a-z]|$)", re.IGNORECASE)


class Found(NamedTuple):
    """What is in the files of a source, in their order: their names, and what each holds."""

    names: tuple[str, ...]
    contents: tuple[Contents, ...]

    @property
    def size(self) -> int:
        """Return how many bytes they have."""
        return sum(each.size for each in self.contents)

    def records(self, limit: int | None) -> int | None:
        """Return how many records they have, of which so many are read at most; None where their lines do not tell."""
        if not all(name.endswith(LINES) for name in self.names):
            return None
        lines = sum(each.lines for each in self.contents)
        return lines if limit is None else min(lines, limit)


class Source(NamedTuple):
    """Where records come from: files, patterns such as `data/*.jsonl`, folders, or the name of a data set of the hub, of which
    `split` and `subset` are read; only the first `limit`, if that is said."""

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

    def places(self) -> list[Path | str]:
        """The files in the order in which they are read, and names of the hub. InputError where there is no such file, where a
        file is named twice, or where a folder has files to train on beside others to test on."""
        found = list[Path | str]()
        for name in self.names:
            path = Path(os.path.expanduser(name))
            if os.path.isdir(path):
                found += _within(path)
            elif os.path.lexists(path):
                found.append(path)
            elif glob.has_magic(name):
                found += _matching(name)
            elif HUB.fullmatch(name) and not name.endswith(KINDS):
                found.append(name)
            else:
                raise InputError(f"there is no file or folder {cut(name, 200)!r} (from {Path.cwd()})")
        whole = Counter(place if isinstance(place, str) else os.path.abspath(place) for place in found)
        if (double := next((place for place, count in whole.items() if count > 1), None)) is not None:
            raise InputError(f"{cut(str(double), 200)} is named twice, so its records would count twice. Name it once")
        return found

    def found(self) -> Found | None:
        """Return what is in the files; None where that is not known: of a data set of the hub that is in no files."""
        names, contents = list[str](), list[Contents]()
        for place in self.places():
            paths = [place] if isinstance(place, Path) else _files_of(_loaded(place, self.split, self.subset))
            if not paths:
                return None
            names += map(str, paths)
            contents += map(contents_of, paths)
        return Found(tuple(names), tuple(contents))

    def records(self) -> Iterator[Record]:
        """Yield all records, in the order of the files' names in a folder. InputError where there are none."""
        return islice(self._all(), self.limit)

    def _all(self) -> Iterator[Record]:
        for place in self.places():
            yield from records_of(place) if isinstance(place, Path) else _hub(place, self.split, self.subset)


def _within(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in KINDS and file.is_file())
    if not found:
        there = sorted(file.name for file in folder.iterdir())
        raise InputError(f"the folder {folder} holds no file that ends in {', '.join(KINDS)}; found: {shown(there)}")
    others = [file.name for file in found if HELD_OUT.search(file.stem)]
    if others and len(others) < len(found):
        raise InputError(
            f"the folder {folder} holds {shown(others)} beside {len(found) - len(others)} others, and all would be trained on. "
            "Name the files to train on (several, or a pattern such as 'data/train*.jsonl')"
        )
    return found


def _matching(pattern: str) -> list[Path]:
    found = sorted(Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(match))
    if not found:
        raise InputError(f"no file matches {cut(pattern, 200)!r} (from {Path.cwd()})")
    return found


def _hub(name: str, split: str, subset: str | None) -> Iterator[Record]:
    for number, row in enumerate(_loaded(name, split, subset), 1):
        yield Record(f"{name}, split {split}, record {number}", plain(row))


def _files_of(rows: Any) -> list[Path]:
    """The files that hold a data set of the hub on this machine; empty where it is in memory."""
    return [Path(each["filename"]) for each in getattr(rows, "cache_files", ())]


def _loaded(name: str, split: str, subset: str | None) -> Any:
    """A data set of the hub, as the library `datasets` has it."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"there is no file or folder {name!r} (from {Path.cwd()}); for a data set of this name of the hub, {TEXT_EXTRA}"
        ) from None
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # whatever it says of a name, a split, a network
        raise InputError(
            f"there is no file or folder {name!r} (from {Path.cwd()}), and as a data set of the hub, split {split!r}, it cannot "
            f"be had: {cut(' '.join(str(error).split()))}"
        ) from error
