"""What the state of a run is, and how a run goes on from a checkpoint whose job has changed: exactly, with the change said, or
not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hetpipe.building.build import optimizer_factory
from hetpipe.building.data import SamplerState
from hetpipe.building.feed import Feed
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.base import KEY as BASE
from hetpipe.checkpoints.base import check_numbers, numbers_key, numbers_of_base, other_base, pinned_base
from hetpipe.checkpoints.revision import KEY as REVISION
from hetpipe.checkpoints.revision import is_another, pinned, to_set_back
from hetpipe.checkpoints.schedule import plain, scheduled
from hetpipe.checkpoints.state_tensors import state_keys
from hetpipe.checkpoints.stores.folder import FolderStore
from hetpipe.checkpoints.stores.store import Store, Stored
from hetpipe.checkpoints.training_state import BaseNumbers, TrainerState, take_over
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.processes.progress import say, warn
from hetpipe.processes.whereabouts import resumes_from
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.spec.job import CheckpointSection, Job, TrainSection

FREE = {  # by their section: a run may change them unsaid
    "train": ("steps", "epochs", "evaluate_samples", "check_replicas_every", "on_nonfinite"),
    "data": ("workers",),
}
CYCLED = ("lr", "momentum", "betas", "max_lr")  # of an optimizer: what a schedule holds in a state of its own


def identity(job: Job) -> dict[str, Any]:
    """What a run depends on, by the job's keys: `{"model.name": "gpt", "train.optimizer.lr": 0.001, …}`."""
    named = {name: getattr(job, name) for name in ("model", "adapter", "data", "loss", "train")}
    sections = {name: section.model_dump(mode="json", exclude=set(FREE.get(name, ())))
                for name, section in named.items() if section is not None}  # fmt: skip
    return dict(flat(sections, ""))


