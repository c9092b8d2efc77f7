"""What each step of a run is given: the next global batch, of which this rank reads its part. With workers, processes of their
own read ahead of the step; what they give is the same, since each sample is drawn under a seed of its own (see `data.fetch`)."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_all_start_methods
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hetpipe.building.data import EpochSampler, MapDataset, Sampler, fetch, size_for
from hetpipe.building.streams.records import Bookmark
from hetpipe.building.streams.sampler import StreamSampler
from hetpipe.building.streams.streamed import Streamed
from hetpipe.documents.job import TrainSection
from hetpipe.files.messages import InputError
from hetpipe.processes.ranks.report import line_of, trace_of
from hetpipe.processes.whereabouts import during

Rows = tuple[Any, Any] | tuple[None, None]  # inputs and targets, or none of both


class LostWorkerError(RuntimeError):
    """A process that reads samples has ended before its time."""


class WorkerError(Exception):
    """What was raised in a process that reads samples. Its cause is the traceback there."""


class Raised(NamedTuple):
    """The words and the traceback of such an error, as the rank is told it: the error itself need not go from process to
    process, and DataLoader puts a traceback before its words, behind whose first lines they are cut off."""

    words: str
    trace: str


class Ask(NamedTuple):
    """Samples by their numbers (none: nothing is read), what decides, with a sample's number, what is drawn for it, and the size
    to which the global batch is padded, where samples are of different lengths (see `data.Ragged`)."""

    numbers: list[int]
    place: tuple[int | str, ...]
    size: int | None = None

    @classmethod
    def of(cls, numbers: Tensor | None, *place: int | str, size: int | None = None) -> Ask:
        """Of int64 [b] numbers (None: nothing is read)."""
        return cls(numbers.tolist() if numbers is not None else [], place, size)


class Batch(NamedTuple):
    """What a step is given: the numbers of the samples of the whole global batch, their epoch, this rank's part, for how many
    seconds the step has waited for it, and the size to which the whole batch is padded, on ranks that read nothing, too (None:
    samples are of one shape)."""

    numbers: Tensor
    epoch: int
    inputs: Any
    targets: Any
    seconds: float
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How samples are read: by so many `workers` (0: by this process), and made by `convert` what the model takes; `pinned` for a
    GPU."""

    convert: Callable[[Any], Any]
    workers: int = 0
    pinned: bool = False

    @contextmanager
    def open(self, dataset: MapDataset, asked: Iterable[Ask], what: Callable[[], str]) -> Iterator[Reader]:
        """The samples asked for, in their order; `what` says which is fetched now, for messages. Workers read them while this is
        open. LostWorkerError, at any time, where one of these has ended."""
        try:
            with closing(Reader(self, dataset, asked, what)) as reader:
                yield reader
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            raise self.lost(error) from error

    def lost(self, error: Exception) -> LostWorkerError:
        """What is told of an error that only a worker's end can cause."""
        return LostWorkerError(
            f"one of the {self.workers} processes that read samples has ended: {str(error).strip('. ')}. Where they are out "
            "of memory, or of room in /dev/shm, through which they hand over: data.workers=0 lets the rank read them itself"
        )


class _Samples:
    """What DataLoader takes for a data set whose samples are whole batches."""

    def __init__(self, dataset: MapDataset, convert: Callable[[Any], Any]) -> None:
        self.dataset, self.convert = dataset, convert

    def __getitem__(self, ask: Ask) -> Any:
        """Inputs and targets, and the bookmark of a stream."""
        if not ask.numbers:
            return None, None, None
        inputs, targets = fetch(self.dataset, torch.tensor(ask.numbers), *ask.place, size=ask.size)
        bookmark = self.dataset.bookmark if isinstance(self.dataset, Streamed) else None
        return self.convert(inputs), self.convert(targets), bookmark


class _SamplesOrError(_Samples):
    """In a worker, which hands over what is raised."""

    def __getitem__(self, ask: Ask) -> Any:
        try:
            return super().__getitem__(ask)
        except InputError as error:
            return error
        except (Exception, SystemExit) as error:
            return Raised(f"{type(error).__name__}: {error} ({line_of(error)})", trace_of(error))


class Reader(Iterator[Rows]):
    """Samples as they are asked for, one batch after the other. `seconds`: how long the last one was waited for; `bookmark`: of a
    stream, at or before the samples that follow, as JSON."""

    def __init__(self, reading: Reading, dataset: MapDataset, asked: Iterable[Ask], what: Callable[[], str]) -> None:
        self._what, self._reading, self.seconds = what, reading, 0.0
        self.bookmark: str | None = None
        self._found: Iterator[Any] | None
        self._life: int | None = None  # a pipe whose end workers see, of this process and of `close`
        if reading.workers == 0:
            samples = _Samples(dataset, reading.convert)
            self._found = (samples[ask] for ask in asked)
            return
        if "fork" not in get_all_start_methods():
            raise InputError("data.workers needs a system that can fork processes, and this one cannot. Leave data.workers out")
        alive, self._life = os.pipe()
        given = _SamplesOrError(dataset, reading.convert)
        loader: DataLoader[Any] = DataLoader(
            given,  # type: ignore[arg-type]
            sampler=asked,
            batch_size=None,
            num_workers=reading.workers,
            collate_fn=_as_it_is,
            pin_memory=reading.pinned,
            worker_init_fn=partial(_begin_worker, alive, self._life, isinstance(dataset, Streamed)),
            multiprocessing_context="fork",
            generator=torch.Generator(),  # else a number is drawn from the user's
        )
        with warnings.catch_warnings():  # from Python 3.12 on, of the threads that wait for other ranks
            warnings.simplefilter("ignore", DeprecationWarning)
            self._found = iter(loader)
        os.close(alive)

    def __next__(self) -> Rows:
        """The next batch. InputError if a sample cannot be read; WorkerError for what else a worker has raised."""
        if self._found is None:
            raise StopIteration
        began = time.perf_counter()
        with during(f"fetching {self._what()}"):
            found = self._next()
        self.seconds = time.perf_counter() - began
        inputs, targets, self.bookmark = found
        return (_as_tuples(inputs), _as_tuples(targets)) if self._reading.workers else (inputs, targets)

    def _next(self) -> Any:
        assert self._found is not None
        if self._reading.workers == 0:
            return next(self._found)
        try:
            found = next(self._found)
        except (ConnectionError, EOFError, FileNotFoundError) as error:  # it keeps what it has read until that is taken
            raise self._reading.lost(error) from error
        if isinstance(found, Raised):
            raise WorkerError(found.words) from WorkerError(found.trace)
        if isinstance(found, InputError):
            raise found
        return found

    def close(self) -> None:
        """Read no more: workers end, those too that DataLoader cannot tell, since an error holds it."""
        self._found = None
        if self._life is not None:
            os.close(self._life)
            self._life = None


