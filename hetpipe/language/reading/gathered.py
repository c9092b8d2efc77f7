"""The samples of some records in a row, and what is to be told of these: found group by group, in whichever process, and put
together in the order of the records."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetpipe.language.marked import Marked
from hetpipe.language.reading.shape import Shape
from hetpipe.language.reading.texts import Texts
from hetpipe.language.records.record import Faults, Record, UnusableError, Unused
from hetpipe.language.samples import DIGEST_BYTES, IGNORED, Looks
from hetpipe.language.tokenizer import Tokens

ARRAYS = {"tokens": "i", "targets": "i", "lengths": "q", "records": "q", "greatest": "i", "learned": "i"}  # kinds of numbers
TYPES = {"i": torch.int32, "q": torch.int64}


class Gathered:
    """Samples as they come.

    Attributes:
        arrays: tokens and targets one behind the other; of each sample its length, the number of its record, and `Looks`.
        count: of records; `left_out`: how many had nothing to learn in their first `length` tokens.
        apart: for each sample of a record of which several were made, the record's number; `apart_tokens`: of all of these but
            the last of each.
        ends: the tokens that end what is learned.
        faults, long: records that cannot be used, or are longer than `length`; `unused`: keys that nothing reads.
        told: what `Answers` counts; `unseen`: columns that no record had; `fits`: how the template was given each build of chats.
    """

    def __init__(self, length: int) -> None:
        self.length, self.count, self.left_out, self.apart_tokens = length, 0, 0, 0
        self.arrays = {name: array(kind) for name, kind in ARRAYS.items()}
        self.digests, self.apart, self.ends = bytearray(), array("q"), set[int]()
        self.faults, self.long, self.unused = Faults(), Faults(), Unused()
        self.told, self.unseen, self.fits = Counter[str](), set[str](), dict[Any, Any]()

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
                self.apart_tokens += self.arrays["lengths"][-1]
            self.apart.append(record)
        self.ends |= tokens.ends
        self.arrays["tokens"].extend(numbers[:-1])
        self.arrays["targets"].extend(targets[1:])
        self.arrays["lengths"].append(len(numbers) - 1)
        self.arrays["records"].append(record)

    def look(self) -> None:
        """Find what is known of the samples without their tokens."""
        looks = Looks.at(*(self.tensor(name) for name in ("tokens", "targets", "lengths")))
        self.digests += looks.digests.numpy().tobytes()
        for name, found in (("greatest", looks.greatest), ("learned", looks.learned)):
            self.arrays[name].frombytes(found.numpy().tobytes())

    def join(self, other: Gathered) -> bool:
        """Take over the samples of the records behind these. False where both were not given to the template alike: then one
        process, which gives each build of chats as it gave the first, would have made other samples."""
        for name, numbers in self.arrays.items():
            numbers.extend(other.arrays[name])
        self.digests += other.digests
        self.apart.extend(other.apart)
        self.ends |= other.ends
        self.unseen = self.unseen & other.unseen if self.count else other.unseen
        self.count += other.count
        self.left_out += other.left_out
        self.apart_tokens += other.apart_tokens
        self.faults.join(other.faults)
        self.long.join(other.long)
        self.unused.counts.update(other.unused.counts)
        self.told.update(other.told)
        return all(self.fits.setdefault(build, fit) == fit for build, fit in other.fits.items())

    def tensor(self, name: str) -> Tensor:
        """Return an array as a tensor, which shares its memory."""
        numbers = self.arrays[name]
        kind = TYPES[numbers.typecode]
        return torch.frombuffer(numbers, dtype=kind) if numbers else torch.empty(0, dtype=kind)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a file keeps of the samples, `groups` for `records`: the number of each sample's record among those that
        have a sample."""
        found = {name: self.tensor(name) for name in self.arrays if name != "records"}
        numbers = self.tensor("records")
        found["groups"] = (numbers.diff(prepend=numbers[:1]) != 0).cumsum(0)
        found["digests"] = torch.frombuffer(self.digests, dtype=torch.uint8).reshape(-1, DIGEST_BYTES)
        return found


def gather(texts: Texts, shape: Shape, first: int, records: Sequence[Record], *, tokenize: bool = True) -> Gathered:
    """Read some records, numbered from `first` on; without tokens where others cannot be used."""
    found, marked = Gathered(shape.length), list[tuple[int, str, Marked]]()
    builds = texts.begin()
    for number, (where, value) in enumerate(records, first):
        try:
            samples, keys = texts.samples(value)
        except UnusableError as error:
            found.faults.add(where, error)
            continue
        found.unused.add(keys)
        found.left_out += not samples
        marked += [(number, where, sample) for sample in samples]
    found.count = len(records)
    found.told, found.fits, found.unseen = texts.counts(), texts.fits(builds), set(texts.columns.unseen)
    if tokenize and marked and not found.faults.count:
        _tokenize(texts, shape, marked, found)
        found.look()
    return found


def _tokenize(texts: Texts, shape: Shape, marked: Sequence[tuple[int, str, Marked]], found: Gathered) -> None:
    for (number, where, sample), tokens in zip(marked, texts.tokenizer.tokens([own for *_, own in marked]), strict=True):
        if len(tokens.numbers) - 1 > shape.length:
            found.long.add(where, f"{len(tokens.numbers) - 1} tokens")
            if shape.too_long != "truncate":
                continue
        found.add(tokens, number, apart=sample.apart)
