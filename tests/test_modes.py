"""Layers that the user froze by `.eval()` stay frozen in training, and evaluations leave every module in its own mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.reference import ReferenceEngine
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.layers.batch_norm import check_batch_norm
from hetpipe.layers.device import one_thread
from hetpipe.layers.model import Loss, Model, batch_size, mse
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.measuring.profiler import measure_device
from hetpipe.training.session import Session
from hetpipe.training.trainer import _note_model
from tests.support.blocks import WIDTH
from tests.support.modes import frozen_net, keep_modes, linear_net, modes
from tests.support.nets import batch
from tests.support.ranks import cluster_of, run_ranks

ROWS: list[dict[str, Any]] = [{"cuts": [4, 3], "sizes": [3, 2, 2]}]
FROZEN = {"1", "2", "5.0.1", "5.1", "6.1"}


@pytest.mark.parametrize(("backend", "ranks"), [("torch", 2), ("fairscale", 1), ("torchgpipe", 1)])
def test_what_the_user_froze_stays_frozen(backend: Backend, ranks: int) -> None:
    found = run_ranks(keep_modes, cluster_of(ranks), backend, ROWS)
    layers, (inputs, targets) = frozen_net(), batch("blocks", 7, 0)
    before = modes(layers)
    assert {name for name, training in before.items() if not training} == FROZEN
    with one_thread(torch.device("cpu")):
        loss = mse(layers(inputs), targets)
        loss.backward()
    grown = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
    state = {name: value.clone() for name, value in layers.state_dict().items()}
    evaluation = mse(layers.eval()(inputs), targets)
    x, y = batch("blocks", 7, 0, torch.float32)
    typed = [float(mse(linear_net()(x), y).detach())] * 6
    assert set().union(*(part["gradients"] for part in found)) == set(grown)
    for part in found:
        assert part["losses"] == pytest.approx([float(loss.detach())] * 2, abs=1e-12)
        assert part["evaluation"] == pytest.approx(float(evaluation.detach()), abs=1e-12)
        for heard in part["modes"]:
            assert heard
            assert heard == {name: training for name, training in before.items() if name in heard}
        assert all(part["thawed"].values()), "what the user thaws is trained"
        assert part["under autocast"] == pytest.approx(typed, rel=1e-2)
        assert part["under autocast"][:2] == part["under autocast"][4:] != part["under autocast"][2:4]
        for name, gradient in part["gradients"].items():
            assert torch.allclose(gradient, grown[name], rtol=0, atol=1e-12), name
        for name, value in part["state"].items():
            assert torch.allclose(value, state[name], rtol=0, atol=1e-12), name


def test_tracing_under_autocast_leaves_no_fake_weights() -> None:
    """Autocast keeps a weight that it has cast until it ends, also the stand-in of a weight."""
    layers, x = linear_net(), torch.ones(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        (spec,) = trace_boundaries(layers, x)[-1]
        output = layers(x)
    assert (type(output), output.dtype) == (torch.Tensor, spec.dtype) == (torch.Tensor, torch.bfloat16)


def test_a_batch_norm_needs_a_choice_only_where_it_trains() -> None:
    layers = frozen_net()
    check_batch_norm(layers, None)
    layers[6].train()
    with pytest.raises(InputError, match=r"the model has BatchNorm \(first: '5.1'\)"):
        check_batch_norm(layers, None)


def test_a_job_says_what_is_in_evaluation_mode(capsys: pytest.CaptureFixture[str]) -> None:
    layers, (inputs, targets) = frozen_net(), batch("blocks", 2, 0)
    model = Model(name="frozen", layers=layers, inputs=inputs, targets=targets, loss=Loss(function=mse))
    _note_model(cast(Session, SimpleNamespace(model=model)))
    assert "note: 4 modules are in evaluation mode and stay in it (the first: '1'); where" in capsys.readouterr().err
    layers.train()
    _note_model(cast(Session, SimpleNamespace(model=model)))
    assert capsys.readouterr().err == ""


def test_measuring_and_the_one_device_leave_modes_alone() -> None:
    layers, (inputs, targets) = frozen_net(), batch("blocks", 7, 0)
    before, whole = modes(layers), Loss(function=mse)
    model = Model(name="frozen", layers=layers, inputs=inputs, targets=targets, loss=whole)
    measure_device(model, "cpu", torch.device("cpu"), [batch_size(inputs)], torch.optim.SGD, repeats=1)
    assert modes(layers) == before
    engine = ReferenceEngine(layers, whole)
    engine.step(inputs, targets)
    engine.evaluate(inputs, targets)
    assert modes(layers) == before
