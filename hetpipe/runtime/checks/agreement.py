"""What the ranks tell each other of a batch before they train it, so that whatever is wrong with it is said by all of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hetpipe.files.messages import InputError
from hetpipe.layers.model import RowShapes, Tensors, as_tuple, batch_size
from hetpipe.runtime.checks.shortage import Shortage, raise_shortages

ROW_BYTES = 1 << 16  # of each tensor of a sample that are looked at in every step
BATCH_BYTES, BATCH_BITS = 128, 20  # of each row of a batch that its mark looks at, about; and of a mark, so that sums are exact
ADVICE = (
    "Let both fetch the same samples in the same order (a loader that shuffles, or a data set that draws, from a torch.Generator "
    "that is seeded alike on all ranks), or give None for what a rank does not read"
)


@dataclass
class Statement:
    """What one rank says, or several in sum: the samples of each replica's inputs (`given`, by its first stage) and targets
    (`counted`, by its last); what the targets weigh; the `digest` of the samples that a first stage was given, less that of a
    last stage, and how many `ends` gave theirs; how many are `adding` up steps; how many have something to complain of; and how
    many last stages had targets `shared` out of a global batch, with the sum of the batches' marks, and of their squares; and in
    which `autocast` so many `callers` are, by a number, and its square."""

    given: list[float]
    counted: list[float]
    weight: float = 0.0
    digest: float = 0.0
    ends: float = 0.0
    adding: float = 0.0
    faults: float = 0.0
    shared: float = 0.0
    batch: float = 0.0
    square: float = 0.0
    callers: float = 0.0
    autocast: float = 0.0
    autocast_square: float = 0.0

    @classmethod
    def empty(cls, replicas: int) -> Statement:
        """Of a rank that has nothing to say."""
        return cls([0.0] * replicas, [0.0] * replicas)

    def numbers(self) -> list[float]:
        """For a message."""
        return [*self.given, *self.counted, *_SUMS(self)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Statement:
        """The inverse of `numbers`."""
        replicas = (len(numbers) - len(_SUMMED)) // 2
        return cls(list(numbers[:replicas]), list(numbers[replicas : 2 * replicas]), *numbers[2 * replicas :])

    def shaped(self, shapes: RowShapes | None, like: RowShapes) -> list[float]:
        """For a message within a replica: with the shapes of its inputs, from who was given them. `like`: those of the sample."""
        lengths = [n for shape in shapes for n in shape] if shapes is not None else [0] * sum(map(len, like))
        return [*self.numbers(), *map(float, lengths)]

    @classmethod
    def of_shaped(cls, numbers: Sequence[float], like: RowShapes) -> tuple[Statement, RowShapes]:
        """The inverse of `shaped`."""
        lengths = iter(numbers[len(numbers) - sum(map(len, like)) :])
        shapes = tuple(tuple(int(next(lengths)) for _ in shape) for shape in like)
        return cls.of(numbers[: len(numbers) - sum(map(len, like))]), shapes

    @property
    def batches_differ(self) -> bool:
        """Whether the ranks shared different global batches: the mean of squares is the square of the mean only of equal ones."""
        return int(self.shared) * int(self.square) != int(self.batch) ** 2

    @property
    def autocasts_differ(self) -> bool:
        """Whether not all callers are in the same autocast."""
        return self.callers * self.autocast_square != self.autocast**2

    def check_ends(self) -> None:
        """InputError if a replica's two ends were given other numbers of samples."""
        for replica, (given, counted) in enumerate(zip(self.given, self.counted, strict=True)):
            if given != counted:
                raise InputError(
                    f"replica {replica}: its first stage was given {given:.0f} samples of inputs, its last stage {counted:.0f} "
                    "of targets; give both the same share"
                )


_SUMMED = [field.name for field in fields(Statement)[2:]]  # all but `given` and `counted`, which have a number for each replica
_SUMS = attrgetter(*_SUMMED)


@dataclass(frozen=True)
class Complaint:
    """What one rank says where something is wrong: its own fault, and the marks of the samples that it was given, by which all
    ranks see where two ends of a replica were given different ones. If it had no memory, it has computed with zeros, of which
    others may have said more."""

    replica: int
    first: bool
    fault: str | None
    marks: tuple[int, ...]
    batch: int | None = None
    shortage: Shortage | None = None


