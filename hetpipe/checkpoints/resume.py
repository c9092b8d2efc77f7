"""What the state of a run is, and how a run goes on from a checkpoint whose job has changed: exactly, with the change said, or
not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hetpipe.building.build import optimizer_factory
from hetpipe.building.content import Content
from hetpipe.building.feed import Feed
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.beside.copies import HostCopies
from hetpipe.checkpoints.beside.writing import Writing
from hetpipe.checkpoints.best import Best
from hetpipe.checkpoints.kept import keep
from hetpipe.checkpoints.origin.base import KEY as BASE
from hetpipe.checkpoints.origin.base import begun_in, other_base, pinned_base
from hetpipe.checkpoints.origin.base_numbers import check_numbers, numbers_key, numbers_of_base
from hetpipe.checkpoints.origin.configured import CONFIG, config_changes, config_of
from hetpipe.checkpoints.origin.revision import KEY as REVISION
from hetpipe.checkpoints.origin.revision import is_another, pinned, to_set_back
from hetpipe.checkpoints.schedule import plain, scheduled
from hetpipe.checkpoints.state_tensors import state_keys
from hetpipe.checkpoints.stores.folder import FolderStore
from hetpipe.checkpoints.stores.store import Store, Stored, name_of
from hetpipe.checkpoints.training_state import BaseNumbers, LastStep, TrainerState, said_of, take_over
from hetpipe.documents.job import GONE, CheckpointSection, Job, TrainSection
from hetpipe.files.formats import flat
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.processes.progress import say, warn
from hetpipe.processes.whereabouts import resumes_from
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine

FREE = {  # by their section: a run may change them unsaid
    "train": ("steps", "epochs", "evaluate_samples", "check_replicas_every", "on_nonfinite"),
    "data": ("workers",),
}
ANEW = "begin anew: name another checkpoint.folder"
FROM_ADAPTER = "there, adapter: {weights: FOLDER} begins with the adapter that this run has exported"
LACKING = "note: steps wait while a checkpoint is written, for lack of host memory {}. checkpoint.wait: true asks for no copies"
OLDER = "note: the checkpoint is of a version that did not say what was in the data: whether they are the same is not looked at"
CYCLED = ("lr", "momentum", "betas", "max_lr")  # of an optimizer: what a schedule holds in a state of its own


def identity(job: Job) -> dict[str, Any]:
    """What a run depends on, by the job's keys: `{"model.name": "gpt", "train.optimizer.lr": 0.001, …}`."""
    named = {name: getattr(job, name) for name in ("model", "adapter", "data", "loss", "train")}
    sections = {
        name: section.model_dump(mode="json", exclude=set(FREE.get(name, ())))
        for name, section in named.items()
        if section is not None
    }
    return dict(flat(sections, ""))


UNSAID = dict(flat(TrainSection(global_batch=1, steps=1).model_dump(mode="json"), "train"))  # by a version without a key
UNSAID["train.scheduler.from_step"] = 0
NO_LONGER_SAID = dict(flat(GONE, "train"))
UNSAID.update(NO_LONGER_SAID)


def compare(
    saved: Mapping[str, Any] | None, own: Mapping[str, Any], checkpoint: Path | Stored, *, step: int, anew: bool = False
) -> str | None:
    """What is to be said of a job that has changed since this step (None: nothing); InputError where the run cannot go on so.
    `anew`: its schedule begins here."""
    if saved is None:
        return None  # by a version that did not say
    changed = [
        key
        for key in dict.fromkeys((*saved, *own))
        if not key.startswith(CONFIG) and saved.get(key, UNSAID.get(key)) != own.get(key, NO_LONGER_SAID.get(key))
    ]
    changed += (configured := config_changes(saved, own))
    scheduled = any(key.startswith("train.scheduler.") for key in own)
    refused = [key for key in changed if not (anew and _is_of_schedule(key, scheduled)) and _binds(key, scheduled)]
    told = {key: f"{key} was {shown(saved.get(key))}, is {shown(own.get(key, NO_LONGER_SAID.get(key)))}" for key in changed}
    if is_another(saved, own):
        refused, told[REVISION] = [*refused, REVISION], to_set_back(saved, own)
    if BASE in changed:
        told[BASE] += f": {other_base(saved)}"
        refused += configured
    if refused:
        keys = listed([told[key] for key in refused])
        raise InputError(
            f"checkpoint {checkpoint} belongs to another job:\n{keys}\n"
            f"To resume, set these keys back.\n{_of_schedule(refused, scheduled, step)}"
            "To start anew, name another folder: --set checkpoint.folder=FOLDER"
        )
    if not changed:
        return None
    if "train.seed" in told:
        told["train.seed"] += " (the order of the samples stays that of the old one)"
    lines = listed(list(told.values()))
    return f"note: the job has changed since {checkpoint} was saved. The run resumes with the new values:\n{lines}"


