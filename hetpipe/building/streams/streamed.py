"""Samples of a stream, asked for by their numbers: what comes before them is passed over without being made a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hetpipe.building.content import Looked, look
from hetpipe.building.streams.records import Bookmark, Place, Records, StateError, plain_state
from hetpipe.files.messages import InputError
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import Activity, warn
from hetpipe.processes.whereabouts import during

HEAD = 32  # records at the begin that stay in memory, since the data are looked at there before training begins
MANY = 1000  # records that are passed over with a line of progress


class Streamed(Dataset[Any]):
    """Samples that are made of the records of a stream, which has no known length.

    Each process that trains reads all records in their order, and calls `sample` for those only that it trains on. So keep what
    is expensive (tokens, decoded images) in `sample`. At the end of the records the stream begins anew.

    Args:
        records: an object whose `iter()` begins anew and yields the same records each time, such as an IterableDataset of torch
            or of Hugging Face's `datasets` (`load_dataset(…, streaming=True)`). If it has `state_dict` and `load_state_dict`, a
            run resumes at its place at once; otherwise the records before that place are read again. If it has `set_epoch`, it is
            told the number of each pass.
        sample: makes a pair (inputs, target) of a record. None: the records are such pairs.
        shuffle: mix so many records in a row with each other; each process holds so many in memory. 1 keeps the stream's order.
    """

    def __init__(
        self, records: Iterable[Any], sample: Callable[[Any], tuple[Any, Any]] | None = None, *, shuffle: int = 1
    ) -> None:
        if not hasattr(records, "__iter__"):
            raise InputError(f"Streamed: records must be iterable, found {type(records).__name__}")
        if isinstance(shuffle, bool) or not isinstance(shuffle, int) or shuffle < 1:
            raise InputError(f"Streamed: shuffle must be a number of records of at least 1, found {shuffle!r}")
        self.records, self.sample, self.shuffle = records, sample, shuffle
        self._fresh = plain_state(records)
        self._leads_back = True
        self._head = list[Any]()
        self._from: Bookmark | None = None
        self._reader: Records | None = None
        self.rewind()

    def then(self, change: Callable[[Any], Any]) -> Streamed:
        """Return the same stream with each sample changed."""
        sample = self.sample
        found = Streamed(self.records, lambda record: change(sample(record) if sample else record), shuffle=self.shuffle)
        found._fresh = self._fresh
        return found

    def rewind(self, to: Bookmark | None = None) -> None:
        """Close what is open. The next samples are read from a bookmark on, by default from the last one that was given."""
        self._from = to or self._from
        self._close()
        self._window = dict[int, Any]()  # the records that may still be asked for, by their numbers
        self._low = 0  # the number of the first of them
        self._marks = list[tuple[Place, Looked]]()  # with the record that follows
        self._last: Looked | None = None  # record that was read

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    @property
    def bookmark(self) -> str | None:
        """A bookmark as JSON, at or before all samples that may still be asked for; None before any was read."""
        if not self._marks or self._last is None:
            return None
        place, record = self._marks[0]
        return Bookmark(**place._asdict(), next_record=record, last_record=self._last).model_dump_json()

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        records = self._found(numbers)
        return [self.sample(record) for record in records] if self.sample is not None else records

    def _found(self, numbers: Sequence[int]) -> list[Any]:
        if not self._head:
            self._look_ahead()
        if self._reader is None and max(numbers) < HEAD:
            return [self._head[number] for number in numbers]
        low = min(numbers) // self.shuffle * self.shuffle
        if self._reader is None or low < self._low:
            self._close()
            self._reader = self._opened(low)
        self._forget_below(low)
        self._read_up_to(max(numbers) + 1, self._reader)
        return [self._window[number] for number in numbers]

    def _look_ahead(self) -> None:
        """Read the head, and see whether another reading gives the same, and whether the state of the records leads back to where
        it was taken. That of Hugging Face's streams does not, where a buffer mixes them (`shuffle`)."""
        reader = self._records(None)
        self._head = [reader.read() for _ in range(HEAD // 2)]
        mark = reader.place()
        self._head += [reader.read() for _ in range(HEAD - HEAD // 2)]
        reader.close()
        if not self._gives_head(self._records(None), 0, HEAD // 2):
            raise InputError(
                f"{type(self.records).__name__} gives other records each time it is read, so each process would read others. Let "
                "its __iter__ begin with a seed of its own, or draw in the function `sample`, in which all processes draw alike. "
                "(What mixes streams in threads of its own, as some of `datasets` do, may give another order each time.)"
            )
        self._leads_back = mark.state is None or self._gives_head(self._records(mark), HEAD // 2, HEAD)
        if not self._leads_back and own_rank() == 0:
            warn(
                f"note: the state_dict of {type(self.records).__name__} does not lead back to where it was taken, since a buffer "
                "mixes its records. So a run that resumes reads the records before its place again, up to a pass. "
                "hetpipe.Streamed(…, shuffle=NUMBER) mixes records in such a way that this is not needed"
            )

    def _gives_head(self, reader: Records, first: int, end: int) -> bool:
        with closing(reader), suppress(StateError):
            return all(look(n, reader.read()).is_alike(look(n, self._head[n])) for n in range(first, end))
        return False

    def _records(self, at: Place | None) -> Records:
        return Records(self.records, self._fresh, at, leads_back=self._leads_back)

    def _forget_below(self, low: int) -> None:
        self._low = low
        for number in [number for number in self._window if number < low]:
            del self._window[number]
        while len(self._marks) > 1 and self._marks[1][0].number <= low:
            del self._marks[0]

    def _read_up_to(self, end: int, reader: Records) -> None:
        if reader.number >= end:
            return
        place = reader.place()
        with during("reading the stream"):
            for number, record in self._passed(reader, end):
                if number == place.number:
                    self._marks.append((place, look(number, record)))
                if number < HEAD and not look(number, record).is_alike(look(number, self._head[number])):
                    raise InputError(
                        f"{type(self.records).__name__} gives this process other records than the one that it was made in, from "
                        f"record {number} on. Let it give all records to each process, or leave data.workers out"
                    )
                if number >= self._low:
                    self._window[number] = record
        self._last = look(number, record)

    def _passed(self, reader: Records, end: int) -> Iterator[tuple[int, Any]]:
        """Yield the records up to this number, with their numbers. Tell how far it is, where many are passed over."""
        over = (max(self._low, reader.number) - reader.number) // MANY
        with Activity("passing over records, in thousands", over, shown=over > 0 and own_rank() == 0, inner=True) as activity:
            while reader.number < end:
                number = reader.number
                yield number, reader.read()
                if number % MANY == 0 and activity.done < over:
                    activity.advance()

    def _leads(self, reader: Records, at: Bookmark) -> bool:
        """Whether a reader gives the records of the bookmark. Those that may be asked for are kept."""
        self._window = {}
        for number, record in self._passed(reader, at.last_record.number + 1):
            for known in (at.next_record, at.last_record):
                if known.number == number and not look(number, record).is_alike(known):
                    return False
            if number >= self._low:
                self._window[number] = record
        return True

    def _opened(self, low: int) -> Records:
        """Return a reader at or before the record of this number. InputError if the records behind the bookmark are others than
        they were, both by the state of the records and read from the begin of the pass."""
        self._window, self._marks, self._low, at = {}, [], low, self._from
        if at is None or at.number > low:
            return self._records(None)
        for state in dict.fromkeys((at.state is not None, False)):
            place = Place(at.number, at.passes, at.begins, at.state if state else None)
            reader = self._records(place)
            with suppress(StateError):
                if self._leads(reader, at):
                    self._marks, self._last = [(place, at.next_record)], at.last_record
                    return reader
            reader.close()
        raise InputError(
            f"records {at.number} to {at.last_record.number} of the stream are others than when the checkpoint was saved. Set "
            "them back, or name another checkpoint.folder to begin anew"
        )


def is_stream(samples: object) -> bool:
    """Whether a data function has given a stream that is not Streamed yet: it can be iterated, and has no length or says that it
    is made for this."""
    if isinstance(samples, Streamed) or not hasattr(samples, "__iter__"):
        return False
    return isinstance(samples, IterableDataset) or not hasattr(samples, "__len__")


class Made(Dataset[Any]):
    """Samples that are made of the records of a data set with a length and an index, such as one of Hugging Face's `datasets`.
    `sample` makes a pair (inputs, target) of a record."""

    def __init__(self, records: Any, sample: Callable[[Any], tuple[Any, Any]]) -> None:
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
            raise InputError(
                f"Made: records are of type {type(records).__name__}, which has no length or no index. Give a stream to "
                "hetpipe.Streamed(records, sample)"
            )
        self.records, self.sample = records, sample

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.sample(self.records[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        many = getattr(self.records, "__getitems__", None)
        found = many(indices) if many is not None else [self.records[index] for index in indices]
        return [self.sample(record) for record in found]
