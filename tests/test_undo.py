"""What a step that fails has changed is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.resume import RunState
from hetpipe.runtime.precision.loss_scale import LossScale
from hetpipe.training.undo import Undo


class Replacing(nn.Module):
    """Its buffer is another tensor after each forward."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("large", torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return x


def run_of(stage: nn.Module) -> Any:
    engine = SimpleNamespace(stage=stage, loss_scale=LossScale(), trained_parameters=stage.parameters)
    return SimpleNamespace(engine=engine, feed=SimpleNamespace(place=("first", None)), best=SimpleNamespace(saved=None))


def test_buffers_scale_and_place_are_those_of_the_steps_begin() -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(3, 400), nn.BatchNorm1d(400), Replacing())
    run = run_of(stage)
    undo, steps = Undo(cast(RunState, run)), list[int | None]()
    for step in range(3):
        undo.begin(step)
        before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
        stage(torch.randn(5, 3))
        run.engine.loss_scale.update(overflow=True)
        run.feed.place = ("later", None)
        assert undo.step == step
        assert undo.put_back()
        assert all(torch.equal(buffer, before[name]) for name, buffer in stage.named_buffers())
        assert (run.feed.place, run.engine.loss_scale.state_dict()) == (("first", None), None)
        undo.begin(step)
        stage(torch.randn(5, 3))
        undo.moves()
        steps.append(undo.step)
        undo.moved(step + 1)
        steps.append(undo.step)
    assert steps == [None, 1, None, 2, None, 3]
    assert dict(stage.named_buffers())["2.seen"].item() == 15.0


def test_buffers_of_which_there_is_no_copy_cannot_be_put_back() -> None:
    """In the first step: large ones beside few parameters. From the second step on it is known which change."""
    stage = nn.Sequential(nn.Linear(3, 4), Replacing())
    run = run_of(stage)
    undo = Undo(cast(RunState, run))
    undo.begin(0)
    stage(torch.randn(5, 3))
    assert not undo.put_back()
    assert dict(stage.named_buffers())["1.seen"].item() == 5.0
    undo.begin(1)
    stage(torch.randn(5, 3))
    assert undo.put_back()
    assert dict(stage.named_buffers())["1.seen"].item() == 5.0


def test_an_evaluation_behind_the_last_step_is_put_back_and_one_before_it_stays() -> None:
    run = run_of(nn.Linear(3, 4))
    undo = Undo(cast(RunState, run))
    undo.moved(1)
    run.best.saved = "of step 1"
    undo.begin(1)
    undo.moves()
    undo.moved(2)
    run.best.saved = "of step 2"
    assert undo.whole() == 2
    assert run.best.saved == "of step 1"
    run.best.saved = "of step 2"
    undo.begin(2)
    assert undo.whole() == 2
    assert run.best.saved == "of step 1"
