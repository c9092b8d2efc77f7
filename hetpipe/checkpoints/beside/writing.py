"""A checkpoint that each rank writes in a thread of its own, beside the steps that follow.

The threads send each other nothing: each notes in the store what it has written, and that of the main rank, once it sees all
parts, makes a checkpoint of them and forgets older ones. So it is complete as soon as all is written, whatever step that is in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from pydantic import ValidationError

from hetpipe.checkpoints.checkpoint import Begun
from hetpipe.checkpoints.digests import Written
from hetpipe.checkpoints.stores.store import Stored

T = TypeVar("T")

LOOK_SECONDS = 0.1  # between looks for what others have noted
STOP_SECONDS = 2.0  # for a thread to leave what it writes: a piece of some MiB, or what is on its way to the disk


class Writing:
    """What was begun, with copies of its tensors, on its way into the store. Every rank makes one, and calls `complete`; each may
    look meanwhile whether it `is_busy`, and gives up alone by `abandon`. `done` is called where it is known to be complete, on
    the main rank by its thread."""

    def __init__(self, begun: Begun, keep: int, spared: str | None, done: Callable[[Stored], None]) -> None:
        """See `Begun.finish`: InputError, or CheckpointError, on every rank."""
        self.begun, self._keep, self._spared, self._done = begun, keep, spared, done
        self._part, self._whole = Future[Written | None](), Future[None]()  # the latter on the main rank
        self._all_written: Mapping[str, Written] | None = None  # as all ranks have said
        self._stopped, self._concludes, self._deciding, self._changed = False, False, threading.Lock(), threading.Event()
        with begun.or_nothing():
            begun.prepare()
        threading.Thread(target=self._run, name=f"saving step {begun.step}", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether this rank is at it, and not done, or waiting for what others have written."""
        return not self._part.done() or (self._concludes and not self._whole.done())

    def complete(self) -> Stored:
        """Wait until it is complete. CheckpointError on every rank if it cannot be written, and nothing of it is left then."""
        with self.begun.or_nothing(self.abandon):
            try:
                self._all_written = self.begun.all_written(self._part.result)
                self._changed.set()
            except OSError:
                self._stop()  # the main rank's thread waits for all parts
                raise
            self.begun.world.on_main(self._whole.result)
        self._done(self.begun.final)
        return self.begun.final

    def abandon(self) -> None:
        """Leave nothing of it, as far as this rank can alone, and soon; but what the main rank concludes it concludes."""
        self._stop()
        last: Future[Any] = self._whole if self._concludes else self._part
        wait([last], STOP_SECONDS)
        failed = self._whole.done() and isinstance(self._whole.exception(), OSError)
        if self.begun.world.is_main and (failed or not self._concludes):
            self.begun.pending.abandon()
        elif self.begun.final.is_complete():
            self._done(self.begun.final)

    def _stop(self) -> None:
        with self._deciding:
            self._stopped = True
        self._changed.set()

    def _run(self) -> None:
        _into(self._part, self._write)
        if self.begun.world.is_main and self._part.exception() is None:
            _into(self._whole, self._conclude)

    def _write(self) -> Written | None:
        written = self.begun.write(lambda: self._stopped)
        if self._stopped:
            raise InterruptedError  # others may have removed it by now, and a note would make it again
        if written is not None and self.begun.part is not None and not self.begun.world.is_main:
            self.begun.pending.note(self.begun.part, written.model_dump_json())
        return written

    def _conclude(self) -> None:
        """On the main rank: as soon as all parts are there."""
        while (files := self._seen()) is None and not self._stopped:
            self._changed.wait(LOOK_SECONDS)
        with self._deciding:
            if self._stopped or files is None:
                raise InterruptedError
            self._concludes = True
        self.begun.conclude(files)
        self._done(self.begun.final)
        self.begun.forget(self._keep, self._spared)

    def _seen(self) -> Mapping[str, Written] | None:
        """What is in all parts, as they say themselves, or as all ranks have said; None as long as one is missing."""
        if self._all_written is not None:
            return self._all_written
        found = dict[str, Written]()
        for part in self.begun.parts:
            if part is not None:
                own = self._part.result() if part == self.begun.part else self._noted(part)
                if own is None:
                    return None
                found[part] = own
        return found

    def _noted(self, part: str) -> Written | None:
        try:
            text = self.begun.pending.noted(part)
            return Written.model_validate_json(text) if text else None
        except (OSError, ValidationError):  # it is on its way, or will be told by all ranks
            return None


def _into(future: Future[T], action: Callable[[], T]) -> None:
    """The future gets what the action gives, or raises."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
