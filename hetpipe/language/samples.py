"""Samples of different lengths, to be padded in each batch, or packed into rows of one length.

Shapes: b samples, n tokens of a sample, t tokens of a row or of what a batch is padded to. A sample is its tokens but for the
last, and as targets its tokens but for the first, IGNORED where a token is not learned.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetpipe.building.content import digest_of_tensors
from hetpipe.language.packing import pack

IGNORED = -100
PARTS = (1, 2 / 3, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12)  # of the longest sample: halvings, and thirds between them


class Sequences:
    """Samples one behind the other, int32: no object of Python's for each of them, which processes that are forked would copy.

    Attributes:
        lengths: of the samples, int64 [samples].
    """

    def __init__(self, tokens: Tensor, targets: Tensor, lengths: Tensor) -> None:
        self.tokens, self.targets, self.lengths = tokens, targets, lengths  # [sum of lengths], the same, [samples]
        self.ends = lengths.cumsum(0)

    def __len__(self) -> int:
        return len(self.lengths)

    def words(self, pad: int) -> int:
        """How many words a model must know: one more than the greatest token, that of padding among them."""
        return 1 + max(pad, int(self.tokens.max()), int(self.targets.max()))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [n]."""
        end, length = int(self.ends[index]), int(self.lengths[index])
        own = slice(end - length, end)
        return self.tokens[own].long(), self.targets[own].long()

    def digests(self) -> tuple[str, str]:
        """Return digests of all samples in their order, and in any (see `hetpipe.building.content.Digested`)."""
        every, whole = list[bytes](), hashlib.blake2b(self.lengths.numpy().data, digest_size=16)
        tokens, targets = (part.contiguous().numpy().data for part in (self.tokens, self.targets))
        begin = 0
        for end in self.ends.tolist():
            own = hashlib.blake2b(tokens[begin:end], digest_size=16)
            own.update(targets[begin:end])
            every.append(own.digest())
            begin = end
        whole.update(b"".join(every))
        return whole.hexdigest(), hashlib.blake2b(b"".join(sorted(every)), digest_size=16).hexdigest()

    def select(self, chosen: Tensor) -> Sequences:
        """Return the chosen samples: bool [samples]."""
        every = chosen.repeat_interleave(self.lengths)
        return Sequences(self.tokens[every], self.targets[every], self.lengths[chosen])


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
