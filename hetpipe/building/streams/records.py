"""The records of a stream, one after the other, and a bookmark by which a later run finds the same place again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hetpipe.building.content import Looked
from hetpipe.files.formats import Count, Strict
from hetpipe.files.messages import InputError, cut


class Bookmark(Strict):
    """The place before a record. `number` counts the records before it, since the begin of the first pass; `passes` counts the
    passes that were over by then, and the present one began with record `begins`. `state` is what the records' own `state_dict`
    gave there (None: they have none, or none of plain values). `next_record` is the record that follows, `last_record` the last
    that was read when the bookmark was taken, perhaps far behind it."""

    number: Count
    passes: Count
    begins: Count
    state: dict[str, Any] | None = None
    next_record: Looked
    last_record: Looked


class StateError(InputError):
    """A source does not take a state."""


class Place(NamedTuple):
    """A Bookmark without its records."""

    number: int = 0
    passes: int = 0
    begins: int = 0
    state: dict[str, Any] | None = None


class Records:
    """Reads the records of `source` from a bookmark on, pass after pass. Each `iter(source)` begins a pass. If the source has a
    method `set_epoch`, it is told the number of the pass, as torch's samplers and Hugging Face's data sets are.

    Args:
        fresh: the state of a source that has one, before any record was read.
        leads_back: whether a later state of the source leads back to where it was taken.

    Attributes:
        number: how many records come before the next one, as in a Bookmark.
    """

    def __init__(
        self, source: Iterable[Any], fresh: dict[str, Any] | None, at: Place | None = None, *, leads_back: bool = True
    ) -> None:
        self.source, self.fresh, self.leads_back = source, fresh, leads_back
        self.number, self.passes, self.begins, self._state = at or Place()
        if self._state is None:
            self.number = self.begins  # the records before the place in this pass are to be passed over
        self._open: Iterator[Any] | None = None

    def read(self) -> Any:
        """Return the next record, of the next pass at the end of this one. InputError if a pass has no records."""
        if self._open is None:
            self._open = self._begun()
        for record in self._open:
            self.number += 1
            return record
        if self.number == self.begins:
            raise InputError(f"{_kind(self.source)} gives no records, so there is nothing to train on")
        self.passes, self.begins, self._open = self.passes + 1, self.number, None
        return self.read()

    def close(self) -> None:
        """Read no more. Some sources are wrong if a pass begins while another is open."""
        close = getattr(self._open, "close", None)
        self._open = None
        if close is not None:
            close()

    def place(self) -> Place:
        """Return the present place."""
        state = plain_state(self.source) if self._open is not None and self.leads_back else self._state
        return Place(self.number, self.passes, self.begins, state)

    def _begun(self) -> Iterator[Any]:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.passes)
        state, self._state = self._state or self.fresh, None
        if state is not None:
            try:
                self.source.load_state_dict(state)  # type: ignore[attr-defined]
            except Exception as error:  # whatever a source says of a state that is another's
                raise StateError(f"{_kind(self.source)} does not take its state: {type(error).__name__}: {error}") from error
        found = iter(self.source)
        if found is self.source:
            raise InputError(
                f"{_kind(self.source)} can be read once only, since iter() gives it back as it is. Give an object whose iter() "
                "begins anew, such as a class whose __iter__ yields the records"
            )
        return found


def plain_state(source: object) -> dict[str, Any] | None:
    """Return what the `state_dict` of a source gives; None if it has none that a checkpoint can hold in plain values."""
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return None
    try:
        state = source.state_dict()
        text = json.dumps(state)
    except Exception:  # whatever a source says that has no state now
        return None
    plain: Any = json.loads(text)
    return plain if isinstance(plain, dict) and plain == state else None


def _kind(source: object) -> str:
    return f"the stream {cut(type(source).__name__, 60)}"
