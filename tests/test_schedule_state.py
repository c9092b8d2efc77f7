"""A learning-rate schedule goes on from a checkpoint, or what is wrong is named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from hetpipe.checkpoints.schedule import plain, scheduled, state_differences, unfit
from hetpipe.checkpoints.training_state import FORMAT, LoopState, TrainerState, state_text, take_over
from hetpipe.files.messages import InputError
from tests.support.jobs import STATE


def schedule_state(**changes: Any) -> tuple[TrainerState, dict[str, Any]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    parts: list[Any] = [schedulers.LinearLR(optimizer, total_iters=2), schedulers.OneCycleLR(optimizer, 0.5, total_steps=9)]
    own = plain(schedulers.SequentialLR(optimizer, parts, milestones=[2]).state_dict())
    saved = json.loads(json.dumps(own))
    for key, value in changes.items():
        place: Any = saved["_schedulers"][1]
        (place if key in place else saved)[key] = value
    return TrainerState.parse({"format": FORMAT, "step": 4, **STATE, "scheduler_state": saved}, "x"), own


def test_the_state_of_a_schedule_is_compared_with_the_schedule_s_own() -> None:
    """What it does not want it met in the middle of a step, or never."""
    state, own = schedule_state(total_steps=12, _last_lr=[0.3])
    state.check(own, 1, "trainer.json")
    for changes, message in (
        ({"last_epoch": 2.5}, "scheduler_state._schedulers.1.last_epoch: 2.5 is no count"),
        ({"_schedulers": []}, "scheduler_state._schedulers: 0 values, the schedule has 2"),
        ({"_schedulers": "x"}, "scheduler_state._schedulers: 'x' is no list"),
        ({"total_steps": "9"}, "scheduler_state._schedulers.1.total_steps: '9' is no number"),
        ({"total_steps": float("inf")}, "scheduler_state._schedulers.1.total_steps: inf is no number"),
        ({"base_lrs": [None]}, "scheduler_state._schedulers.1.base_lrs.0: None is no number"),
        ({"_milestones": None}, "scheduler_state._milestones: None is no list"),
        ({"step": "import os"}, "scheduler_state: unknown key 'step'"),
    ):
        state, own = schedule_state(**changes)
        with pytest.raises(InputError) as caught:
            state.check(own, 1, "trainer.json")
        assert f"  {message}" in str(caught.value)
    state, own = schedule_state()
    with pytest.raises(InputError, match="scheduled: 1 groups of parameters, the optimizer has 2"):
        state.check(own, 2, "trainer.json")


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4]),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=9),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 0.2, step_size_up=2),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.MultiStepLR(o, [1])], [2]),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler([schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)]),
}


def rates(own: torch.optim.Optimizer, schedule: Any, count: int) -> list[tuple[float, float]]:
    found = []
    for _ in range(count):
        own.step()
        schedule.step(*[1.0] * isinstance(schedule, schedules.ReduceLROnPlateau))
        found.append((own.param_groups[0]["lr"], own.param_groups[0]["momentum"]))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_goes_on_from_what_json_holds(name: str) -> None:
    first, second = optimizer(), optimizer()
    schedule, other = SCHEDULES[name](first), SCHEDULES[name](second)
    assert unfit(schedule.state_dict()) == []
    rates(first, schedule, 3)
    extra = {"scheduler": name, "scheduler_state": plain(schedule.state_dict()), "scheduled": scheduled(first)}
    state = LoopState.parse(json.loads(state_text({"step": 3, **extra})), "x")
    state.check(plain(other.state_dict()), 1, "x")
    take_over(other, second, state)
    assert rates(second, other, 4) == rates(first, schedule, 4)


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    own = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.25))
    assert scheduled(own) == [{"lr": 0.25, "betas": (0.9, 0.999)}]
    schedule = schedules.ExponentialLR(own, 0.5)
    saved = {"scheduled": [{"lr": 0.125}], "scheduler": "ExponentialLR", "scheduler_state": {}}
    state = LoopState.parse({"format": FORMAT, "step": 1, **saved}, "x")
    rate = own.param_groups[0]["lr"]
    take_over(schedule, own, state)
    assert own.param_groups[0]["lr"] is rate
    assert float(rate) == 0.125


def test_what_json_cannot_hold_is_named() -> None:
    state = {
        "best": torch.ones(1),
        "seen": {1: 2},
        "milestones": Counter({3: 1}),
        "mode": "min",
        "anneal": max,
        "_schedulers": [{"last_epoch": 2}, {"rows": [object()]}],
    }
    assert unfit(state) == ["best, a Tensor", "seen, a dict", "_schedulers.1.rows, a list"]
    assert plain(state) == {"mode": "min", "_schedulers": [{"last_epoch": 2}, {}]}


def test_what_was_infinite_may_have_become_a_number_and_not_the_reverse() -> None:
    assert state_differences({"best": 0.5}, {"best": float("inf")}, "s") == []
    assert state_differences({"best": float("inf")}, {"best": float("inf")}, "s") == []
    assert state_differences({"best": float("inf")}, {"best": 0.5}, "s") == ["s.best: inf is no number"]
