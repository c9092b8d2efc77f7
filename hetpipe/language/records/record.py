"""A record of a data set, with its file and line, so that one that cannot be used is told by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from hetpipe.files.messages import InputError, listed

TEXT_EXTRA = "pip install 'hetpipe[text]'"
MOST_FIRST = 8  # records that an error names
MOST_NAMED = 12  # keys that a note names


class UnusableError(ValueError):
    """Why a record cannot be used."""


class Record(NamedTuple):
    """What a record holds, or why it cannot be used, and where it stands."""

    where: str
    value: Any


class Faults:
    """Records that cannot be used: the first few, and how many."""

    def __init__(self) -> None:
        self.count, self.first = 0, list[str]()

    def add(self, where: str, why: object) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < MOST_FIRST:
            self.first.append(f"{where}: {why}")

    def join(self, other: Faults) -> None:
        """Take over the faults of the records behind these."""
        self.count += other.count
        self.first = [*self.first, *other.first][:MOST_FIRST]

    def raise_any(self, what: str, of: int, advice: str = "") -> None:
        """InputError if there is one."""
        if self.count:
            more = self.count - len(self.first)
            lines = listed(self.first) + (f"\n  … and {more} more" if more else "")
            raise InputError(f"{self.count} of {of} records {what}{advice}:\n{lines}")


class Unused:
    """Keys of records, and of their turns, that nothing reads: in how many records each stands."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def add(self, keys: Iterable[str]) -> None:
        """Count the unread keys of one more record."""
        self.counts.update(set(keys))

    def __str__(self) -> str:
        """`id (3), source (1)`; nothing where all keys are read."""
        often = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        told = [f"{key} ({count})" for key, count in often[:MOST_NAMED]]
        left = len(self.counts) - len(told)
        return ", ".join(told + [f"and {left} others"] * (left > 0))
