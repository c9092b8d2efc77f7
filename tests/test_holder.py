"""What a process of a plan holds: the parameters that it gives to optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hetpipe
from hetpipe.files.messages import InputError
from hetpipe.layers.model import mse
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.ranks import make_plan

OPTIMIZERS: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
ROWS = torch.randn(4, 3)


@pytest.fixture
def _alone() -> Iterator[None]:
    """A world of one, and its end."""
    yield
    torch.distributed.destroy_process_group()


def engine_of(layers: nn.Sequential) -> PlanEngine:
    return hetpipe.wrap(layers, make_plan([{"cuts": [len(layers)], "sizes": [2, 2]}]), ROWS, mse)


@pytest.mark.usefixtures("_alone")
def test_parameters_are_of_all_layers_and_of_those_that_train() -> None:
    layers = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), nn.ReLU())
    engine = engine_of(layers)
    assert list(engine.parameters()) == list(layers.parameters())
    assert list(engine.trained_parameters()) == list(layers[1].parameters())
    assert [name for name, _ in engine.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    engine.close()


def variants(kind: Any) -> Iterator[dict[str, Any]]:
    """The ways in which an optimizer of torch may be asked to take its steps, of those that it has."""
    for more in ({}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"differentiable": True}, {"amsgrad": True}):
        try:
            kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1, **more)
        except TypeError:
            continue
        yield more


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Linear(3, 3).requires_grad_(False)])
def test_where_nothing_trains_any_optimizer_and_schedule_goes_on(layer: nn.Module) -> None:
    """torch's refuse an empty list of parameters."""
    layers = nn.Sequential(layer)
    engine = engine_of(layers)
    before = [p.detach().clone() for p in layers.parameters()]
    assert sum(p.numel() for p in engine.trained_parameters()) == 0
    assert list(engine.parameters())[:-1] == list(layers.parameters())
    for name, kind in OPTIMIZERS.items():
        for more in variants(kind):
            optimizer = kind(engine.trained_parameters(), lr=0.1, **more)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for _ in range(2):
                engine.step(ROWS, ROWS)
                assert engine.clip_grad_norm_(1.0) == 0.0
                if name == "LBFGS":
                    with pytest.raises(InputError, match="optimizer 'LBFGS' cannot train a pipeline"):
                        optimizer.step(lambda: 0.0)
                    break
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(p, was) for p, was in zip(layers.parameters(), before, strict=True))
    engine.close()
