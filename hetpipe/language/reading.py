"""Readers make samples of records. They tell what cannot be used by its place, and count what is cut or left out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.datasets import DataSplits, held_out, require_count
from hetpipe.files.messages import InputError, counted, nearest, shown
from hetpipe.language.formats.chats import OPTIONS, Chat
from hetpipe.language.formats.columns import Columns
from hetpipe.language.formats.formats import read_record
from hetpipe.language.marked import Marked, Span
from hetpipe.language.records.record import Faults, UnusableError, Unused
from hetpipe.language.records.source import Source
from hetpipe.language.samples import IGNORED, Packed, Padded, Sequences, default_sizes
from hetpipe.language.tokenizer import Tokenizer, Tokens
from hetpipe.language.writing.answers import Answers
from hetpipe.language.writing.template import DATE
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

    def splits(self, sequences: Sequences, groups: Tensor, pad: int, made_of: Mapping[str, Any]) -> DataSplits:
        """Split the samples into those to train on and those held out, spread evenly. Samples of one group, numbered from
        0, stay together. `made_of`: see `DataSplits`."""
        held = held_out(int(groups[-1]) + 1, self.test_fraction)[groups]
        train, test = sequences.select(~held), sequences.select(held) if bool(held.any()) else None
        if self.pack:
            return DataSplits(train=Packed(train, self.length, pad), test=Packed(test, self.length, pad) if test else None,
                              names=("input_ids", "position_ids"), made_of=made_of)  # fmt: skip
        sizes = self._sizes(sequences.lengths)
        names = ("input_ids", "attention_mask") if self.mask else ("input_ids",)
        return DataSplits(train=Padded(train, sizes, pad, mask=self.mask), names=names, made_of=made_of,
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


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How records become samples: by a template (None: without) and the columns that a job names; `templated`: see `pair_of`."""

    tokenizer: Tokenizer
    answers: Answers | None
    columns: Columns
    templated: bool | None

    def samples(self, value: Any) -> tuple[list[Marked], set[str]]:
        """Return the samples of a record, and the keys that nothing reads. UnusableError says why it cannot be used."""
        if isinstance(value, UnusableError):
            raise value
        found = read_record(value, self.columns, templated=self.templated if self.answers is not None else False)
        if isinstance(found, Chat):
            if self.answers is None:
                raise UnusableError("it is a chat, which only a template writes: take a tokenizer with one, or template: FILE")
            samples = self.answers.samples(found)
            options = (f"{OPTIONS}.{key}" for key in self.answers.strange(found))
            return samples, {*found.unused, *options, *(f"{key} of a turn" for key in self.answers.unused)}
        text = found.prompt + found.completion
        learned = [Marked(text, (Span(len(found.prompt), len(text)),), whole=False)] if found.learned else []
        return learned, set(found.unused)

    def made_of(self, ends: Iterable[int]) -> dict[str, Any]:
        """What the samples hang on beside the files; `ends`: the tokens that end what is learned."""
        template = self.answers.template.digest if self.answers is not None else None
        return {"tokenizer": self.tokenizer.digest, "template": template, "ends": sorted(ends)}

    def told(self) -> list[str]:
        """What a user should know of what became of the records."""
        if self.answers is None:
            return []
        lines = [f"{count} {what}" for what, count in self.answers.told.items() if count]
        if self.answers.template.writes_a_date:
            lines.append(f"the template writes the date of the day: here always {DATE.isoformat()}, so that a run which is "
                         "resumed on another day reads the same samples")  # fmt: skip
        return lines


def read(source: Source, texts: Texts, shape: Shape) -> Gathered:
    """The samples of all records. InputError tells those that cannot be used."""
    gathered, faults, long, unused, count = Gathered(shape.length), Faults(), Faults(), Unused(), 0
    told = own_rank() == 0
    with Activity(f"reading {source}", shown=told, inner=True) as activity:
        records = source.records()
        while group := list(islice(records, TOGETHER)):
            marked = list[tuple[int, str, Marked]]()
            for number, (where, value) in enumerate(group, count):
                try:
                    samples, keys = texts.samples(value)
                except UnusableError as error:
                    faults.add(where, error)
                    continue
                unused.add(keys)
                gathered.left_out += not samples
                marked += [(number, where, sample) for sample in samples]
            count += len(group)
            if faults.count or not marked:
                continue
            _gather(marked, texts.tokenizer, shape, gathered, long)
            activity.say(counted(count, "record"))
    faults.raise_any("cannot be used", count)
    texts.columns.check_seen()
    if count == 0:
        raise InputError(f"{source} holds no records")
    if shape.too_long == "refuse":
        long.raise_any(f"are longer than length: {shape.length}", count, "; too_long: truncate cuts such, drop leaves them out")
    if told:
        _tell(source, shape, count, long, gathered, [*texts.told(), *_unread(unused)])
    if not gathered.lengths:
        raise InputError(f"{source}: none of {count} records has a token to learn within the first {shape.length}")
    return gathered


