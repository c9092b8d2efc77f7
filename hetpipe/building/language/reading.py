"""From records to samples: what cannot be used is told by its place, what is cut or left out by its number."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.datasets import DataSplits, held_out, require_count
from hetpipe.building.language.records import Faults, Record, Source, UnusableError
from hetpipe.building.language.samples import IGNORED, Packed, Padded, Sequences, default_sizes
from hetpipe.building.language.tokenizer import Marked, Tokenizer, Tokens
from hetpipe.files.messages import InputError, counted, nearest, shown
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import Activity, warn

TOGETHER = 1_000  # texts that are tokenized at once
TOO_LONG = ("truncate", "drop", "refuse")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What becomes of samples, as a job says it; `what` names the data in messages."""

    what: str
    length: int
    too_long: str
    pack: bool
    sizes: Sequence[int] | None
    mask: bool
    test_fraction: float

    def __post_init__(self) -> None:
        require_count("length", self.length, self.what)
        for name, flag in (("pack", self.pack), ("mask", self.mask)):
            if not isinstance(flag, bool):
                raise InputError(f"{name} is {shown(flag)}: write true or false, without quotes")
        if isinstance(self.test_fraction, bool) or not isinstance(self.test_fraction, int | float):
            raise InputError(f"test_fraction must be a number from 0 to below 1, got {self.test_fraction!r}")
        if self.sizes is not None and not isinstance(self.sizes, list | tuple):
            raise InputError(f"sizes must be a list of whole numbers, such as [256, 1024], got {self.sizes!r}")
        if self.too_long not in TOO_LONG:
            raise InputError(f"unknown too_long {self.too_long!r}{nearest(str(self.too_long), TOO_LONG)}")
        if not 0 <= self.test_fraction < 1:
            raise InputError(f"test_fraction must be from 0 to below 1, got {self.test_fraction!r}")
        if self.pack and self.mask:
            raise InputError("pack: true does not go with mask: true, with which models do not tell the samples of a row apart")
        if self.pack and self.sizes is not None:
            raise InputError(f"pack: true makes rows of length: {self.length}; it takes no sizes")
        for size in self.sizes if self.sizes is not None else ():
            require_count("each of sizes", size, self.what)

    def splits(self, sequences: Sequences, pad: int) -> DataSplits:
        """Those to train on and those held out, spread evenly."""
        held = held_out(len(sequences), self.test_fraction)
        train, test = sequences.select(~held), sequences.select(held) if bool(held.any()) else None
        if self.pack:
            return DataSplits(train=Packed(train, self.length, pad), test=Packed(test, self.length, pad) if test else None,
                              names=("input_ids", "position_ids"))  # fmt: skip
        sizes = self._sizes(sequences.lengths)
        names = ("input_ids", "attention_mask") if self.mask else ("input_ids",)
        return DataSplits(train=Padded(train, sizes, pad, mask=self.mask), names=names,
                          test=Padded(test, sizes, pad, mask=self.mask) if test else None)  # fmt: skip

    def _sizes(self, lengths: Tensor) -> list[int]:
        if self.sizes is None:
            return default_sizes(lengths)
        sizes, longest = sorted(set(self.sizes)), int(lengths.max())
        if not sizes or sizes[-1] < longest:
            raise InputError(
                f"the largest of sizes is {sizes[-1] if sizes else 'missing'}, and the longest sample has {longest} tokens: give "
                "a larger one, or a smaller length, to which samples are cut"
            )
        return sizes


def read(
    source: Source, tokenizer: Tokenizer, shape: Shape, mark: Callable[[Any], Marked],
    tokens_of: Callable[[Sequence[Marked]], list[Tokens]],
) -> Sequences:  # fmt: skip
    """The samples of all records. InputError tells those that cannot be used."""
    gathered, faults, long, count = Gathered(shape.length), Faults(), Faults(), 0
    told = own_rank() == 0
    with Activity(f"reading {source}", shown=told, inner=True) as activity:
        records = source.records()
        while group := list(islice(records, TOGETHER)):
            count += len(group)
            marked = list(_marked(group, mark, faults))
            if faults.count or not marked:
                continue
            for (where, _), tokens in zip(marked, tokens_of([text for _, text in marked]), strict=True):
                if len(tokens.numbers) - 1 > shape.length:
                    long.add(where, f"{len(tokens.numbers) - 1} tokens")
                    if shape.too_long != "truncate":
                        continue
                gathered.add(tokens)
            activity.say(counted(count, "record"))
    faults.raise_any("cannot be used", count)
    if count == 0:
        raise InputError(f"{source} holds no records")
    if shape.too_long == "refuse":
        long.raise_any(f"are longer than length: {shape.length}", count, "; too_long: truncate cuts such, drop leaves them out")
    if told:
        _tell(source, shape, count, long, gathered.left_out)
    if not gathered.lengths:
        raise InputError(f"{source}: none of {count} records has a token to learn within the first {shape.length}")
    return gathered.sequences()


def _marked(group: Sequence[Record], mark: Callable[[Any], Marked], faults: Faults) -> Iterator[tuple[str, Marked]]:
    for where, value in group:
        try:
            if isinstance(value, UnusableError):
                raise value
            yield where, mark(value)
        except UnusableError as error:
            faults.add(where, error)


def _tell(source: Source, shape: Shape, count: int, long: Faults, left_out: int) -> None:
    parts = []
    if long.count:
        done = "were cut" if shape.too_long == "truncate" else "were left out"
        parts.append(f"{long.count} are longer than {shape.length} tokens and {done} (the first: {long.first[0]})")
    if left_out:
        parts.append(f"{left_out} have no token to learn{' within these' if long.count else ''} and were left out")
    if parts:
        warn(f"note: of {counted(count, 'record')} of {source}, {'; '.join(parts)}")


class Gathered:
    """Samples as they come. `left_out`: how many had nothing to learn in their first `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length, self.left_out = length, 0
        self.tokens, self.targets, self.lengths = array("i"), array("i"), array("q")

    def add(self, tokens: Tokens) -> None:
        """One more, or its beginning."""
        numbers = tokens.numbers[: self.length + 1]
        targets = [IGNORED] * len(numbers)
        for begin, end in tokens.learned:
            targets[begin:end] = numbers[begin:end]
        if targets[1:].count(IGNORED) >= len(numbers) - 1:
            self.left_out += 1
            return
        self.tokens.extend(numbers[:-1])
        self.targets.extend(targets[1:])
        self.lengths.append(len(numbers) - 1)

    def sequences(self) -> Sequences:
        """All of them."""
        tokens, targets = (torch.frombuffer(numbers, dtype=torch.int32) for numbers in (self.tokens, self.targets))
        return Sequences(tokens, targets, torch.frombuffer(self.lengths, dtype=torch.int64))


def splits(source: Source, name: str, shape: Shape, marks: Callable[[Tokenizer], tuple[Any, Any]]) -> DataSplits:
    """The samples of a job's data. `marks`: with the tokenizer, which part of a record is learned, and its tokens."""
    tokenizer = Tokenizer(name)
    return shape.splits(read(source, tokenizer, shape, *marks(tokenizer)), tokenizer.pad)
