"""A loss is tried where one brings a loop of one's own: by `wrap` in the first step, by `auto` before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hetpipe
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, as_tuple
from tests.support.losses import LABELS
from tests.support.ranks import make_plan


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one, and its end."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


INPUTS = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4).sin()

PLAN = make_plan([{"cuts": [3], "sizes": [5, 4, 3]}], schedule="gpipe")


@pytest.mark.parametrize("backend", ["torch", "fairscale"])
def test_a_weighted_mean_in_ones_own_loop(alone: None, backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its weight gradients were off by 0.15, without a word."""
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5], dtype=torch.float64)

    def loss(output: Tensors, targets: Tensors) -> Tensor:
        return F.cross_entropy(as_tuple(output)[0], as_tuple(targets)[0], weight=weights)

    def wrapped(function: Callable[..., Any], **more: Any) -> Any:
        return hetpipe.wrap(net(), PLAN, INPUTS, function, backend=backend, **more)

    engine = wrapped(loss)
    with pytest.raises(InputError, match="the loss is no mean weighed by samples: .* neither samples nor tokens"):
        engine.step(INPUTS, LABELS)
    engine.close()
    truth = net()
    expected = loss(truth(INPUTS), LABELS)
    expected.backward()
    engine = wrapped(loss, loss_weight=lambda targets: weights[targets].sum())
    assert engine.step(INPUTS, LABELS) == pytest.approx(float(expected.detach()), rel=1e-12)
    for own, other in zip(engine.parameters(), truth.parameters(), strict=True):
        assert other.grad is not None
        assert torch.allclose(own.grad, other.grad, rtol=0, atol=1e-12)
    found = engine.evaluate(INPUTS, LABELS)
    assert found[:3] == (pytest.approx(float(expected.detach())), None, pytest.approx(float(weights[LABELS].sum())))
    strange = torch.where(torch.arange(12) == 7, 4, 0)
    with pytest.raises(InputError, match="^the function that weighs the loss's targets raises IndexError: index 4 is out of"):
        engine.step(INPUTS, strange)
    engine.close()
    engine = wrapped(nn.CrossEntropyLoss())
    engine.step(INPUTS, LABELS)
    with pytest.raises(InputError, match="^replica 0's share of the batch: the target of sample 7 is 4, but layer '2'"):
        engine.step(INPUTS, strange)
    engine.close()
    engine = wrapped(lambda o, t: F.cross_entropy(F.dropout(o), t))
    engine.step(INPUTS, LABELS)
    engine.step(INPUTS, LABELS)
    engine.close()
    note = "note: whether the loss is a mean over its batch could not be tried: it gives another number each time\n"
    said = capsys.readouterr().err.splitlines(keepends=True)
    assert [line for line in said if line.startswith("note: ")] == [note], "once; progress is told besides"


def test_auto_tries_the_loss_before_it_measures(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="It looks like a sum: return the mean"):
        hetpipe.auto(net(), (INPUTS, LABELS), nn.CrossEntropyLoss(reduction="sum"), global_batch=12)
    with pytest.raises(InputError, match="^the sample: the target of sample 2 is 9, but layer '2' .Linear. gives 4 classes"):
        hetpipe.auto(net(), (INPUTS[:3], torch.tensor([1, 2, 9])), F.cross_entropy, global_batch=12)
    with pytest.raises(InputError, match="has 12 rows of inputs and 3 of targets; dimension 0 of both counts samples"):
        hetpipe.auto(net(), (INPUTS, torch.tensor([1, 2, 9])), F.cross_entropy, global_batch=12)
    assert list(tmp_path.iterdir()) == []
