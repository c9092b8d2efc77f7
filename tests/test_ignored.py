"""Targets that are to be ignored: refused where the loss is weighed by samples, counted once a step where it is by tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hetpipe
from bench.reference import ReferenceEngine
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, LossWeight, Tensors, as_tuple, cross_entropy
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.nets import batch, build
from tests.support.ranks import make_plan

both = pytest.mark.parametrize("backend", ["torch", "fairscale"])


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of one, and its end."""
    yield
    torch.distributed.destroy_process_group()


def wrapped(backend: Backend, weight: LossWeight, words: Tensors, ignore_index: int = -100) -> tuple[nn.Sequential, PlanEngine]:
    model = build("tied")
    plan = make_plan([{"cuts": [10], "sizes": [4, 4, 3]}], schedule="gpipe")
    return model, hetpipe.wrap(model, plan, words, cross_entropy, loss_weight=weight, ignore_index=ignore_index, backend=backend)


@both
def test_ignored_targets_under_samples_are_refused(backend: Backend) -> None:
    """One device divides by the targets that are left; here the second micro-batch has none (0/0), the others unlike numbers."""
    words, labels = batch("tied", 11, 0)
    _, engine = wrapped(backend, "samples", words)
    for action in (engine.step, engine.evaluate):
        with pytest.raises(InputError) as caught:
            action(words, labels)
        assert str(caught.value) == (
            "replica 0: its targets hold -100, which is to be ignored, but the loss is weighed by samples: write "
            "'weight: tokens' in the job's loss section (hetpipe.wrap: loss_weight='tokens'); where the loss function leaves no "
            "target out, give ignore_index a number that no target has"
        )
    whole = as_tuple(labels)[0].clamp(min=0)
    assert engine.step(words, whole) == pytest.approx(
        ReferenceEngine(build("tied"), Loss(function=cross_entropy)).step(words, whole), abs=1e-12
    )
    engine.close()


@both
def test_a_loss_that_counts_every_target_has_another_number_to_ignore(backend: Backend) -> None:
    words, labels = batch("tied", 11, 0)
    model, engine = wrapped(backend, "samples", words, ignore_index=-1)
    engine.loss = Loss(function=lambda output, targets: output.mean() + targets.double().mean(), ignore_index=-1)
    assert engine.step(words, labels) == pytest.approx(
        float((model(words).mean() + as_tuple(labels)[0].double().mean()).detach()), abs=1e-12
    )
    engine.close()


@both
def test_tokens_are_counted_before_the_micro_batches_run(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count on a GPU waits for all that the GPU was given."""
    words, labels = batch("tied", 11, 0)
    _, engine = wrapped(backend, "tokens", words)
    for _ in range(2):  # in the steps 1, 2, 4, … the loss is tried
        engine.step(words, labels)
    counted: list[int] = []
    count = Loss.count

    def counting(loss: Loss, targets: Tensors) -> float:
        counted.append(len(targets))
        return count(loss, targets)

    monkeypatch.setattr(Loss, "count", counting)
    loss, evaluation = engine.step(words, labels), engine.evaluate(words, labels)
    assert counted == [11, 11], "the whole share, once a step"
    truth = ReferenceEngine(build("tied"), Loss(function=cross_entropy, weight="tokens"))
    assert loss == pytest.approx(truth.step(words, labels), abs=1e-12)
    assert evaluation == pytest.approx(truth.evaluate(words, labels), abs=1e-12)
    engine.close()
