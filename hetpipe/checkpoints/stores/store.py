"""What every store of checkpoints does. A checkpoint has parts, which are bytes (see `tensor_files`), and a state, which is text.

What holds whatever the store is in `checkpoint`: the state is written last, once the main rank sees every part whole; what has no
state is no checkpoint; and nothing is read of one whose parts are not as they were written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import BufferedIOBase
from typing import Any, BinaryIO, Protocol, runtime_checkable

from hetpipe.processes.world import World


class RankError(OSError):
    """What one rank could not do with its part: says itself of which rank it is, and what."""


def name_of(step: int) -> str:
    """What the checkpoint of a step is called, in any store; names are in the order of steps."""
    return f"step-{step:08d}"


@runtime_checkable
class Stored(Protocol):
    """The place of a checkpoint in its store, with one in it or not. Its `str` is what messages call it."""

    @property
    def name(self) -> str:
        """See `name_of`."""
        ...

    @property
    def source(self) -> str:
        """What messages call its state."""
        ...

    def is_complete(self) -> bool:
        """Whether there is a state."""
        ...

    def describe(self) -> Any:
        """Its state, as plain values. InputError if it cannot be read."""
        ...

    def parts(self) -> Sequence[str]:
        """The parts that are there."""
        ...

    def open(self, part: str) -> BufferedIOBase:
        """The bytes of a part. OSError if it is not there."""
        ...

    def check_seen(self, world: World) -> None:
        """InputError on every rank unless all see what the main rank has found. Collective."""
        ...

    def remove(self) -> None:
        """Remove it. OSError if it cannot be."""
        ...


class Pending(Protocol):
    """A checkpoint that is being written, by any thread of a rank. Any of these may raise an OSError."""

    def prepare(self, needed: int) -> None:
        """On the main rank, before any other writes: forget what is left of an attempt before. InputError if there is no room for
        so many bytes."""
        ...

    def create(self, part: str) -> AbstractContextManager[BinaryIO]:
        """A new part of this name, into which this rank writes; it is kept safe when the context ends."""
        ...

    def note(self, part: str, text: str) -> None:
        """Tell the main rank something about a part that is kept safe."""
        ...

    def noted(self, part: str) -> str | None:
        """On the main rank: what was told about a part; None as long as it sees nothing."""
        ...

    def shows(self, part: str, size_bytes: int) -> bool:
        """Whether the main rank sees so many bytes of a part, or will soon."""
        ...

    def finish(self, state: str) -> None:
        """On the main rank, after all else: with this state it is a checkpoint, which keeps no notes."""
        ...

    def abandon(self) -> None:
        """Leave nothing of it; as often as one likes."""
        ...


class Store(Protocol):
    """A place for checkpoints. Its `str` is what messages call it."""

    def names(self) -> Sequence[str]:
        """Of what is there, complete or not, in the order of steps."""
        ...

    def stored(self, name: str) -> Stored:
        """Where the checkpoint of that name is, or will be."""
        ...

    def begin(self, step: int) -> Pending:
        """A new checkpoint, of which nothing is written yet; finished, it replaces one of the same step."""
        ...

    def check_shared(self, world: World, called: str) -> None:
        """InputError on every rank unless all see what one of them writes; `called` is the user's word for it. Collective."""
        ...

    def free_bytes(self) -> int:
        """How much room there is."""
        ...
