"""A device that has no memory left in the midst of a step. Others wait for its messages, so it goes on with these, of zeros, and
computes no more; what has happened it says with the next number that all ranks add up, and then all of them know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from hetpipe.files.messages import counted, cut
from hetpipe.layers.device import is_out_of_memory
from hetpipe.processes.stopping import RunError
from hetpipe.runtime.recorder import Recorder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What is known of it: the device; for people where that is, what it was doing, and what was said; and how many bytes tensors
    could have had (None: not known). `spoils`: others have gone on, so that the parameters of all are of no one step."""

    device: str
    where: str
    doing: str
    words: str
    bytes_there: int | None = None
    spoils: bool = False

    def __str__(self) -> str:
        return f"out of memory on {self.where}, in {self.doing}: {self.words}"


class ShortMemoryError(RunError):
    """Devices have had no memory for something that all ranks do together. All of them know it, and none has the result."""

    def __init__(self, shortages: Sequence[Shortage]) -> None:
        super().__init__(tuple(shortages))
        self.shortages = tuple(shortages)

    def __str__(self) -> str:
        first, *others = self.shortages
        return f"{first} (and on {counted(len(others), 'more device')})" if others else str(first)


def words_of(error: Exception, where: str) -> str:
    """What an error says that there is no memory for, and no advice; nor where, if that is so called."""
    words = " ".join(str(error).split()).removeprefix(f"out of memory on {where}: ")
    return cut(words.partition("; ")[0] or type(error).__name__)


def bytes_there(device: torch.device) -> int | None:
    """How many bytes tensors of this process can have on a card: those that its allocator holds, and those that nobody does."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_reserved(device) + torch.cuda.mem_get_info(device)[0]


def raise_shortages(found: Sequence[Shortage | None]) -> None:
    """ShortMemoryError if any rank says so."""
    if shortages := [shortage for shortage in found if shortage is not None]:
        raise ShortMemoryError(shortages)


class Memory:
    """Whether this process has memory for what it computes. In `watched`, where it has none, the work goes on with what stands
    for the result, and there `shortage` says why; elsewhere the error is raised. `describe(error, bytes there)` says what is
    known; `recorders` are of its stages. What a computation leaves for later is dropped by `drop`."""

    def __init__(
        self, describe: Callable[[Exception, int | None], Shortage], recorders: Callable[[], Sequence[Recorder]]
    ) -> None:
        self.shortage: Shortage | None = None
        self.drop: Callable[[], None] = lambda: None
        self._describe, self._recorders, self._watched = describe, recorders, False

    @classmethod
    def unwatched(cls) -> Memory:
        """Of what is computed for no other rank."""
        return cls(lambda error, there: Shortage(device="", where="", doing="", words=str(error), bytes_there=there), lambda: ())

    @contextmanager
    def watched(self, owed: Shortage | None = None) -> Iterator[None]:
        """Something that all ranks do together, at the end of which they tell each other of a shortage; of an `owed` one, too,
        after which nothing is computed."""
        self.shortage, self._watched = owed, True
        self._be_lenient(owed is not None)
        try:
            yield
        finally:
            self.shortage, self._watched = None, False
            self._be_lenient(False)

    def attempt(self, compute: Callable[[], T], instead: Callable[[], T]) -> T:
        """What is computed; or what stands for it, where there is no memory for it, or was none for something before."""
        if self.shortage is None:
            try:
                return compute()
            except Exception as error:
                if not (self._watched and is_out_of_memory(error)):
                    raise
                found = self._describe(error, self._bytes_there())
            self._give_up(found)  # here, where the error no longer holds what the computation did
        return instead()

    def _give_up(self, found: Shortage) -> None:
        self.shortage = found
        self.drop()
        self._be_lenient(True)  # messages need room, which there is in reality
        if any(recorder.device.type == "cuda" for recorder in self._recorders()):
            torch.cuda.empty_cache()

    def _be_lenient(self, lenient: bool) -> None:
        for recorder in self._recorders():
            if recorder.meter is not None:
                recorder.meter.lenient = lenient

    def _bytes_there(self) -> int | None:
        """Of the device that was at work last."""
        recorder = max(self._recorders(), key=lambda recorder: recorder.began)
        return recorder.meter.limit if recorder.meter is not None else bytes_there(recorder.device)