def flat(value: Any, name: str) -> list[tuple[str, Any]]:
    """(`a.b`, value) of every value in mappings, below `name`."""
    if isinstance(value, Mapping):
        return [row for key, inner in value.items() for row in flat(inner, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


UNSAID = dict(flat(TrainSection(global_batch=1, steps=1).model_dump(mode="json"), "train"))  # by a version without a key


def compare(saved: Mapping[str, Any] | None, own: Mapping[str, Any], checkpoint: Path | Stored) -> str | None:
    """What is to be said of a job that has changed since (None: nothing); InputError where the run cannot go on so."""
    if saved is None:
        return None  # by a version that did not say
    changed = [key for key in dict.fromkeys((*saved, *own)) if saved.get(key, UNSAID.get(key)) != own.get(key)]
    scheduled = any(key.startswith("train.scheduler.") for key in own)
    refused = [key for key in changed if _binds(key, scheduled)]
    told = {key: f"{key} was {shown(saved.get(key))}, is {shown(own.get(key))}" for key in changed}
    if is_another(saved, own):
        refused, told[REVISION] = [*refused, REVISION], to_set_back(saved, own)
    if BASE in changed:
        told[BASE] += f": {other_base(saved)}"
    if refused:
        raise InputError(
            f"checkpoint {checkpoint} is of another job; set these back, or name another checkpoint.folder to start anew:\n"
            + listed([told[key] for key in refused])
        )
    if not changed:
        return None
    if "train.seed" in told:
        told["train.seed"] += " (the order of the samples stays that of the old one)"
    return f"note: the job has changed since {checkpoint} was saved, and goes on as it is now:\n{listed(list(told.values()))}"


def _binds(key: str, scheduled: bool) -> bool:
    """Whether the state that was saved belongs to the old value."""
    section, _, name = key.rpartition(".")
    return (
        key in (BASE, "train.dtype", "train.frozen_dtype", "train.optimizer.name", "train.scheduler")
        or (section == "adapter" and name != "dropout")
        or section == "train.scheduler"
        or (scheduled and section.startswith("train.optimizer") and name in CYCLED)
    )


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What of a run changes from step to step on this rank. Its tensors go by the whole model's names (see `state_tensors`), the
    rest by the keys of trainer.json: what joins it has a line in `plain` and one in `take_over`, and a key in `TrainerState`."""

    train: TrainSection
    engine: PlanEngine
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    feed: Feed

    def plain(self) -> dict[str, Any]:
        """All but its tensors: the same on every rank."""
        return {
            "optimizer": self.train.optimizer.name,
            "scheduler": self.train.scheduler.name if self.train.scheduler is not None else None,
            "sampler": dict(self.feed.state_dict()),
            "scheduler_state": plain(self.scheduler.state_dict()) if self.scheduler is not None else None,
            "scheduled": scheduled(self.optimizer),
            "loss_scale": self.engine.loss_scale.state_dict(),
        }

    def take_over(self, state: TrainerState, source: str) -> None:
        """Go on from this, of a run of the same kind; `source`: for messages. InputError if the data are others."""
        try:
            self.feed.load_state_dict(SamplerState(**state.sampler.model_dump()))  # type: ignore[typeddict-item]
        except ValueError as error:
            raise InputError(f"{source}: {error}") from error
        if self.scheduler is not None:
            take_over(self.scheduler, self.optimizer, state)
        if state.loss_scale is not None:
            self.engine.loss_scale.load_state_dict(state.loss_scale.model_dump())


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The checkpoints of a job's run, which are kept in `store` (None: in the job's folder)."""

    job: Job
    section: CheckpointSection
    run: RunState
    store: Store | None = None

    @property
    def _store(self) -> Store:
        return self.store if self.store is not None else FolderStore(self.section.folder)

    def restore(self, total: int) -> TrainerState | None:
        """Take over the newest checkpoint of the job's folder for a run of `total` steps; None where there is none. InputError on
        every rank where the run cannot go on from it, or the ranks do not share that folder."""
        try:
            return self._restore(total)
        except InputError:  # it says what the run could go on from
            resumes_from("")
            raise

    def _restore(self, total: int) -> TrainerState | None:
        world = self.run.engine.world
        self._store.check_shared(world.patiently(), "checkpoint.folder")
        numbers = self._numbers
        newest = checkpoint.newest(self._store, world)
        if newest is None:
            return None
        if not self.section.resume:
            raise InputError(
                f"checkpoint.resume is false, but {self._store} holds checkpoints of an earlier run (the newest is "
                f"{newest.name}), among which new ones would be lost; name another folder, or remove that one"
            )
        state = world.together(lambda: checkpoint.read_state(newest))
        note = self._compared(newest, state)
        check_numbers(state.base_numbers, numbers, newest)
        factory = optimizer_factory(self.job.train.optimizer)
        engine = self.run.engine
        checkpoint.load(newest, engine.stage, self.run.optimizer, world, whole=engine.layers, keeps=state_keys(factory))
        self.run.take_over(state, f"checkpoint {newest}")
        resumes_from(f"step {state.step}, {newest}")
        if world.is_main:
            say(resumed(newest, state.step, total))
            if note is not None:
                warn(note)
        return state

    def _compared(self, newest: Stored, state: TrainerState) -> str | None:
        """What is to be said of a job that has changed; InputError where the run cannot go on so."""
        own = self.run.plain()
        for what, saved in (("optimizer", state.optimizer), ("scheduler", state.scheduler)):
            if saved != own[what]:
                raise InputError(
                    f"checkpoint {newest} was saved with the {what} {saved}, the job has {own[what]}: go on with the "
                    "same one, or name another checkpoint.folder to start anew"
                )
        state.check(own["scheduler_state"], len(self.run.optimizer.param_groups), newest.source)
        return compare(state.job, self._identity(), newest)

    def _identity(self) -> dict[str, Any]:
        return identity(self.job) | pinned(self.run.engine.layers) | self._base

    @cached_property
    def _base(self) -> dict[str, Any]:
        return pinned_base(self.run.engine.layers)

    @cached_property
    def _numbers(self) -> BaseNumbers | None:
        return numbers_of_base(self.run.engine.layers, self.run.engine.world.patiently(), self.run.engine.stage)

    def save(self, step: int, loss: float) -> Stored | None:
        """A checkpoint of this step; but never one whose parameters are not finite in the place of one whose are: None instead.
        Collective."""
        engine = self.run.engine
        if not engine.parameters_are_finite():
            if engine.world.is_main:
                warn(f"note: step {step} is not saved: its parameters are not finite")
            return None
        extra = {
            "loss": loss if math.isfinite(loss) else None,
            "job": self._identity(),
            **numbers_key(self._numbers),
            **self.run.plain(),
        }
        begun = checkpoint.begin(self._store, step, engine.stage, self.run.optimizer, extra, engine.world, engine.shard)
        saved = begun.finish(self.section.keep)
        resumes_from(f"step {step}, {saved}")
        return saved


def resumed(newest: Path | Stored, step: int, total: int) -> str:
    """What is said of the checkpoint from which a run goes on, or with which it had ended."""
    anew = "to start anew, name another checkpoint.folder, or remove that one"
    if step >= total:
        return f"this run is finished: {newest} is of step {step}, the job has {total}; to go on, give it more steps; {anew}"
    return f"resuming from {newest}; {anew}"
