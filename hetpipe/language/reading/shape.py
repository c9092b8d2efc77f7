"""What becomes of samples: cut, left out, padded or packed, and some held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.datasets import DataSplits, held_out, require_count
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.language.preferred import Pairs
from hetpipe.language.samples import Packed, Padded, Sequences, default_sizes
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import warn

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
            raise InputError(
                "pack: true and mask: true exclude each other: with a mask, models do not tell the samples of a row apart. "
                "Leave one out"
            )
        if self.pack and self.sizes is not None:
            raise InputError(f"pack: true makes rows of one length ({self.length}), so sizes have no use. Leave sizes out")
        for size in self.sizes if self.sizes is not None else ():
            require_count("each of sizes", size, self.what)

    def splits(self, sequences: Sequences, groups: Tensor, pad: int, made_of: Mapping[str, Any]) -> DataSplits:
        """Split the samples into those to train on and those held out, spread evenly. Samples of one group, numbered from
        0, stay together. `made_of`: see `DataSplits`."""
        held = held_out(int(groups[-1]) + 1, self.test_fraction)[groups]
        train, test = sequences.select(~held), sequences.select(held) if bool(held.any()) else None
        if self.pack:
            return DataSplits(
                train=Packed(train, self.length, pad),
                test=Packed(test, self.length, pad) if test else None,
                names=("input_ids", "position_ids"),
                made_of=made_of,
            )
        sizes = self._sizes(sequences.lengths)
        names = ("input_ids", "attention_mask") if self.mask else ("input_ids",)
        return DataSplits(
            train=Padded(train, sizes, pad, mask=self.mask),
            names=names,
            made_of=made_of,
            test=Padded(test, sizes, pad, mask=self.mask) if test else None,
        )

    def pairs(self, sequences: Sequences, groups: Tensor, pad: int, made_of: Mapping[str, Any]) -> DataSplits:
        """Split questions with two answers, whose samples stand one behind the other in a group. Those of which one answer was
        left out, since nothing of it is learned within `length`, are left out as well. InputError if none is left."""
        whole = (torch.bincount(groups) == 2)[groups]
        if not bool(whole.any()):
            raise InputError(f"{self.what}: no record has two answers of which something is learned within {self.length} tokens")
        if own_rank() == 0 and (lost := int((~whole).sum())):
            warn(
                f"note: {lost} questions are left out, since only one of their answers has a token to learn within {self.length}"
            )
        sequences = sequences.select(whole)
        count = len(sequences) // 2
        held = held_out(count, self.test_fraction).repeat_interleave(2)
        sizes = self._sizes(sequences.lengths)
        return DataSplits(
            train=Pairs(sequences.select(~held), sizes, pad),
            test=Pairs(sequences.select(held), sizes, pad) if bool(held.any()) else None,
            names=("input_ids",),
            made_of=made_of,
        )

    def _sizes(self, lengths: Tensor) -> list[int]:
        if self.sizes is None:
            return default_sizes(lengths)
        sizes, longest = sorted(set(self.sizes)), int(lengths.max())
        if not sizes or sizes[-1] < longest:
            raise InputError(
                f"the largest of sizes is {sizes[-1] if sizes else 'missing'}, but the longest sample has {longest} tokens. Give "
                "a larger size, or a smaller length, to which samples are cut"
            )
        return sizes
