"""Samples of different lengths, to be padded in each batch, or packed into rows of one length.

Shapes: b samples, n tokens of a sample, t tokens of a row or of what a batch is padded to. A sample is its tokens but for the
last, and as targets its tokens but for the first, IGNORED where a token is not learned.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetpipe.building.content import digest_of_tensors
from hetpipe.language.packing import pack

IGNORED = -100
DIGEST_BYTES = 16
PARTS = (1, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12)  # of the longest sample: halvings, and thirds between them


class Looks(NamedTuple):
    """What is known of each sample without a look at its tokens: a digest of its bytes, uint8 [samples, 16], the greatest number
    among its tokens and targets, and how many of its targets are learned, int32 [samples] both."""

    digests: Tensor
    greatest: Tensor
    learned: Tensor

    @classmethod
    def at(cls, tokens: Tensor, targets: Tensor, lengths: Tensor) -> Looks:
        """Look at samples one behind the other."""
        parts = [part.contiguous().numpy() for part in (tokens, targets)]
        every, begin = bytearray(), 0
        ends = lengths.cumsum(0).numpy()
        for end in ends.tolist():
            own = hashlib.blake2b(parts[0].data[begin:end], digest_size=DIGEST_BYTES)
            own.update(parts[1].data[begin:end])
            every += own.digest()
            begin = end
        digests = torch.from_numpy(np.frombuffer(every, np.uint8).reshape(-1, DIGEST_BYTES))
        if not len(lengths):
            return cls(digests, *(torch.empty(0, dtype=torch.int32) for _ in range(2)))
        begins = ends - lengths.numpy()
        greatest = np.maximum(*(np.maximum.reduceat(part, begins) for part in parts))
        learned = np.add.reduceat(parts[1] != IGNORED, begins, dtype=np.int32)
        return cls(digests, torch.from_numpy(greatest), torch.from_numpy(learned))

    def of(self, chosen: Tensor) -> Looks:
        """Return those of chosen samples: bool [samples]."""
        return Looks(*(each[chosen] for each in self))


class Sequences:
    """Samples in one row of tokens, int32: no object of Python's for each of them, which processes that are forked would copy.
    Those that are selected share the row, which may be a file's.

    Attributes:
        lengths: of the samples, int64 [samples].
        begins: where in the row each begins, int64 [samples]; by default one behind the other.
        looks: what is known of them.
    """

    def __init__(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, looks: Looks | None = None, begins: Tensor | None = None
    ) -> None:
        self._row, self.lengths = (tokens, targets), lengths  # [sum of all lengths], twice; [samples]
        self.begins = lengths.cumsum(0) - lengths if begins is None else begins
        self.looks = Looks.at(tokens, targets, lengths) if looks is None else looks

    def __len__(self) -> int:
        return len(self.lengths)

    def words(self, pad: int) -> int:
        """How many words a model must know: one more than the greatest token, that of padding among them."""
        return 1 + max(pad, int(self.looks.greatest.max()))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [n]."""
        begin, length = int(self.begins[index]), int(self.lengths[index])
        tokens, targets = (part[begin : begin + length].long() for part in self._row)
        return tokens, targets

    def digests(self) -> tuple[str, str]:
        """Return digests of all samples in their order, and in any (see `hetpipe.building.content.Digested`)."""
        whole, own = hashlib.blake2b(self.lengths.numpy().data, digest_size=DIGEST_BYTES), self.looks.digests.numpy().tobytes()
        whole.update(own)
        every = sorted(own[at : at + DIGEST_BYTES] for at in range(0, len(own), DIGEST_BYTES))
        return whole.hexdigest(), hashlib.blake2b(b"".join(every), digest_size=DIGEST_BYTES).hexdigest()

    def select(self, chosen: Tensor) -> Sequences:
        """Return the chosen samples: bool [samples]."""
        return Sequences(*self._row, self.lengths[chosen], self.looks.of(chosen), self.begins[chosen])


def default_sizes(lengths: Tensor) -> list[int]:
    """At most eight sizes between the shortest and the longest sample, each at most a half more than the one before."""
    longest, shortest = int(lengths.max()), int(lengths.min())
    found = sorted({-int(-longest * part // 1) for part in PARTS})
    return found[max(0, bisect_left(found, shortest)) :]


class Padded(Dataset[Any]):
    """Samples as long as they are, of which `padded` makes a batch; a `hetpipe.building.data.Ragged`. With `mask` inputs are
    (tokens, mask), 1 for a token and 0 for padding: a causal model sees no padding at the end without it."""

    def __init__(self, sequences: Sequences, sizes: Sequence[int], pad: int, *, mask: bool = False) -> None:
        self.sequences, self.sizes, self.pad, self.mask = sequences, tuple(sizes), pad, mask
        self.words, self.positions = sequences.words(pad), self.sizes[-1]  # that a model must know

    @property
    def lengths(self) -> Tensor:
        """Return the lengths of the samples, int64 [samples]."""
        return self.sequences.lengths

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.sequences[index]

    def digests(self) -> tuple[str, str]:
        """Return digests of the samples, whatever they are padded to."""
        return self.sequences.digests()

    def padded(self, samples: Sequence[tuple[Tensor, Tensor]], size: int) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Tokens (and mask) and targets, int64 [b, size]."""
        tokens, targets = torch.full((len(samples), size), self.pad), torch.full((len(samples), size), IGNORED)
        mask = torch.zeros(len(samples), size, dtype=torch.int64)
        for row, (own, wanted) in enumerate(samples):
            tokens[row, : len(own)], targets[row, : len(own)], mask[row, : len(own)] = own, wanted, 1
        return ((tokens, mask) if self.mask else tokens), targets


class Packed(Dataset[Any]):
    """Rows of `length` tokens, each of whole samples: inputs (tokens, positions), int64 [t], and targets. Positions begin anew at
    each sample, and at the padding behind the last, by which models tell samples apart."""

    def __init__(self, sequences: Sequences, length: int, pad: int) -> None:
        self.sequences, self.length, self.pad = sequences, length, pad
        self.words, self.positions = sequences.words(pad), int(sequences.lengths.max())  # that a model must know
        rows = pack(sequences.lengths.tolist(), length)
        self.samples = torch.tensor([number for row in rows for number in row], dtype=torch.int64)  # row by row
        self.ends = torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0)

    @property
    def reach(self) -> tuple[int, int]:
        """Return how many tokens the shortest and the longest sample have."""
        return int(self.sequences.lengths.min()), self.positions

    def digests(self) -> tuple[str, str]:
        """Return a digest of the samples in their rows, and one of the samples in any order."""
        whole, unordered = self.sequences.digests()
        rows = digest_of_tensors([self.samples, self.ends, torch.tensor([self.length])])
        return hashlib.sha256(f"{whole} {rows}".encode()).hexdigest()[:32], unordered

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        begin = int(self.ends[index - 1]) if index else 0
        parts = [self.sequences[number] for number in self.samples[begin : int(self.ends[index])].tolist()]
        if left := self.length - sum(len(tokens) for tokens, _ in parts):
            parts.append((torch.full((left,), self.pad), torch.full((left,), IGNORED)))
        positions = torch.cat([torch.arange(len(tokens)) for tokens, _ in parts])
        return (torch.cat([tokens for tokens, _ in parts]), positions), torch.cat([targets for _, targets in parts])
