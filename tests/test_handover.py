"""What becomes of an engine's gradients: which optimizers take them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hetpipe.files.messages import InputError
from hetpipe.runtime.checks.handover import OTHERS, Handover
from tests.support.silence import said


@pytest.fixture
def own() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


@pytest.fixture
def handover(own: nn.Parameter) -> Iterator[Handover]:
    made = Handover([own])
    yield made
    made.close()


def step(handover: Handover, own: nn.Parameter, *, kept: bool = False) -> None:
    """What an engine does in a step."""
    handover.begin(kept=kept)
    own.grad = torch.ones_like(own)
    handover.made()


def of(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.1)


def test_lbfgs_is_refused_where_it_has_an_engines_parameters(handover: Handover, own: nn.Parameter) -> None:
    step(handover, own)
    other = nn.Parameter(torch.ones(2))
    torch.optim.LBFGS([other]).step(lambda: 0.0)
    with pytest.raises(InputError, match="optimizer 'LBFGS' cannot train a pipeline: it evaluates the model several times"):
        torch.optim.LBFGS([own]).step(lambda: 0.0)


def test_an_optimizer_of_other_parameters_is_noted_once(handover: Handover, own: nn.Parameter) -> None:
    """As one that was made before a model on the meta device got its values: nothing was trained."""
    others = of(nn.Parameter(torch.ones(2)))
    with said() as lines:
        step(handover, own)
        others.step()
        assert lines == [], "the right one may come yet"
        for _ in range(2):
            step(handover, own)
            others.step()
    assert lines == [OTHERS]


def test_another_models_optimizer_is_not_noted_beside_ones_own(handover: Handover, own: nn.Parameter) -> None:
    others, mine = of(nn.Parameter(torch.ones(2))), of(own)
    with said() as lines:
        for _ in range(2):
            step(handover, own)
            others.step()
            mine.step()
        step(handover, own)
        others.step()
        step(handover, own, kept=True)
        mine.step()
        step(handover, own)
        others.step()
        handover.forget()
        step(handover, own)
        with torch.no_grad():
            own.sub_(0.1)  # by hand
        others.step()
        step(handover, own)
    assert lines == []
