"""What a data set calls the keys of its records and turns, and the roles of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.language.records.record import UnusableError

OF_RECORDS = (
    "messages",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "question",
    "answer",
    "response",
    "system",
    "history",
    "tools",
    "text",
)
OF_TURNS = ("role", "content")
OF_PREFERENCES = ("chosen", "rejected")
ROLES = ("system", "developer", "user", "assistant", "tool")
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight")  # whether a turn is learned
KNOWN = tuple(dict.fromkeys((*OF_RECORDS, *OF_TURNS, *ROLES, *MARKS, *OF_PREFERENCES, "label")))


class Columns:
    """Our name of a key, or of a role → what the data set calls it; "" where it is to be left alone. A name that a job gives
    takes the place of those that are known otherwise."""

    def __init__(self, given: Mapping[str, str | None] | None = None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise InputError(f"columns must be a mapping, such as {{prompt: question, completion: answer}}, found {shown(given)}")
        self.given = {key: name or "" for key, name in (given or {}).items()}
        for key, name in self.given.items():
            if key not in KNOWN:
                raise InputError(f"columns has the unknown name {shown(key)}{nearest(str(key), KNOWN)}")
            if not isinstance(name, str):
                raise InputError(f"columns.{key} must be the name of a column, found {shown(name)}")
        self.unseen = {key for key, name in self.given.items() if name}
        self._role_of = {name: key for key, name in self.given.items() if key in ROLES and name}

    def of(self, value: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
        """The values of a record, or of a turn, under our names."""
        found = dict(value)
        for key in known:
            name = self.given.get(key)
            if name is None or name == key:
                self.unseen -= {key} & found.keys()
                continue
            hidden = found.pop(key, None)  # another column takes its name
            if name in found:
                found[key] = found.pop(name)
                self.unseen.discard(key)
            if hidden is not None:
                found[f"{key} "] = hidden  # which nothing reads
        return found

    def asked(self, record: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
        """Return which of these keys a job gives a column for that the record has."""
        return [key for key in keys if self.given.get(key) and key in record]

    def role(self, name: str) -> str:
        """Our name of a role, or the data set's own."""
        if name in self._role_of:
            self.unseen.discard(self._role_of[name])
            return self._role_of[name]
        return name

    def missing(self, record: Mapping[str, Any], what: str) -> UnusableError:
        """What is said of a record that lacks `what`."""
        mapped = ", ".join(f"{key}: {name}" for key, name in self.given.items())
        more = f"; columns: {{{mapped}}}" if mapped else "; columns gives keys other names, as in {prompt: ask, content: says}"
        keys = sorted(self.given.get(key) or key.removesuffix(" ") for key in record)
        return UnusableError(f"it has {what}; its keys: {shown(keys)}{more}")

    def check_seen(self) -> None:
        """InputError for a column that no record has."""
        if self.unseen:
            key = min(self.unseen)
            raise InputError(
                f"columns.{key} is {shown(self.given[key])}, but no record has this key. Write the name of a key of the records"
            )
