"""bench/overhead: what is compared does the same work, and a difference would be told."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from bench.overhead.contenders import CHECK_STEPS, LEARNING_RATE, RANKS, Case, Layout, contender, mean_loss
from bench.overhead.run import Block, check_losses, compared
from tests.support.ranks import World, cluster_of, run_ranks

CASES = [Case("tiny mlp", layout) for layout in get_args(Layout)]
PIPELINE = Case("tiny mlp", "pipeline")


def losses_of(world: World) -> dict[tuple[str, str], list[float]]:
    """This rank's part of all losses."""
    found: dict[tuple[str, str], list[float]] = {}
    for case in (case for case in CASES if len(case.devices) == world.size):
        for kind in ("hetpipe", *case.others):
            own = contender(kind, case)
            found[kind, case.layout] = [own.step() for _ in range(CHECK_STEPS)]
    return found


def losses_on_one_device(case: Case) -> list[float]:
    layers, (inputs, targets) = case.layers(), case.batch()
    optimizer = torch.optim.SGD(layers.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(CHECK_STEPS):
        optimizer.zero_grad()
        loss = mean_loss(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_all_contenders_have_the_losses_of_one_device() -> None:
    found = {count: run_ranks(losses_of, cluster_of(count)) for count in set(RANKS.values())}
    for case in CASES:
        truth = losses_on_one_device(case)
        assert truth[0] > truth[-1] * (1 + 1e-3), "a step that changed nothing would pass"
        for kind in ("hetpipe", *case.others):
            parts = (rank[kind, case.layout] for rank in found[len(case.devices)])
            whole = [sum(part) for part in zip(*parts, strict=True)]
            assert whole == pytest.approx(truth, rel=1e-5), (kind, case.layout)


def test_another_loss_is_told() -> None:
    check_losses(PIPELINE, {"hetpipe": [2.0, 1.0], "torch": [2.0, 1.000009]})
    with pytest.raises(RuntimeError, match="tiny mlp, pipeline, step 1: the loss of 'torch' is 1.00002, that of 'hetpipe' 1.0"):
        check_losses(PIPELINE, {"hetpipe": [2.0, 1.0], "torch": [2.0, 1.00002]})


def test_ratios_are_those_of_each_round() -> None:
    ours = [Block(2e-3, 1e-3), Block(4e-3, 1e-3), Block(9e-3, 1e-3)]  # the machine gets slower
    theirs = [Block(1e-3, 1e-3), Block(2e-3, 2e-3), Block(3e-3, 4e-3)]
    found = compared(PIPELINE, "torch", ours, theirs)
    assert found.actions == 16
    assert found.ratio == pytest.approx((2.0, 2.0, 2.5))
    assert found.processor_ratio == pytest.approx((0.5, 0.375, 0.75))
    assert found.step_microseconds == pytest.approx((4000, 3000, 6500))
    assert found.extra_action_processor_microseconds == pytest.approx((-31.25, -62.5, -15.625))
    assert found.extra_action_microseconds == pytest.approx((125, 93.75, 250))
