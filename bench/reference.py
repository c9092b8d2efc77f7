"""One device, the whole global batch at once, in a plain loop: what every plan must reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hetpipe.building.build import build_data, build_model, build_scheduler, optimizer_factory
from hetpipe.building.data import EpochSampler, fetch
from hetpipe.building.evaluated import counted_by
from hetpipe.documents.job import Job
from hetpipe.layers.model import Loss, Tensors, evaluating
from hetpipe.layers.numbers import as_type
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.layers.weights import materialise
from hetpipe.processes.progress import Activity
from hetpipe.runtime.base import Evaluation, Metric
from hetpipe.training.evaluation import FEW_STEPS


class ReferenceEngine:
    """The one-device truth, with the Engine's methods."""

    def __init__(self, layers: nn.Sequential, loss: Loss) -> None:
        materialise(layers)
        self.layers = layers
        self.loss = loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, each once."""
        return self.layers.parameters()

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Those of them that train."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """Gradients of the loss over the whole batch."""
        assert inputs is not None and targets is not None
        self.layers.zero_grad(set_to_none=True)
        loss = self.loss.share(self.layers(inputs), targets, self.loss.count(targets) or 1.0)
        loss.backward()
        return float(loss.detach())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip by the global norm."""
        squares = [p.grad.double().square().sum() for p in self.layers.parameters() if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        factor = min(1.0, max_norm / (norm + 1e-6))
        for p in self.layers.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
        return norm

    def evaluate(self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None) -> Evaluation:
        """Forward only, in evaluation mode."""
        assert inputs is not None and targets is not None
        with evaluating(self.layers), torch.no_grad():
            output = self.layers(inputs)
            weight = self.loss.count(targets)
            loss = float(self.loss.share(output, targets, weight or 1.0))
        if metric is None:
            return Evaluation(loss, None, weight)
        total, count = metric(output, targets)
        return Evaluation(loss, total / max(1, count), weight, count)


class Truth(NamedTuple):
    """The loss of each step, and the evaluation after them."""

    losses: list[float]
    evaluation: Evaluation | None


def train_reference(job: Job) -> Truth:
    """The job's training on one device: no ranks, no pipeline, no micro-batches, no checkpoints."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # one order of summation, and no spinning threads where cores are shared
    try:
        return _train(job)
    finally:
        torch.set_num_threads(before)


def _train(job: Job) -> Truth:
    section, data = job.train, build_data(job)
    model = build_model(job, data)
    engine = ReferenceEngine(model.layers, model.loss)
    optimizer = optimizer_factory(section.optimizer)(list(engine.trained_parameters()))
    scheduler = build_scheduler(section.scheduler, optimizer)
    sampler = EpochSampler.of(data.train, section.global_batch, seed=section.seed)
    batches, losses = sampler.forever(), list[float]()
    steps = section.steps or (section.epochs or 0) * sampler.batches_per_epoch
    with Activity("training on one device", total=steps) as activity:
        for step in range(steps):
            batch = next(batches)
            with drawing(section.seed, 0, step + 1):  # as a plan of one device does
                losses.append(engine.step(*_rows(data.train, batch, job, section.seed, sampler.epoch)))
            if section.clip_norm is not None:
                engine.clip_grad_norm_(section.clip_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            activity.advance()
    count, asked = len(data.test) if data.test is not None else 0, section.evaluate_samples  # type: ignore[arg-type]
    if asked != "all":
        count = min(count, FEW_STEPS * section.global_batch if asked is None else asked)
    if count == 0:
        return Truth(losses, None)
    metric, parts = counted_by(model.loss), list[Evaluation]()
    assert data.test is not None
    for batch in EpochSampler.of(data.test, section.global_batch, shuffle=False, first=count):
        parts.append(engine.evaluate(*_rows(data.test, batch, job, section.seed, "test"), metric))
    weight, counted = sum(p.weight for p in parts), sum(p.counted for p in parts)
    hits = sum((p.metric or 0.0) * p.counted for p in parts)
    mean = hits / (counted or 1.0) if metric is not None else None
    return Truth(losses, Evaluation(sum(p.loss * p.weight for p in parts) / (weight or 1.0), mean, weight, counted))


def _rows(data: Any, numbers: torch.Tensor, job: Job, *place: int | str) -> tuple[Any, Any]:
    inputs, targets = fetch(data, numbers, *place)
    return as_type(inputs, job.train.dtype), as_type(targets, job.train.dtype)