def refuse_other_data(saved: Content | None, own: Content | None, checkpoint: Path | Stored, advice: str) -> None:
    """InputError where a run would go on over other data, as far as both are known."""
    if saved is not None and own is not None and (told := own.other(saved)):
        raise InputError(
            f"checkpoint {checkpoint} was saved over other data: {told}. To resume, set back what has changed, or {advice}"
        )


def check_data(job: Job, content: Content, world: World) -> int:
    """Return the step of the newest checkpoint in the job's folder, 0 without one. InputError on every rank where it is of other
    data; a note where it does not say of which."""
    steps = [0]

    def check() -> None:
        found = checkpoint.list_checkpoints(job.checkpoint.folder) if job.checkpoint is not None else []
        if found:
            state = checkpoint.read_state(found[-1])
            refuse_other_data(state.data, content, found[-1], ANEW if job.adapter is None else f"{ANEW}; {FROM_ADAPTER}")
            if state.data is None:
                warn(OLDER)
            steps.append(state.step)

    with _not_from_it():
        world.on_main(check)
    found: int = world.first(steps[-1])
    return found


@contextmanager
def _not_from_it() -> Iterator[None]:
    """Say what the run could resume from, where its newest checkpoint is refused."""
    try:
        yield
    except InputError:
        resumes_from("")
        raise


def _binds(key: str, scheduled: bool) -> bool:
    """Whether the state that was saved belongs to the old value."""
    section, _, name = key.rpartition(".")
    return (
        key in (BASE, "train.dtype", "train.frozen_dtype", "train.optimizer.name")
        or (section == "adapter" and name != "dropout")
        or _is_of_schedule(key, scheduled)
    )


def _is_of_schedule(key: str, scheduled: bool) -> bool:
    """Whether the state of a schedule belongs to it: `scheduled`, whether the run has one."""
    section, _, name = key.rpartition(".")
    own = key == "train.scheduler" or section == "train.scheduler"
    return own or (scheduled and section.startswith("train.optimizer") and name in CYCLED)


def _of_schedule(refused: Sequence[str], scheduled: bool, step: int) -> str:
    """How a run goes on under another schedule, where nothing else is in its way."""
    if not all(_is_of_schedule(key, scheduled) for key in refused):
        return ""
    return f"To go on with another schedule, let it begin here: --set train.scheduler.from_step={step}\n"


