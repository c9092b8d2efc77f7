"""`engine.accumulate()`: by what the steps that add up divide, on every back end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hetpipe
from bench.reference import ReferenceEngine
from hetpipe.documents.plan import Backend
from hetpipe.layers.model import Loss, as_tuple, cross_entropy
from tests.support.nets import batch, build
from tests.support.ranks import make_plan

BACKENDS: tuple[Backend, ...] = ("torch", "fairscale", "torchgpipe")


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one, and its end."""
    yield
    torch.distributed.destroy_process_group()


def truth_of(samples: tuple[int, ...]) -> list[nn.Parameter]:
    """The gradients of these batches as one, on one device."""
    model = build("tied")
    parts = [batch("tied", count, step) for step, count in enumerate(samples, 1)]
    words, labels = (torch.cat([as_tuple(value)[0] for value in column]) for column in zip(*parts, strict=True))
    ReferenceEngine(model, Loss(function=cross_entropy, weight="tokens")).step(words, labels)
    return list(model.parameters())


def norm_of(parameters: list[nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_each_of_the_steps_gradients_are_the_mean_over_all_targets_so_far(backend: Backend) -> None:
    """Batches whose targets weigh unlike numbers of tokens, or nothing; then the sum begins anew; then it is left. What is
    replaced in between is a part of what follows, the gradients of tied copies, too."""
    model, samples = build("tied"), (5, 11, 6)
    cuts = [10] if backend == "torch" else [4, 6]
    plan = make_plan([{"cuts": cuts, "sizes": [4, 4, 3], "devices": [f"n0/{s}" for s in range(len(cuts))]}], schedule="gpipe")
    engine = hetpipe.wrap(model, plan, batch("tied", 11, 0)[0], cross_entropy, loss_weight="tokens", backend=backend)
    words, labels = (as_tuple(value)[0] for value in batch("tied", 3, 7))

    def check(wanted: list[nn.Parameter], factor: float = 1.0) -> None:
        gradients = [p.grad * factor for p in wanted if p.grad is not None]
        for (name, own), other in zip(model.named_parameters(), gradients, strict=True):
            assert own.grad is not None, name
            assert torch.allclose(own.grad, other, rtol=0, atol=1e-12), name
        assert engine.grad_norm() == pytest.approx(factor * norm_of(wanted), rel=1e-10)

    def treble() -> None:
        for p in engine.parameters():
            p.grad = p.grad * 3 if p.grad is not None else None

    engine.step(*batch("tied", 5, 1))
    for p in engine.parameters():
        p.grad = torch.full_like(p, torch.inf)
    with engine.accumulate():  # what was before is dropped, whatever it is
        engine.step(words, torch.full_like(labels, -100))
        for _ in range(2):
            for count in range(1, len(samples) + 1):
                engine.step(*batch("tied", samples[count - 1], count))
                check(truth_of(samples[:count]))
            engine.step(words, torch.full_like(labels, -100))
            check(truth_of(samples))
            engine.zero_grad()
        engine.step(*batch("tied", 5, 1))
        treble()
        check(truth_of((5,)), 3)
        engine.step(words, torch.full_like(labels, -100))
        check(truth_of((5,)), 3)
    engine.step(*batch("tied", 5, 1))
    check(truth_of((5,)))
    treble()
    norm = engine.clip_grad_norm_(1e-3)
    assert norm == pytest.approx(3 * norm_of(truth_of((5,))), rel=1e-10)
    check(truth_of((5,)), 3 * 1e-3 / (norm + 1e-6))
    tied = [p.grad for name, p in engine.named_parameters() if name in ("0.weight", "9.weight") and p.grad is not None]
    assert len(tied) == len(cuts)
    assert torch.equal(tied[0], tied[-1])
    engine.close()
