"""Samples of data sets of one's own are looked at by a stride, so that a run that resumes knows them again."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

os.environ["HF_HUB_OFFLINE"] = "1"

from hetpipe.building.content import FEW_SAMPLES, MANY_SAMPLES, content_of
from hetpipe.building.datasets import DataSplits
from hetpipe.checkpoints.own.facts import content_in
from hetpipe.files.messages import InputError
from hetpipe.processes.world import alone as one_rank


class Drawn(Dataset[Any]):
    """Numbers of these samples, of which some may be others."""

    def __init__(self, count: int = 200, other: int | None = None, shift: float = 0.1) -> None:
        self.count, self.other, self.shift = count, other, shift

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        row = torch.arange(8, dtype=torch.float32).mul(number + 1).sin()
        return (row.clone() if number != self.other else row + self.shift), number % 3


def test_samples_of_other_data_sets_are_looked_at_by_a_stride() -> None:
    own = content_of(Drawn(), {})
    assert own.whole is None
    assert own.looked_at is not None
    numbers = [looked.number for looked in own.looked_at]
    assert (numbers[0], numbers[-1], len(numbers)) == (0, 199, 31)
    assert content_of(Drawn(), {}).other(own) == ""
    for number in numbers[::5]:
        assert content_of(Drawn(other=number), {}).other(own) == f"sample {number} is another"
        assert content_of(Drawn(other=number, shift=1e-9), {}).other(own) == "", "rounding of another processor"
    assert "there were 200 samples to train on, and there are 199" in content_of(Drawn(199), {}).other(own)
    assert "samples are of another kind" in content_of(Rows(), {}).other(own)


def test_many_samples_are_looked_at_by_one_rank_and_by_a_loop_once() -> None:
    """The few of each other rank are among those of the first."""
    few, many = content_of(Drawn(), {}, most=FEW_SAMPLES), content_of(Drawn(), {})
    numbers = [{looked.number for looked in own.looked_at or ()} for own in (few, many)]
    assert len(numbers[0]) == FEW_SAMPLES
    assert numbers[0] < numbers[1]
    assert content_of(Drawn(other=0), {}, most=FEW_SAMPLES).other(many) == "sample 0 is another"

    read = list[int]()

    class Counted(Drawn):
        def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
            read.append(number)
            return super().__getitem__(number)

    data = Counted()
    assert content_in(data, one_rank()) == content_in(DataSplits(train=data), one_rank()) == many
    assert len(read) < 2 * MANY_SAMPLES
    assert content_in(None, one_rank()) is None
    with pytest.raises(InputError, match="data is a int. Give a map-style data set"):
        content_in(3, one_rank())


class Rows(Drawn):
    """A layer that knows a digest of its own."""

    def digests(self) -> tuple[str, str | None]:
        return "0" * 32, None


def test_samples_that_are_others_each_time_are_not_compared() -> None:
    class Noisy(Drawn):
        def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
            return torch.from_numpy(np.random.default_rng().standard_normal(8)), 0

    own = content_of(Noisy(), {})
    assert own.looked_at is None
    assert content_of(Noisy(), {}).other(own) == ""
    assert "200 samples to train on, and there are 150" in content_of(Noisy(150), {}).other(own)
