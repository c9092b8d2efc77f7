"""Streams that a user may have, of the records 0 to COUNT - 1, and jobs over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hetpipe import DataSplits, Made, Streamed

COUNT = 70


def pair(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, generator=generator, dtype=torch.float64), torch.tensor(number % 4)


class Plain:
    """Yields numbers, and has no state."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class WithState(Plain):
    """Counts what it has yielded since it began to count."""

    at = read = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self.at < self.count:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1


class Apart(IterableDataset[int]):
    """Gives each of several workers a part, as torch's own documentation has it."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from range(COUNT) if info is None else range(info.id, COUNT, info.num_workers)


class Inseparable(IterableDataset[int]):
    """The same, by a name that it took before there were workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(COUNT) if info is None else range(info.id, COUNT, info.num_workers)


class Mixed(Plain):
    """In another order for each pass, of which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(self.count), self.count)


class Drawn(Plain):
    """In an order that nobody can find again."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(self.count), self.count)


class Repeated(Plain):
    """Yields pairs of its own."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            yield pair(number)


def hugging_face(buffer: int = 0) -> Any:
    """Return what `load_dataset(…, streaming=True)` would, of three files. `buffer`: how many records are mixed, if any."""
    import datasets

    stream = datasets.Dataset.from_dict({"number": list(range(COUNT))}).to_iterable_dataset(num_shards=3)
    return stream.shuffle(seed=1, buffer_size=buffer) if buffer else stream


def number_of(record: Any) -> int:
    return int(record["number"] if isinstance(record, dict) else record)


KINDS: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "with a state": WithState,
    "apart in workers": Apart,
    "mixed": Mixed,
    "hugging face": hugging_face,
    "hugging face, mixed": lambda: hugging_face(20),
}


def load(kind: str = "plain", shuffle: int = 1, count: int | None = None, first: int = 0, test: int = 0) -> DataSplits:
    """What jobs name: a stream whose numbers begin with `first`."""
    records: Any = KINDS[kind]() if count is None else Plain(count)
    stream = Streamed(records, lambda record: pair(number_of(record) + first), shuffle=shuffle)
    return DataSplits(train=stream, test=[pair(1000 + i) for i in range(test)] or None)  # type: ignore[arg-type]


def bare(kind: str = "repeated") -> Any:
    found: dict[str, Any] = {
        "repeated": Repeated(),
        "generator": (pair(number) for number in range(COUNT)),
        "drawn": Drawn(),
        "empty": Repeated(0),
        "numbers": Plain(),
    }
    return found[kind], None


def two_streams() -> Any:
    return Repeated(), Streamed(Repeated())


def rows_of_the_hub() -> DataSplits:
    import datasets

    rows = datasets.Dataset.from_dict({"number": list(range(50))})
    return DataSplits(train=Made(rows, lambda row: pair(row["number"])))


def rows_as_they_are() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"number": list(range(50))}), None