@dataclass
class Beside:
    """What a run has kept beside its checkpoints, by digests: of what its `reference` says of each set of samples."""

    reference: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What of a run changes from step to step on this rank. Its tensors go by the whole model's names (see `state_tensors`), the
    rest by the keys of trainer.json: what joins it has a line in `plain` and one in `take_over`, and a key in `TrainerState`."""

    train: TrainSection
    engine: PlanEngine
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    feed: Feed
    best: Best
    beside: Beside = field(default_factory=Beside)

    def plain(self) -> dict[str, Any]:
        """All but its tensors: the same on every rank."""
        return {
            "optimizer": self.train.optimizer.name,
            "scheduler": self.train.scheduler.name if self.train.scheduler is not None else None,
            "sampler": dict(self.feed.state_dict()),
            "scheduler_state": plain(self.scheduler.state_dict()) if self.scheduler is not None else None,
            "scheduled": scheduled(self.optimizer),
            "loss_scale": self.engine.loss_scale.state_dict(),
            **({"evaluated": found} if (found := self.best.state_dict()) is not None else {}),
            **({"reference": self.beside.reference} if self.beside.reference else {}),
        }

    def take_over(self, state: TrainerState, source: str, *, scheduled: bool = True) -> None:
        """Go on from this, of a run of the same kind; `source`: for messages; `scheduled`: also where its schedule stands.
        InputError if the data are others."""
        try:
            self.feed.load_state_dict(state.sampler.model_dump(), state.stream)
        except ValueError as error:
            raise InputError(f"{source}: {error}") from error
        self.beside.reference = dict(state.reference)
        if self.scheduler is not None and scheduled:
            take_over(self.scheduler, self.optimizer, state)
        if state.loss_scale is not None:
            self.engine.loss_scale.load_state_dict(state.loss_scale.model_dump())
        if (note := self.best.take_over(state.evaluated)) is not None and self.engine.world.is_main:
            warn(note)


class Complete(NamedTuple):
    """A checkpoint that is complete now."""

    step: int
    checkpoint: Stored


@dataclass(kw_only=True)
class Saved:
    """The checkpoints of a job's run over these data, which are kept in `store` (None: in the job's folder). `writing`: the one
    that is under way, beside the steps, with `copies` of what it holds."""

    job: Job
    section: CheckpointSection
    run: RunState
    content: Content
    store: Store | None = None
    writing: Writing | None = field(default=None, init=False)
    copies: HostCopies = field(default_factory=HostCopies, init=False)
    _told_lacking: bool = field(default=False, init=False)

    @property
    def _store(self) -> Store:
        return self.store if self.store is not None else FolderStore(self.section.folder)

    def restore(self, total: int) -> TrainerState | None:
        """Take over the newest checkpoint of the job's folder for a run of `total` steps; None where there is none. InputError on
        every rank where the run cannot go on from it, or the ranks do not share that folder."""
        with _not_from_it():
            return self._restore(total)

    def _restore(self, total: int) -> TrainerState | None:
        world = self.run.engine.world
        self._store.check_shared(world.patiently(), "checkpoint.folder")
        numbers = self._numbers
        newest = checkpoint.newest(self._store, world)
        if newest is None:
            self._begins_anew(None, None)
            return None
        if not self.section.resume:
            raise InputError(
                f"checkpoint.resume is false, but {self._store} holds checkpoints of an earlier run (the newest is "
                f"{newest.name}), which new ones would mix with. Name another folder, or remove that one"
            )
        state = world.together(lambda: checkpoint.read_state(newest))
        note = self._compared(newest, state)
        check_numbers(state.base_numbers, numbers, newest)
        factory = optimizer_factory(self.job.train.optimizer)
        engine = self.run.engine
        checkpoint.load(newest, engine.stage, self.run.optimizer, world, whole=engine.layers, keeps=state_keys(factory))
        self.run.take_over(state, f"checkpoint {newest}", scheduled=not self._begins_anew(newest, state))
        resumes_from(f"step {state.step}, {newest}")
        if world.is_main:
            say(resumed(newest, state.step, total, self.run.best))
            if note is not None:
                warn(note)
        return state

    def _compared(self, newest: Stored, state: TrainerState) -> str | None:
        """What is to be said of a job that has changed; InputError where the run cannot go on so."""
        own, anew = self.run.plain(), self._begins_anew(newest, state)
        for what, saved in (("optimizer", state.optimizer), ("scheduler", state.scheduler)):
            if saved != own[what] and not (anew and what == "scheduler"):
                raise InputError(
                    f"checkpoint {newest} was saved with the {what} {saved}, but the job has {own[what]}. Take the "
                    "same one to resume, or name another checkpoint.folder to start anew"
                )
        if not anew:
            state.check(own["scheduler_state"], len(self.run.optimizer.param_groups), newest.source)
        return compare(state.job, self._identity(), newest, step=state.step, anew=anew)

    def _begins_anew(self, newest: Stored | None, state: TrainerState | None) -> bool:
        """Whether the schedule begins at this checkpoint. InputError where it should have begun at another one."""
        section = self.job.train.scheduler
        begin = section.from_step if section is not None else 0
        if begin == 0 or (state is not None and (state.job or {}).get("train.scheduler.from_step", 0) == begin):
            return False
        if state is None or state.step != begin:
            found = f"the newest checkpoint, {newest}, is of step {state.step}" if state is not None else "there is no checkpoint"
            raise InputError(
                f"train.scheduler.from_step is {begin}, so this schedule would replace another from that step on, but "
                f"{found}. "
                "Leave from_step out, or write the step of the newest checkpoint"
            )
        return True

    def _identity(self) -> dict[str, Any]:
        return identity(self.job) | pinned(self.run.engine.layers) | self._built

    @cached_property
    def _built(self) -> dict[str, Any]:
        """What is in the model from the start."""
        layers, found = self.run.engine.layers, checkpoint.complete(self._store)
        return pinned_base(layers) | config_of(layers) | begun_in(layers, said_of(found[-1]) if found else None)

    @cached_property
    def _numbers(self) -> BaseNumbers | None:
        return numbers_of_base(self.run.engine.layers, self.run.engine.world.patiently(), self.run.engine.stage)

    def save(self, step: int, loss: float) -> Complete | None:
        """Save this step, while none is under way; but never one whose parameters are not finite in the place of one whose are.
        None: that, or it is under way now. Collective."""
        engine = self.run.engine
        if not engine.parameters_are_finite():
            if engine.world.is_main:
                warn(f"note: step {step} is not saved, because its parameters are not finite")
            return None
        extra = self._extra(loss) | self._stream()
        best = self.run.best.saved
        spared = name_of(best.step) if best is not None else None
        copies = None if self.section.wait else self.copies
        begun = checkpoint.begin(self._store, step, engine.stage, self.run.optimizer, extra, engine.world, copies)

        def done(saved: Stored) -> None:
            resumes_from(f"step {step}, {saved}")

        if begun.copied:
            self.writing = Writing(begun, self.section.keep, spared, done)
            return None
        if begun.lacking is not None and not self._told_lacking:
            self._told_lacking = True
            if engine.world.is_main:
                warn(LACKING.format(begun.lacking))
        saved = begun.finish(self.section.keep, spared)
        done(saved)
        return Complete(step, saved)

    def complete(self) -> Complete | None:
        """Wait for the one that is under way; None without one. CheckpointError on every rank if it cannot be written.
        Collective."""
        writing, self.writing = self.writing, None
        return Complete(writing.begun.step, writing.complete()) if writing is not None else None

    def abandon(self) -> None:
        """Leave nothing of the one that is under way, as far as this rank can alone, and soon."""
        if self.writing is not None:
            self.writing.abandon()

    def keep(self, step: int, loss: float | None, last: LastStep | None) -> bool:
        """Keep what this rank holds after `step`, since another is lost; whether that can be used (see `kept`)."""
        bookmark = self.run.feed.bookmark
        stream = {"stream": bookmark.model_dump(mode="json") if bookmark is not None else None}
        extra = self._extra(loss) | (stream if self.content.samples is None else {})
        extra |= {"last": last.model_dump()} if last is not None else {}
        return keep(self.section.folder, step, self.run.engine, self.run.optimizer, extra)

    def _extra(self, loss: float | None) -> dict[str, Any]:
        """What trainer.json has beside tensors and files, as far as every rank knows it."""
        return {
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "data": self.content.model_dump(mode="json"),
            "job": self._identity(),
            **numbers_key(self._numbers),
            **self.run.plain(),
        }

    def _stream(self) -> dict[str, Any]:
        """The key of a bookmark of the stream that is read, from a rank that reads it. Collective if the data are a stream."""
        if self.content.samples is not None:
            return {}
        mark = next((mark for mark in self.run.engine.world.gather(self.run.feed.bookmark) if mark is not None), None)
        return {"stream": mark.model_dump(mode="json") if mark is not None else None}


def resumed(newest: Path | Stored, step: int, total: int, best: Best | None = None) -> str:
    """What is said of the checkpoint from which a run goes on, or with which it had ended."""
    anew = "to start anew, name another checkpoint.folder, or remove that one"
    if best is not None and best.is_over and step < total:
        return (
            f"this run has ended early, at step {step} of {total}, after {best.told}: to go on from {newest}, give it more "
            f"evaluate.patience; {anew}"
        )
    if step >= total:
        return f"this run is finished: {newest} is of step {step}, the job has {total}; to go on, give it more steps; {anew}"
    return f"resuming from {newest}; {anew}"
