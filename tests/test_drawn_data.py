"""Data sets that draw: each sample under a seed of its own, the same on all ranks, in every plan and after a resume."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hetpipe.building.content import same_content
from hetpipe.building.data import fetch
from hetpipe.files.messages import InputError
from hetpipe.layers.untouched.randomness import Generators
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.world import World
from tests.support.jobs import Folder, train
from tests.support.runs import ONE, assert_same, reference, trained
from tests.support.user_parts import drawn

DRAWN: dict[str, Any] = {"target": "tests.support.user_parts:drawn", "args": {}}
PLAIN = train(steps=10, scheduler=None)
THREE_STAGES = [{"cuts": [2, 2, 2], "sizes": [4, 4, 4]}]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("how", ["torch", "numpy", "python", "each"])
def test_a_sample_is_drawn_by_its_seed_whatever_is_fetched_with_it(how: str, together: bool) -> None:
    dataset = drawn(how=how, together=together).train
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = Generators.now()
    inputs, targets = fetch(dataset, torch.tensor([7, 3, 30, 3]), 0, 2)
    assert not before.moved
    for row, number in enumerate((7, 3, 30)):
        alone = fetch(dataset, torch.tensor([number]), 0, 2)
        assert torch.equal(alone[0][0], inputs[row])
        assert int(alone[1]) == int(targets[row])
    assert torch.equal(inputs[1], inputs[3])
    many = torch.arange(50)
    epochs = [fetch(dataset, many, seed, epoch)[1].tolist() for seed, epoch in ((0, 2), (0, 2), (0, 3), (1, 2))]
    assert epochs[0] == epochs[1]
    assert epochs[0] != epochs[2] != epochs[3] != epochs[0]
    assert {0, 1, 2, 3} == set(epochs[0])


def test_what_does_not_draw_is_fetched_at_once() -> None:
    asked: list[list[int]] = []

    class Plain:
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(list(indices))
            return [(torch.ones(2) * i, i) for i in indices]

    assert fetch(Plain(), torch.arange(9))[1].tolist() == list(range(9))
    assert [len(part) for part in asked] == [1, 8]


def test_a_job_on_data_that_are_drawn_is_that_of_one_device_in_every_plan_and_after_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each end of the pipeline drew for itself, and the loss stayed that of chance. Workers, too, draw what the ranks did."""
    folder = Folder(tmp_path)
    saving = {"checkpoint": {"folder": str(tmp_path / "saved"), "every_steps": 6}}
    file = folder.ready(data=DRAWN, train=PLAIN)
    truth = reference(file)
    assert truth.losses[-1] < 0.9 < truth.losses[0]
    assert_same(trained(file), truth)
    folder.job("saving.yaml", data=DRAWN, train=PLAIN, **saving)
    first = trained(tmp_path / "saving.yaml", "train.steps=6")
    folder.cluster(3)
    folder.plan(THREE_STAGES)
    capfd.readouterr()
    rest = trained(tmp_path / "saving.yaml", "data.workers=1")
    assert "the job has changed" not in capfd.readouterr().err
    assert first.losses + rest.losses == pytest.approx(truth.losses, abs=1e-9)
    assert rest.evaluation is not None
    assert truth.evaluation is not None
    assert rest.evaluation.loss == pytest.approx(truth.evaluation.loss, abs=1e-9)


def test_what_is_drawn_from_elsewhere_is_told_by_its_sample(tmp_path: Path) -> None:
    own = {**DRAWN, "args": {"how": "own"}}
    file = Folder(tmp_path).ready(data=own, train=PLAIN)
    with pytest.raises(RankFailure) as caught:
        trained(file)
    message = str(caught.value)
    assert "the two ends of replica 0 were given different samples: sample " in message
    assert " of the data is not the same on its first stage" in message
    assert "what it takes from elsewhere (a generator of its own, a clock, a file that is written meanwhile) is not" in message
    assert caught.value.exit_code == 2


def test_where_both_ends_are_one_rank_a_data_set_may_draw_from_anywhere(tmp_path: Path) -> None:
    own = {**DRAWN, "args": {"how": "own"}}
    file = Folder(tmp_path).ready((1,), ONE, data=own, train=PLAIN)
    losses = trained(file).losses
    assert losses[-1] < losses[0]


@dataclass
class Both:
    """Two ranks, of which the other has read this."""

    other: Any
    ranks: tuple[int, ...] = (0, 1)
    hosts: tuple[str, ...] = ("a", "b")
    is_main: bool = True

    def gather(self, own: Any) -> list[Any]:
        self.own = own
        return [own, own if self.other is None else self.other]


def read_by_both(data: Any, other: Any = None) -> Both:
    both = Both(other)
    same_content(data, {}, cast(World, both))
    return both


def test_ranks_that_read_other_data_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Two replicas of one stage each have no two ends: files in another order, or fewer of them, were trained in silence."""
    data = [(torch.rand(3, 2), torch.tensor(number)) for number in range(9)]
    own = read_by_both(data).own
    rounded = [(inputs * (1 + 1e-6), target) for inputs, target in data]
    assert read_by_both(data, read_by_both(rounded).own).own == own
    with pytest.raises(
        InputError, match="^the ranks read different data: on rank 1 on host b sample 3 is another, compared with rank 0"
    ):
        read_by_both(data, read_by_both([*data[:2], data[3], data[2], *data[4:]]).own)
    with pytest.raises(
        InputError, match="^the ranks read different data: on .* there were 9 samples to train on, and there are 8"
    ):
        read_by_both(data, read_by_both(data[:8]).own)
    assert capfd.readouterr().err == ""


def test_a_sample_that_is_another_each_time_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """A generator of its own: another plan and a resumed run read other samples, and no two ends need differ."""

    class Own(list[Any]):
        generator = torch.Generator().manual_seed(0)

        def __getitem__(self, index: Any) -> Any:
            return torch.rand(2, generator=self.generator), super().__getitem__(index)

    assert read_by_both(Own(range(5))).own.looked_at is None
    told = capfd.readouterr().err
    assert told.startswith("note: samples of Own differ each time they are read, although the seed is the same. It draws from ")
