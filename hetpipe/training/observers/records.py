"""What observers of a run are told: numbers, names and documents, nothing that leads back into the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run begins. `first_step` steps of its `total_steps` were done before, by a run from whose checkpoint it goes on.
    `predicted_step_seconds`: None where nothing is predicted, as on all ranks but the main one. `peak_bytes` has the devices of
    this rank, and the most that each has held so far (None: not known). `steps_differ`: whether steps have samples of other
    lengths, so that a step may take much longer than the one before; predicted are those in the mean. `predicted_bytes`: the most
    that each device of the plan is predicted to hold; empty where nothing is predicted. `told_again`: the last of the steps that
    were done before may not have been told, and is told again."""

    job: Job
    plan: Plan
    cluster: Cluster
    first_step: int
    total_steps: int
    predicted_step_seconds: float | None
    peak_bytes: Mapping[str, int | None]
    is_main: bool
    steps_differ: bool = False
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    told_again: bool = False

    @property
    def told(self) -> int:
        """How many steps are told already."""
        return self.first_step - self.told_again


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step of training is over; the first is number 1. `loss` is that of the whole global batch of `samples`; `grad_norm` is
    None where nothing is clipped; `loss_scale` is that of the step to come, and None where no loss is scaled; `left_out`: the
    optimizer did not take the step, since gradients overflowed, or were not finite and the job skips such steps.
    `fetch_seconds`: how long it has waited for this rank's samples. `step_seconds` and `samples_per_second` are of the step
    before, since a step lasts until the next one begins, and None in the first step of a run. `utilisation` has the share of a
    step in which each device of the plan worked, in the last of those steps that the job's `log.every_steps` says, or the last
    step of all; empty before, as is `memory_bytes`, the most that each of them has held by then. `tokens_per_second`: None where
    samples are no rows of tokens. `busy` and `peak_bytes` are of this rank's devices, and empty where nobody watches."""

    step: int
    epoch: int
    samples: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    loss_scale: float | None
    left_out: bool = False
    fetch_seconds: float
    step_seconds: float | None = None
    samples_per_second: float | None = None
    utilisation: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: Mapping[str, int | None] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    tokens_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Samples that do not train were evaluated after `step`: `samples` of all `test_samples`. `accuracy`: None where the loss
    is of no classes, or a function of the job's measures something else, called `metric`, of which this is the `value`.
    `perplexity`: of a cross-entropy of tokens. `is_best`: of all evaluations of the run so far."""

    step: int
    loss: float
    accuracy: float | None
    samples: int
    test_samples: int
    perplexity: float | None = None
    metric: str | None = None
    value: float | None = None
    is_best: bool = False


@dataclass(frozen=True, kw_only=True)
class DriftRecord:
    """Devices compute faster or slower than before, and not for some steps only, as was found after `step`. `factors`: of each of
    them, how many times as long it computes as the profile says, beside what that was off from the start (1.0: as fast again);
    empty where only a profile is told that is off. `off`: of each device that was, how many times as long as the profile says it
    computed from the start. `measured_seconds` and `predicted_seconds`: in which each device of the plan computes in a step.
    `step_seconds`: of a step at these speeds, by prediction; `fresh_step_seconds`: by the plan that would be made for them, None
    where none would be faster. `moves`: the run goes on with that; `again`: or it is weighed again after this step. `told`: all
    of this for people."""

    step: int
    factors: Mapping[str, float]
    off: Mapping[str, float]
    measured_seconds: Mapping[str, float]
    predicted_seconds: Mapping[str, float]
    step_seconds: float | None = None
    fresh_step_seconds: float | None = None
    moves: bool = False
    again: int | None = None
    told: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint of `step` is complete; `where`: its folder, or what its store calls it."""

    step: int
    where: str


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """A run ends after `step` of all its steps (0: before the first). `error`: None where all was done; else what ends it, such
    as "stopped by SIGTERM after step 7" or "InputError: …"."""

    step: int
    error: str | None
