"""A better and a worse answer to each question, as pairs of rows that are never parted.

Shapes: b samples, n of the data, t tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetpipe.language.samples import IGNORED, Sequences

Both = tuple[Tensor, Tensor, Tensor, Tensor]  # tokens and labels of the better answer, and of the worse one


class Pairs(Dataset[Any]):
    """Questions with two answers, a `hetpipe.building.data.Ragged`: inputs are (tokens, labels), int64 [b, 2, t], the better
    answer first; targets, float64 [b, 2, 2], are the log-probability of each answer by the reference (float64 [n, 2]), 0 until
    that is known, and its number of tokens. `sequences` has the two answers of each question one behind the other."""

    def __init__(self, sequences: Sequences, sizes: Sequence[int], pad: int) -> None:
        self.sequences, self.sizes, self.pad = sequences, tuple(sizes), pad
        self.words, self.positions = sequences.words(pad), self.sizes[-1]  # that a model must know
        self.lengths = sequences.lengths.view(-1, 2).amax(1)
        self.reference_log_probabilities: Tensor | None = None
        self.whole = False

    def scored(self) -> Pairs:
        """Return the same pairs with whole rows. A row ends with the last token that is learned, whose label is its only one."""
        found = Pairs(self.sequences, [size + 1 for size in self.sizes], self.pad)
        found.lengths, found.whole = found.lengths + 1, True
        return found

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Both, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        both: Both = (*self.sequences[2 * index], *self.sequences[2 * index + 1])
        counts = torch.tensor([(labels != IGNORED).sum() for labels in (both[1], both[3])], dtype=torch.float64)
        known = (
            self.reference_log_probabilities[index] if self.reference_log_probabilities is not None else torch.zeros_like(counts)
        )
        if self.whole:
            both = (*_whole(*both[:2]), *_whole(*both[2:]))
        return both, torch.stack((known, counts), 1)

    def digests(self) -> tuple[str, str]:
        """Return digests of the samples, whatever they are padded to and whatever the reference says of them."""
        return self.sequences.digests()

    def padded(self, samples: Sequence[tuple[Both, Tensor]], size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """(Tokens, labels), int64 [b, 2, size], and targets [b, 2, 2]."""
        tokens, labels = torch.full((len(samples), 2, size), self.pad), torch.full((len(samples), 2, size), IGNORED)
        for number, (both, _) in enumerate(samples):
            for row in range(2):
                own, wanted = both[2 * row : 2 * row + 2]
                tokens[number, row, : len(own)], labels[number, row, : len(own)] = own, wanted
        return (tokens, labels), torch.stack([target for _, target in samples])


def _whole(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A row up to the last token that is learned, and labels that mark that."""
    end = int((labels != IGNORED).nonzero()[-1])
    row = torch.cat((tokens[: end + 1], labels[end : end + 1]))
    marks = torch.full_like(row, IGNORED)
    marks[-1] = row[-1]
    return row, marks
