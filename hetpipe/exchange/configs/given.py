"""A trainer's configuration: its keys by type, the job that it becomes, and what is to be said of a key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.exchange.configs.table import Table
from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError, nearest, shown

YES, NO = ("true", "yes", "on"), ("false", "no", "off")  # as YAML 1.1 has them


@dataclass(frozen=True)
class Given:
    """The `keys` of a configuration file, and what is made of them: the `job`; `notes`, what differs for a key that is taken
    over; `lost`, why a key has no counterpart with the value that it has here. `inner`: the keys of entries of lists, such as
    datasets[0].path. `also`: where a key goes beside the place of the table; `overruled`: keys whose default another key
    overrules."""

    keys: Mapping[str, Any]
    source: str
    table: Table
    job: dict[str, Any]
    notes: dict[str, str]
    lost: dict[str, str]
    inner: dict[str, Any]
    also: dict[str, str]
    overruled: set[str]

    @classmethod
    def read(cls, path: Path, table: Table) -> Given:
        """InputError if the file is no mapping."""
        keys = read_mapping(path)
        if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
            raise InputError(f"{path}: expected the keys of a configuration of {table.trainer}, found {shown(keys)}")
        return cls(keys, str(path), table, {"format": "hetpipe.job/1"}, {}, {}, {}, {}, set())

    def said(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.keys.get(key) not in (None, "")

    def fault(self, key: str, what: str) -> InputError:
        """The error about a key's value; `what`: what is wrong, and what to do."""
        return InputError(f"{self.source}: {key} is {shown(self.keys.get(key))}. {what}")

    def value(self, key: str) -> Any:
        """The key's value, or the trainer's default (None if it has none)."""
        known = self.table.taken.get(key)
        return self.keys[key] if self.said(key) else known.default if known is not None else None

    def number(self, key: str) -> float | None:
        """A number, also as text (`2e-5`)."""
        value = self.value(key)
        if value is None:
            return None
        try:
            found = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise self.fault(key, "Write a number")
        return found

    def count(self, key: str) -> int | None:
        """A whole number."""
        found = self.number(key)
        if found is None:
            return None
        if found != int(found):
            raise self.fault(key, "Write a whole number")
        return int(found)

    def positive(self, key: str) -> int | None:
        """A whole number above 0."""
        found = self.count(key)
        if found is not None and found < 1:
            raise self.fault(key, "Write a whole number above 0")
        return found

    def flag(self, key: str) -> bool:
        """Whether it is on; off where nothing is said."""
        value = self.value(key)
        word = str(value).lower()
        if value is not None and word not in (*YES, *NO):
            raise self.fault(key, "Write true or false")
        return word in YES

    def text(self, key: str) -> str | None:
        """A text."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(key, "Write a text")
        return value

    def one_of(self, key: str, known: Sequence[str]) -> str:
        """A text that is one of these."""
        value = str(self.text(key))
        if value not in known:
            raise self.fault(key, f"It is not known{nearest(value, known)}")
        return value

    def names(self, key: str) -> list[str]:
        """A list of texts, or one text with commas; empty where nothing is said."""
        value = self.value(key)
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
        if (value is not None and not parts) or not all(isinstance(part, str) for part in parts):
            raise self.fault(key, "Write a list of names")
        return [part.strip() for part in parts if part.strip()]

    def overrule(self, key: str, by: str) -> None:
        """Note that this key has no say, because another one has."""
        self.overruled.add(key)
        self.notes[key] = f"{by} says it"

    def required(self, key: str, what: str) -> str:
        """A text that has to be there; `what` it is."""
        found = self.text(key)
        if found is None:
            raise InputError(
                f"{self.source}: {key} is missing: {what}. Is this the configuration of a run of {self.table.trainer}?"
            )
        return found

    def put(self, path: str, value: Any) -> None:
        """Write a value into the job, at `section.key`."""
        *sections, last = path.split(".")
        place = self.job
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value

    def put_plain(self, sections: Sequence[str]) -> None:
        """Write every key of these sections that is taken over as it is."""
        for key, known in self.table.taken.items():
            if known.kind is not None and known.to.partition(".")[0] in sections:
                value = {"number": self.number, "count": self.count, "flag": self.flag, "text": self.text}[known.kind](key)
                if value is not None:
                    self.put(known.to, value)
