"""What each step looks at costs no call of Python for each parameter or module: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import pytest
import torch
from torch import nn

import hetpipe
from hetpipe.files.messages import InputError
from hetpipe.layers import split
from hetpipe.layers.model import mse
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.untouched.randomness import Generators, drawing
from hetpipe.runtime.checks.handover import Handover
from hetpipe.runtime.checks.trained import Trained
from tests.support.ranks import make_plan


def net(layers: int) -> nn.Sequential:
    """So many layers of three numbers each, with a gradient for each parameter."""
    found = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    for parameter in found.parameters():
        parameter.grad = torch.ones_like(parameter)
    return found


def calls(action: Callable[[], object]) -> int:
    """How many functions written in Python, generators that go on among them, the action enters."""
    count = 0

    def look(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_what_is_trained_is_looked_at_without_a_call_for_each_parameter() -> None:
    few, many = (calls(Trained(net(layers)).check) for layers in (2, 40))
    assert few == many


def test_gradients_are_marked_without_a_call_for_each_parameter() -> None:
    def marked(layers: int) -> int:
        parameters = list(net(layers).parameters())
        handover = Handover(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step() -> None:
            handover.made()
            handover.before(optimizer)
            handover.begin(kept=False)

        try:
            return calls(step)
        finally:
            handover.close()

    assert marked(2) == marked(40)


def test_every_change_is_noticed_at_the_next_look() -> None:
    def add(layers: nn.Sequential) -> None:
        layers[1].register_parameter("other", nn.Parameter(torch.zeros(2)))

    def replace(layers: nn.Sequential) -> None:
        layers[1].weight = nn.Parameter(torch.zeros(3, 3))

    for change, told in (
        (lambda layers: layers[1].weight.requires_grad_(False), "'1.weight' was trained, and is frozen"),
        (lambda layers: layers[1].double(), "'1.weight' was float32, and is float64"),
        (add, "'1.other' is new"),
        (replace, "'1.weight' is another tensor"),
        (lambda layers: layers.__setitem__(1, nn.Linear(3, 3)), "'1.weight' is another tensor"),
    ):
        layers = net(3)
        trained = Trained(layers)
        trained.check()
        change(layers)
        with pytest.raises(InputError, match=told):
            trained.check()
    layers = net(3)
    trained = Trained(layers)
    layers.append(nn.ReLU())  # nothing that trains: from now on it is looked at as well
    trained.check()
    layers[3] = nn.Linear(3, 3)
    with pytest.raises(InputError, match=r"'3\.weight' is new"):
        trained.check()


def test_what_crosses_boundaries_is_found_once_for_steps_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    joint = split.joint_gradients

    def looked_at(rows: Sequence[tuple[TensorSpec, ...]]) -> list[tuple[TensorSpec, ...]]:
        found.append(len(rows))
        return joint(rows)

    monkeypatch.setattr("hetpipe.runtime.stages.engine.joint_gradients", looked_at)
    rows = torch.randn(4, 3)
    engine = hetpipe.wrap(net(2), make_plan([{"cuts": [2], "sizes": [2, 2]}]), rows, mse)
    try:
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        for step, (samples, counted) in enumerate([(4, None), (4, None), (4, None), (4, None), (4, 0), (4, 0), (3, 2)]):
            found.clear()
            engine.step(rows[:samples], rows[:samples])
            optimizer.step()
            assert counted in (None, len(found)), f"step {step}: of both ends of the stage, where the batch is another"
    finally:
        engine.close()


def test_numpys_second_normal_number_is_kept() -> None:
    """numpy draws normal numbers by two, and keeps the second: it is a part of the generator's state."""
    np.random.seed(1)
    wanted = np.random.randn(4).tolist()
    np.random.seed(1)
    found = [np.random.randn()]
    before = Generators.now()
    moved = []
    with drawing("a place", 1):
        np.random.randn()
        moved.append(before.moved)
    moved.append(before.moved)
    assert moved == [True, False]
    assert [*found, *(np.random.randn() for _ in range(3))] == wanted
