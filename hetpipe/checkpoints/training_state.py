"""trainer.json: the plain part of a checkpoint, that is, all of a run but its tensors. What was damaged is refused by its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hetpipe.files.formats import Count, Document, Flag, Name, Number, Positive, Seed, Strict
from hetpipe.files.messages import InputError, listed, shown

COUNTERS = ("last_epoch", "_step_count")  # of a schedule
Fraction = Annotated[Number, Field(ge=0, le=1)]


class SamplerPosition(Strict):
    """Where an EpochSampler stands: `position` samples of epoch `epoch` have been seen."""

    samples: Positive
    seed: Seed
    shuffle: Flag
    epoch: Count
    position: Count

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if self.position > self.samples:
            raise ValueError(f"position {self.position} is outside an epoch of {self.samples} samples")
        return self


class Scheduled(Strict):
    """What a schedule changes in one of the optimizer's groups of parameters."""

    lr: Annotated[Number, Field(ge=0)] | None = None
    momentum: Annotated[Number, Field(ge=0)] | None = None
    betas: tuple[Fraction, Fraction] | None = None


class TrainerState(Document):
    """Step, place in the data, optimizer and schedule. `loss` is that of the last step; `scheduler_state` is what the schedule's
    `state_dict` has in plain values; `tensors` is how many lie beside it; `job` is what the run depended on (see `resume`)."""

    called: ClassVar[str] = "checkpoint"
    format: Literal["hetpipe.checkpoint/1"]
    step: Count
    loss: Number | None = None
    sampler: SamplerPosition
    optimizer: Name
    scheduler: Name | None
    scheduler_state: dict[str, Any] | None
    scheduled: tuple[Scheduled, ...]
    tensors: Count | None = None
    job: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.scheduler is None) != (self.scheduler_state is None):
            raise ValueError(f"scheduler is {shown(self.scheduler)}, but scheduler_state is {shown(self.scheduler_state)}")
        return self

    def check(self, own_state: Mapping[str, Any] | None, groups: int, source: str) -> None:
        """Compare with a new schedule's own plain state (None: there is none) and the number of the optimizer's groups: an
        InputError lists the keys whose values are not of the kind that the schedule wants."""
        faults = differences(self.scheduler_state, own_state, "scheduler_state")
        if len(self.scheduled) != groups:
            faults.append(f"scheduled: {len(self.scheduled)} groups of parameters, the optimizer has {groups}")
        if faults:
            raise InputError(f"{source}: {len(faults)} fault(s) in this checkpoint\n{listed(faults)}")


def differences(saved: Any, own: Any, where: str) -> list[str]:
    """The places where what was saved is of another kind than what the schedule itself has there."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        faults = [f"{where}.{key}: not there" for key in own if key not in saved]
        faults += [f"{where}: unknown key {shown(key)}" for key in saved if key not in own]
        return faults + [f for key in own if key in saved for f in differences(saved[key], own[key], f"{where}.{key}")]
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        if len(own) != len(saved):
            return [f"{where}: {len(saved)} values, the schedule has {len(own)}"]
        pairs = enumerate(zip(saved, own, strict=True))
        return [f for i, (there, here) in pairs for f in differences(there, here, f"{where}.{i}")]
    wanted = "count" if where.rpartition(".")[2] in COUNTERS else _kind(own)
    fits = _counts(saved) if wanted == "count" else _kind(saved) == wanted
    return [] if own is None or fits else [f"{where}: {shown(saved)} is no {wanted}"]


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1  # -1 before the first step


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number" if math.isfinite(value) else "finite number"
    known: dict[type, str] = {str: "text", list: "list", dict: "mapping"}
    return known.get(type(value), type(value).__name__)