def _gather(
    marked: Sequence[tuple[int, str, Marked]], tokenizer: Tokenizer, shape: Shape, gathered: Gathered, long: Faults
) -> None:  # fmt: skip
    for (number, where, sample), tokens in zip(marked, tokenizer.tokens([sample for *_, sample in marked]), strict=True):
        if len(tokens.numbers) - 1 > shape.length:
            long.add(where, f"{len(tokens.numbers) - 1} tokens")
            if shape.too_long != "truncate":
                continue
        gathered.add(tokens, number, apart=sample.apart)


def _unread(unused: Unused) -> list[str]:
    return [f"nothing reads the keys (each in so many records) {unused}"] if unused.counts else []


def _tell(source: Source, shape: Shape, count: int, long: Faults, gathered: Gathered, more: Sequence[str]) -> None:
    parts = []
    if long.count:
        done = "were cut" if shape.too_long == "truncate" else "were left out"
        parts.append(f"{long.count} are longer than {shape.length} tokens and {done} (the first: {long.first[0]})")
    if left_out := gathered.left_out:
        parts.append(f"{left_out} have no token to learn{' within these' if long.count else ''} and were left out")
    if parts:
        warn(f"note: of {counted(count, 'record')} of {source}, {'; '.join(parts)}")
    if gathered.apart:
        warn(f"note: {len(set(gathered.apart))} of {counted(count, 'record')} of {source} are {len(gathered.apart)} samples, one "
             "for each answer, since the template writes earlier answers, or what is before them, otherwise when more follows: "
             f"{gathered.apart_tokens:,} tokens more than one sample each; turns: last (--turns last) learns the last ones only"
             )  # fmt: skip
    for line in more:
        warn(f"note: of {source}, {line}")


class Gathered:
    """Samples as they come. `left_out`: how many had nothing to learn in their first `length` tokens; `apart`: for each sample of
    a record of which several were made, the record's number; `apart_tokens`: of all of these but the last of each; `ends`: the
    tokens that end what is learned."""

    def __init__(self, length: int) -> None:
        self.length, self.left_out, self.apart_tokens = length, 0, 0
        self.tokens, self.targets, self.lengths = array("i"), array("i"), array("q")
        self.records, self.apart, self.ends = array("q"), array("q"), set[int]()

    def add(self, tokens: Tokens, record: int, *, apart: bool = False) -> None:
        """One more, of this record, or its beginning."""
        numbers = tokens.numbers[: self.length + 1]
        targets = [IGNORED] * len(numbers)
        for begin, end in tokens.learned:
            targets[begin:end] = numbers[begin:end]
        if targets[1:].count(IGNORED) >= len(numbers) - 1:
            self.left_out += 1
            return
        if apart:
            if self.apart and self.apart[-1] == record:
                self.apart_tokens += self.lengths[-1]
            self.apart.append(record)
        self.ends |= tokens.ends
        self.tokens.extend(numbers[:-1])
        self.targets.extend(targets[1:])
        self.lengths.append(len(numbers) - 1)
        self.records.append(record)

    def sequences(self) -> Sequences:
        """Return all samples so far."""
        tokens, targets = (torch.frombuffer(numbers, dtype=torch.int32) for numbers in (self.tokens, self.targets))
        return Sequences(tokens, targets, torch.frombuffer(self.lengths, dtype=torch.int64))

    def groups(self) -> Tensor:
        """Return the number of each sample's record, among those that have a sample: int64 [samples]."""
        numbers = torch.frombuffer(self.records, dtype=torch.int64)
        return (numbers.diff(prepend=numbers[:1]) != 0).cumsum(0)
