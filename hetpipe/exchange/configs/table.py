"""What becomes of each key of a trainer's configuration: llamafactory.yaml and axolotl.yaml."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from hetpipe.files.formats import Document, Name, Strict
from hetpipe.files.messages import Faults


class Taken(Strict):
    """Where a key goes in the job; as it is, if its `kind` is said. `default`: what the trainer takes if the key is not said."""

    to: Name
    default: Any = None
    kind: Literal["number", "count", "flag", "text"] | None = None


class Answered(Strict):
    """Keys that get the same answer. `off`: values that switch the key off; `same`: those with which the job does what their run
    does, as `kept` says."""

    why: Name
    off: tuple[Any, ...] = (False,)
    same: tuple[Any, ...] = ()
    kept: Name = "the job does the same"
    keys: tuple[Name, ...]


class Table(Document):
    """All keys of a trainer. `epochs`, `optimizer`, `scheduler` and `held_out`: what it calls these."""

    format: Literal["hetpipe.trainer_keys/1"]
    trainer: Name
    epochs: Name
    optimizer: Name
    scheduler: Name
    held_out: Name
    taken: dict[Name, Taken]
    planned: tuple[Answered, ...]
    without: tuple[Answered, ...]

    @model_validator(mode="after")
    def _one_answer_each(self) -> Self:
        listed = Counter([*self.taken, *(key for group in (*self.planned, *self.without) for key in group.keys)])
        if several := [f"{key!r} stands in it {count} times" for key, count in listed.items() if count > 1]:
            raise Faults(several)
        return self

    def planned_why(self, key: str) -> str | None:
        """Why the plan decides it; None if it does not."""
        return next((group.why for group in self.planned if key in group.keys), None)

    def lack(self, key: str) -> Answered | None:
        """The answer to a key that has no counterpart; None for another key."""
        return next((group for group in self.without if key in group.keys), None)

    @property
    def known(self) -> list[str]:
        """Every key that is known."""
        return [*self.taken, *(key for group in (*self.planned, *self.without) for key in group.keys)]


@cache
def load_table(trainer: str) -> Table:
    """The table of a trainer."""
    return Table.load(Path(__file__).with_name(f"{trainer}.yaml"))
