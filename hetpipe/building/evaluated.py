"""Which samples a job evaluates, and what it counts of them beside the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hetpipe.documents.job import DataSection, Job
from hetpipe.documents.sections.evaluate import HELD_OUT, EvaluateSection, EvaluationData
from hetpipe.files.messages import InputError
from hetpipe.layers.losses.fused import fused_accuracy, fused_cross_entropy
from hetpipe.layers.losses.preference import dpo, dpo_accuracy, mean_accuracy, orpo, reward, reward_accuracy, simpo
from hetpipe.layers.model import Loss, accuracy, cross_entropy
from hetpipe.planning import registry
from hetpipe.runtime.base import Metric


def evaluated_section(job: Job, wanted: EvaluationData, function: Callable[..., Any]) -> DataSection:
    """The section `data` of a set of its own, all of whose samples are evaluated. `function`: that of the job's data, whose
    arguments it has where it names no other function."""
    if wanted.name is not None or wanted.target is not None:
        return DataSection(name=wanted.name, target=wanted.target, args=wanted.args)
    whole: Mapping[str, Any] = {HELD_OUT: 0} if HELD_OUT in inspect.signature(function).parameters else {}
    return DataSection(name=job.data.name, target=job.data.target, args={**job.data.args, **whole, **wanted.args})


def refuse_nothing(job: Job, *, held_out: bool) -> None:
    """InputError if a job evaluates samples, and its data hold out none."""
    if job.evaluate is not None and not held_out:
        raise InputError(
            f"evaluate measures samples that do not train, and data {job.data.label!r} holds out none: let it hold out some (of "
            "texts and chats: data.args.test_fraction), or name a set of its own (evaluate: {data: {args: {file: dev.jsonl}}})"
        )


def counted_by(loss: Loss) -> Metric | None:
    """What an evaluation counts beside the loss: for cross-entropy, the correct predictions; for preferences, the samples whose
    better answer leads."""
    of: Any = getattr(loss.function, "func", loss.function)
    of_pairs = {dpo: dpo_accuracy, simpo: mean_accuracy, orpo: mean_accuracy, reward: reward_accuracy}
    if of in of_pairs:
        return of_pairs[of]
    counts = {cross_entropy: accuracy, fused_cross_entropy: fused_accuracy}.get(of)
    return partial(counts, ignore_index=loss.ignore_index) if counts is not None else None


def build_metric(loss: Loss, section: EvaluateSection) -> Metric | None:
    """What the section says is counted; without a function of its own, as `counted_by`. InputError if there is no such function,
    or nothing to count."""
    if not isinstance(section.metric, str):
        return registry.load_target(section.metric.target)
    found = counted_by(loss)
    if found is None and section.metric == "accuracy":
        raise InputError(
            "evaluate.metric is accuracy, of the predictions of a cross_entropy, and the job has another loss: write loss, or "
            "{target: package.module:function}, a function of outputs and targets that returns (sum, count)"
        )
    return found
