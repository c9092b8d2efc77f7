"""Other processes that read records, so that a large file takes a part of the time: forked from a server that has imported what
they need (see `hetpipe.processes.ranks.forkserver`), which runs nothing of the program that reads."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from hetpipe.language.reading.gathered import Gathered, gather
from hetpipe.language.reading.shape import Shape
from hetpipe.language.reading.texts import Texts
from hetpipe.language.records.record import Record
from hetpipe.language.tokenizer import PARALLEL
from hetpipe.processes.environment import cores
from hetpipe.processes.ranks.forkserver import Forkserver

BYTES_EACH = 8 * 2**20  # of files for a process, which takes 2 s of a processor to start, and these 5 s (docs/measurements.md)
MOST_WORKERS = 16
END_SECONDS = 1.0  # for a process to end once it has no more to read
MODULES = ("transformers", "hetpipe.language.reading.workers")


class LostError(RuntimeError):
    """A process did not read what it was to: it was killed, or what it met is told where all is read in one process."""


def how_many(size: int) -> int:
    """How many processes read files of so many bytes: none beside this one where that would not pay."""
    found = min(MOST_WORKERS, cores(), size // BYTES_EACH)
    return found if found > 1 else 0


def read_in(count: int, texts: Texts, shape: Shape, groups: Iterator[tuple[int, Sequence[Record]]]) -> Iterator[Gathered]:
    """What `gather` finds in groups of records, each with the number of its first, in their order; found in so many processes.
    LostError where one of these did not find it."""
    with _started(count, texts, shape) as idle:
        busy, found, last, at = dict[Connection, int](), dict[int, Gathered](), 0, 0
        ahead = next(groups, None)
        while ahead is not None or busy:
            while ahead is not None and idle:
                pipe = idle.pop()
                _send(pipe, ahead)
                busy[pipe], last = last, last + 1
                ahead = next(groups, None)
            for pipe in [pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection)]:
                found[busy.pop(pipe)] = _received(pipe)
                idle.append(pipe)
            while at in found:
                yield found.pop(at)
                at += 1


@contextmanager
def _started(count: int, texts: Texts, shape: Shape) -> Iterator[list[Connection]]:
    """The pipes to so many processes, which end with this."""
    os.environ.setdefault(PARALLEL, "false")  # for the server: a processor for each of them
    server, pipes = Forkserver(MODULES), list[Connection]()
    try:
        for _ in range(count):
            own, theirs = Pipe()
            pipes.append(own)
            with theirs:
                server.fork(serve, (texts, shape), theirs)
        yield list(pipes)
    except ChildProcessError as error:
        raise LostError(str(error)) from error
    finally:
        for pipe in pipes:
            pipe.close()
        left = len(pipes)
        with contextlib.suppress(EOFError):
            while left and wait([server.fileno()], END_SECONDS):
                left -= len(server.ended())
        server.end()


def _send(pipe: Connection, group: tuple[int, Sequence[Record]]) -> None:
    try:
        pipe.send_bytes(pickle.dumps(group))
    except OSError as error:
        raise LostError("a process that reads has ended") from error


def _received(pipe: Connection) -> Gathered:
    try:
        found = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError) as error:
        raise LostError("a process that reads has ended") from error
    if not isinstance(found, Gathered):
        raise LostError(str(found))
    return found


def serve(texts: Texts, shape: Shape, pipe: Connection) -> NoReturn:
    """The program of such a process: answers each group until there are no more."""
    both = Connection(os.dup(pipe.fileno()))
    with contextlib.suppress(EOFError, OSError):
        while True:
            first, records = pickle.loads(both.recv_bytes())
            try:
                answer: Gathered | str = gather(texts, shape, first, records)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            both.send_bytes(pickle.dumps(answer))
    os._exit(0)