class DifferentSamplesError(InputError):
    """The two ends of a replica were given different samples; `row` is the first of its share."""

    replica = row = 0


def different_samples(replica: int, row: int, sample: str, advice: str) -> DifferentSamplesError:
    """The error, of a sample by its name."""
    error = DifferentSamplesError(
        f"the two ends of replica {replica} were given different samples: {sample} is not the same on its first stage, which "
        f"reads the inputs, and on its last, which reads the targets. {advice}"
    )
    error.replica, error.row = replica, row
    return error


def raise_first(complaints: Sequence[Complaint]) -> None:
    """ShortMemoryError if any rank had no memory; InputError about the first fault of any, or the first sample that differs."""
    raise_shortages([complaint.shortage for complaint in complaints])
    for complaint in complaints:
        if complaint.fault is not None:
            raise InputError(complaint.fault)
    for first in complaints:
        for last in complaints:
            if first.first and not last.first and first.replica == last.replica and first.marks and last.marks:
                for row, (a, b) in enumerate(zip(first.marks, last.marks, strict=False)):
                    if a != b:
                        raise different_samples(first.replica, row, f"sample {row} of its share", ADVICE)
    raise AssertionError("nobody says what is wrong")


def raise_batches(ranks: Sequence[int], complaints: Sequence[Complaint]) -> None:
    """InputError about the ranks that shared different global batches."""
    groups: dict[int, list[int]] = {}
    for rank, complaint in zip(ranks, complaints, strict=True):
        if complaint.batch is not None:
            groups.setdefault(complaint.batch, []).append(rank)
    first, other, *_ = groups.values()
    raise InputError(
        f"rank {other[0]} gave engine.share another batch of targets than rank {first[0]}: it takes the same global batch on "
        f"every rank, of which each replica gets its rows, so samples would be trained twice, and others never. {ADVICE}"
    )


def batch_mark(batch: Tensors) -> int | None:
    """A hash of some of each row of a batch, of BATCH_BITS; None where nothing is on the CPU (a GPU would be waited for)."""
    parts = [
        _rows(t) for t in as_tuple(batch) if t.ndim > 0 and t.numel() and t.device.type == "cpu" and t.layout == torch.strided
    ]
    mark = 0
    for rows in parts:
        every = rows.shape[1] // BATCH_BYTES | 1  # odd, so that it meets every byte of a number
        mark = zlib.crc32(rows[:, ::every].tobytes(), mark)
    return mark % 2**BATCH_BITS if parts else None


def marks_of(inputs: Tensors, targets: Tensors, *, whole: bool) -> tuple[int, ...]:
    """A hash of each sample, of its first bytes where it has many, or of the `whole`; tensors of GPUs, which would be waited for,
    count only then."""
    rows = batch_size(inputs)
    marks = [0] * rows
    for tensor in (*as_tuple(inputs), *as_tuple(targets)):
        if tensor.ndim == 0 or len(tensor) != rows or (tensor.device.type != "cpu" and not whole):
            continue
        for row, content in enumerate(_bytes(tensor)):
            marks[row] = zlib.crc32(content if whole or len(content) <= ROW_BYTES else _some(content), marks[row])
    return tuple(marks)


def digest(marks: Sequence[int]) -> int:
    """A hash of all of them, below 2³²."""
    return zlib.crc32(repr(marks).encode())


def _rows(tensor: Tensor) -> Any:
    """Its bytes, uint8 [samples, …], of numpy."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(len(tensor), -1)
    return plain.view(torch.uint8).numpy()


def _bytes(tensor: Tensor) -> Sequence[memoryview]:
    return [memoryview(row) for row in _rows(tensor)] if tensor.numel() else []


def _some(content: memoryview) -> bytes:
    """ROW_BYTES of it, in pieces from all over."""
    piece = ROW_BYTES // 16
    starts = [k * (len(content) - piece) // 15 for k in range(16)]
    return b"".join(content[start : start + piece] for start in starts)
