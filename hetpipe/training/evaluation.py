"""The samples of a job that do not train: measured while its run goes on and at its end, by any plan the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hetpipe.building.data import EpochSampler, size_for
from hetpipe.building.evaluated import build_metric, counted_by
from hetpipe.building.feed import Ask, Reading
from hetpipe.checkpoints.best import Best, Measured
from hetpipe.documents.job import Job
from hetpipe.documents.sections.evaluate import EvaluateSection
from hetpipe.layers.model import Loss, Tensors
from hetpipe.processes.progress import Activity, warn
from hetpipe.processes.stopping import RunError
from hetpipe.runtime.base import Evaluation
from hetpipe.runtime.checks.shortage import ShortMemoryError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.observers.records import EvaluationRecord
from hetpipe.training.session import Session

FEW_STEPS = 4  # unless the job says otherwise, as many samples are evaluated at the end of a run as so many steps train


class Evaluator:
    """Evaluates on this rank. `count`: how many samples, of `held_out`; 0: there are none. `best`: what of the evaluations
    counts. `done`: the step of the last one, and what it gave."""

    def __init__(
        self, job: Job, session: Session, engine: PlanEngine, reading: Reading, own: Callable[[Tensor], Tensor | None]
    ) -> None:
        self.engine, self.reading, self.own, self.seed = engine, reading, own, job.train.seed
        self.samples, self.batch = session.data.test, job.train.global_batch
        self.section = job.evaluate or EvaluateSection(samples=_unasked(job))
        self.held_out = len(self.samples) if self.samples is not None else 0  # type: ignore[arg-type]
        self.count = self.held_out if self.section.samples == "all" else min(self.section.samples, self.held_out)
        self.metric, self.loss = build_metric(session.model.loss, self.section), session.model.loss
        self.best = Best(self.section, Measured.by(self.section, self.count, session.evaluated))
        self.done: tuple[int, Evaluation] | None = None

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether samples are measured while the run goes on, and after this step."""
        every = self.section.every_steps
        return self.count > 0 and every is not None and (last or step % every == 0)

    def run(self, step: int, *, inner: bool = False) -> EvaluationRecord | None:
        """Measure the samples in global batches, and compare with the evaluations before; None if there are none. `inner`: in the
        midst of training. Collective, and the same on every rank."""
        if self.count == 0 or self.samples is None:
            return None
        losses, weight, hits, counted = 0.0, 0.0, 0.0, 0.0
        batches = list(EpochSampler.of(self.samples, self.batch, shuffle=False, first=self.count))
        asked = (Ask.of(self.own(batch), self.seed, "test", size=size_for(self.samples, batch)) for batch in batches)
        with (
            Activity("evaluating", len(batches), shown=self.engine.world.is_main, inner=inner) as activity,
            self.reading.open(self.samples, asked, lambda: "test samples") as reader,
        ):
            for inputs, targets in reader:
                found = self._evaluated(inputs, targets, step)
                losses, weight = losses + found.loss * found.weight, weight + found.weight
                hits, counted = hits + (found.metric or 0.0) * found.counted, counted + found.counted
                activity.advance(f"loss {losses / (weight or 1.0):.4f}")
        mean = hits / (counted or 1.0) if self.metric is not None else None
        self.done = step, self.engine.world.first(Evaluation(losses / (weight or 1.0), mean, weight, counted))
        found = self.done[1]
        value = found.loss if self.section.metric == "loss" else found.metric
        is_best = self.best.note(step, value)
        if self.section.every_steps is not None and self.best.saved is None and self.engine.world.is_main:
            warn(f"note: the evaluation after step {step} gave {self.section.called} {value}, so none is the best so far")
        return self._record(step, found, is_best=is_best)

    def _evaluated(self, inputs: Tensors | None, targets: Tensors | None, step: int) -> Evaluation:
        """Of a batch. RunError on every rank if a device has no memory for it: outputs of the largest micro-batch are there at
        once, though nothing is kept of them."""
        try:
            return self.engine.evaluate(inputs, targets, self.metric)
        except ShortMemoryError as error:
            raise RunError(
                f"the evaluation after step {step}: {error}. Plans that leave more memory free have smaller micro-batches "
                "(plan.memory_reserve: 0.2)"
            ) from None

    def _record(self, step: int, found: Evaluation, *, is_best: bool) -> EvaluationRecord:
        own = not isinstance(self.section.metric, str)
        return EvaluationRecord(
            step=step,
            loss=found.loss,
            accuracy=None if own else found.metric,
            perplexity=perplexity(self.loss, found.loss),
            metric=self.section.called if own else None,
            value=found.metric if own else None,
            is_best=is_best,
            samples=self.count,
            test_samples=self.held_out,
        )


def _unasked(job: Job) -> int | Literal["all"]:
    """How many samples a run measures that has no section `evaluate`."""
    said = job.train.evaluate_samples
    return FEW_STEPS * job.train.global_batch if said is None else said


def perplexity(loss: Loss, mean: float) -> float | None:
    """exp of a mean cross-entropy over tokens; None of another loss, or where that is too large for a number."""
    if loss.weight != "tokens" or counted_by(loss) is None or not mean < math.log(torch.finfo(torch.float64).max):
        return None
    return math.exp(mean)
