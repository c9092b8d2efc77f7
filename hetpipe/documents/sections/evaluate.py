"""The section `evaluate` of a job: which samples that do not train are measured, how often, and what follows from it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from hetpipe.files.formats import Count, Name, Positive, Strict

HELD_OUT = "test_fraction"  # the argument of data that says which part does not train: none of a set of its own


class EvaluationData(Strict):
    """Samples to evaluate, all of them: of the job's own data function with other `args` (those that are left out stay as they
    are), or of another one, by `name` or `target`."""

    name: Name | None = None
    target: Name | None = None
    args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.name is not None and self.target is not None:
            raise ValueError("give 'name' (from the registry), or 'target' (package.module:function), or neither of the two")
        if self.name is None and self.target is None and not self.args:
            raise ValueError("it says nothing: write 'args', such as {file: dev.jsonl}, or another 'name' or 'target'")
        return self


class MetricSection(Strict):
    """What is measured beside the loss: a function, as `target: package.module:function`, of the outputs and the targets of a
    micro-batch that returns (sum, count); the metric is the ratio of both sums over all samples. `better`: which of two values
    is."""

    target: Name
    better: Literal["higher", "lower"] = "higher"


class EvaluateSection(Strict):
    """The loss of samples that do not train is measured after the last step, and every `every_steps` before it. `data`: which
    samples these are; without it, those that the job's data hold out. `samples`: the first so many of them. `metric`: by what one
    evaluation is compared with another: the loss, the accuracy (of a cross-entropy), or a function. The checkpoint of the best
    evaluation is kept, and its weights are exported. After `patience` evaluations in a row without a better one, the run ends."""

    every_steps: Positive | None = None
    data: EvaluationData | None = None
    samples: Count | Literal["all"] = "all"
    metric: Literal["loss", "accuracy"] | MetricSection = "loss"
    patience: Positive | None = None

    @model_validator(mode="after")
    def _patience_needs_several(self) -> Self:
        if self.patience is not None and self.every_steps is None:
            raise ValueError("'patience' counts evaluations while the run goes on: write 'every_steps', too")
        return self

    @property
    def called(self) -> str:
        """The metric's name, for messages and files."""
        return self.metric if isinstance(self.metric, str) else self.metric.target.rpartition(":")[2]

    @property
    def higher_is_better(self) -> bool:
        """Whether of two values the higher one is better."""
        return self.metric == "accuracy" if isinstance(self.metric, str) else self.metric.better == "higher"