def sampler_of(dataset: MapDataset, train: TrainSection) -> tuple[Sampler, int]:
    """Return what draws the samples of each step, and how many steps the run has."""
    if isinstance(dataset, Streamed):
        assert train.steps is not None  # build_data has seen to it
        return StreamSampler(train.global_batch, block=dataset.shuffle, seed=train.seed), train.steps
    sampler = EpochSampler.of(dataset, train.global_batch, seed=train.seed)
    return sampler, train.steps or (train.epochs or 0) * sampler.batches_per_epoch


class Feed:
    """The batches of a run in the order of `sampler`. `share` gives this rank's part of a global batch of numbers; None on a rank
    that reads nothing."""

    def __init__(self, dataset: MapDataset, sampler: Sampler, share: Callable[[Tensor], Tensor | None], reading: Reading) -> None:
        self.dataset, self.sampler, self.share, self.reading = dataset, sampler, share, reading
        self._bookmark: str | None = None  # as JSON, of which only a checkpoint makes more
        self._state = sampler.state_dict()

    def state_dict(self) -> Any:
        """The place in the data after the batch that was given last, whatever is read ahead of it."""
        return self._state

    @property
    def place(self) -> tuple[Any, str | None]:
        """The place in the data, and the bookmark of a stream, after the batch that was given last. It can be set back where a
        step could not use its batch."""
        return self._state, self._bookmark

    @place.setter
    def place(self, place: tuple[Any, str | None]) -> None:
        self._state, self._bookmark = place

    @property
    def bookmark(self) -> Bookmark | None:
        """The place in a stream at or before the samples that follow; None on ranks that do not read it."""
        return Bookmark.model_validate_json(self._bookmark) if self._bookmark is not None else None

    def load_state_dict(self, state: Any, bookmark: Bookmark | None = None) -> None:
        """Go on from there, in a stream with the help of a bookmark. ValueError if it is of other data."""
        if (state.get("kind") == "stream") != isinstance(self.dataset, Streamed):
            was, now = ("a stream", "none") if state.get("kind") == "stream" else ("no stream", "one")
            raise ValueError(
                f"the checkpoint was saved over {was}, and the data are {now}: resume on the same data, or start anew"
            )
        self.sampler.load_state_dict(state)
        self._state = self.sampler.state_dict()
        self._bookmark = bookmark.model_dump_json() if bookmark is not None else None

    @contextmanager
    def open(self, steps: int, what: Callable[[], str]) -> Iterator[Iterator[Batch]]:
        """The batches of the next `steps`. `what` says which is fetched now, for messages."""
        drawn = deque[tuple[Tensor, Any, int | None]]()
        if isinstance(self.dataset, Streamed):
            self.dataset.rewind(self.bookmark)
        try:
            with self.reading.open(self.dataset, self._ask(steps, drawn), what) as reader:
                yield self._batches(drawn, reader)
        finally:
            self.sampler.load_state_dict(self._state)  # of what was read ahead, nothing was given

    def _ask(self, steps: int, drawn: deque[tuple[Tensor, Any, int | None]]) -> Iterator[Ask]:
        for numbers in islice(self.sampler.forever(), steps):
            state, size = self.sampler.state_dict(), size_for(self.dataset, numbers)
            drawn.append((numbers, state, size))
            yield Ask.of(self.share(numbers), state["seed"], state.get("epoch", 0), size=size)

    def _batches(self, drawn: deque[tuple[Tensor, Any, int | None]], reader: Reader) -> Iterator[Batch]:
        for inputs, targets in reader:
            numbers, self._state, size = drawn.popleft()
            self._bookmark = reader.bookmark or self._bookmark
            yield Batch(numbers, self._state.get("epoch", 0), inputs, targets, reader.seconds, size)


def _as_it_is(value: Any) -> Any:
    return value


def _as_tuples(value: Any) -> Any:
    """What was pinned has lists where tuples were."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _begin_worker(alive: int, life: int, whole: bool, _: int) -> None:
    """Signals are for the rank, which ends its workers when it has heeded them. They end with it, however it ends: they have its
    sockets, too, by whose end other ranks see that it is gone. `whole`: a stream is to give all its records to each worker, and
    many give only a part where torch says that there are several workers."""
    if whole:
        torch.utils.data.get_worker_info = lambda: None
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)
    os.close(life)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: int) -> None:
    os.read(alive, 1)
    os._exit(0)
