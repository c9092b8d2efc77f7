"""A second store of checkpoints, in this process's memory: all that another store is; and ranks that are threads, for it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, BinaryIO, TypeVar

from hetpipe.checkpoints.stores.store import name_of
from hetpipe.files.parsing import parse_json
from hetpipe.processes.world import World

STATE = "state"  # the last part of a checkpoint
T = TypeVar("T")


@dataclass
class MemoryStore:
    """Checkpoints as bytes: name → part → what is in it. Where one is half-written, its parts are there as the others' are."""

    held: dict[str, dict[str, bytes]] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)  # parts for which there is no room
    gates: dict[str, threading.Event] = field(default_factory=dict)  # before which the part of this name is not written
    reached: set[str] = field(default_factory=set)  # gates at which a writer has come
    notes: dict[tuple[str, str], str] = field(default_factory=dict)  # (name, part) → what is noted of it

    def __str__(self) -> str:
        return "memory"

    def names(self) -> list[str]:
        return sorted(self.held)

    def stored(self, name: str) -> Held:
        return Held(self, name)

    def begin(self, step: int) -> Held:
        return Held(self, name_of(step))

    def check_shared(self, world: World, called: str) -> None:
        """Threads share their memory."""

    def free_bytes(self) -> int:
        return 0 if self.full else 1 << 30

    def pass_gate(self, name: str) -> None:
        if name in self.gates:
            self.reached.add(name)
            assert self.gates[name].wait(60)


@dataclass(frozen=True)
class Held:
    """A checkpoint there, pending or complete."""

    store: MemoryStore
    name: str

    def __str__(self) -> str:
        return f"{self.store}:{self.name}"

    @property
    def source(self) -> str:
        return f"{self}/{STATE}"

    @property
    def _content(self) -> dict[str, bytes]:
        return self.store.held.get(self.name, {})

    def is_complete(self) -> bool:
        return STATE in self._content

    def describe(self) -> Any:
        return parse_json(self._content[STATE].decode())

    def parts(self) -> list[str]:
        return sorted(self._content.keys() - {STATE})

    def open(self, part: str) -> BytesIO:
        if part not in self._content:
            raise FileNotFoundError(errno.ENOENT, "No such part", part)
        return BytesIO(self._content[part])

    def check_seen(self, world: World) -> None:
        """All threads see the same."""

    def remove(self) -> None:
        del self.store.held[self.name]

    def prepare(self, needed: int) -> None:
        self.store.held[self.name] = {}
        self.store.notes.clear()

    @contextmanager
    def create(self, part: str) -> Iterator[BinaryIO]:
        if part in self.store.full:
            raise OSError(errno.ENOSPC, "No space left in memory")
        with BytesIO() as file:
            self.store.pass_gate(part)
            yield file
            self._content[part] = file.getvalue()

    def note(self, part: str, text: str) -> None:
        self.store.notes[self.name, part] = text

    def noted(self, part: str) -> str | None:
        return self.store.notes.get((self.name, part))

    def shows(self, part: str, size_bytes: int) -> bool:
        return len(self._content.get(part, b"")) == size_bytes

    def finish(self, state: str) -> None:
        self.store.pass_gate(STATE)
        self._content[STATE] = state.encode()

    def abandon(self) -> None:
        self.store.held.pop(self.name, None)


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(World):
    """A rank that is a thread: what it says goes through a list that all of them see."""

    said: list[Any]
    barriers: threading.Barrier

    def gather(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        self.barriers.wait(60)
        found = list(self.said)
        self.barriers.wait(60)
        return found

    def first(self, value: Any) -> Any:
        return self.gather(value)[0]

    def barrier(self) -> None:
        self.gather(None)


def on_threads(count: int, program: Callable[[World], T]) -> list[T]:
    """`program(world)` on so many ranks; the results in rank order."""
    said, barriers, ranks = [None] * count, threading.Barrier(count), tuple(range(count))
    worlds = [
        ThreadWorld(rank=rank, size=count, device_id=None, rank_of={}, ranks=ranks, control=None, said=said, barriers=barriers)
        for rank in ranks
    ]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(program, worlds))
