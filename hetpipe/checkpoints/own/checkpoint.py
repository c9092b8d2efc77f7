"""Checkpoints in one's own loop: the same as the trainer's, without its place in the data."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hetpipe.building.content import Content
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import adapter_keys, adapter_names, base_of, check_adapted
from hetpipe.checkpoints.origin.base_numbers import check_numbers, numbers_key, numbers_of_base
from hetpipe.checkpoints.own.facts import content_in, facts_of_job, loop_facts, note_of_change
from hetpipe.checkpoints.resume import refuse_other_data
from hetpipe.checkpoints.schedule import plain, scheduled, unfit
from hetpipe.checkpoints.state_tensors import state_keys
from hetpipe.checkpoints.stores.folder import store_at
from hetpipe.checkpoints.stores.store import Store, Stored
from hetpipe.checkpoints.training_state import LoopState, SavedState, TrainerState, read_saved, take_over
from hetpipe.files.messages import InputError, listed
from hetpipe.processes.progress import warn
from hetpipe.runtime.plan_engine import PlanEngine


@overload
def save_checkpoint(
    engine: PlanEngine,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str],
    step: int,
    scheduler: LRScheduler | None = None,
    *,
    keep: int = 3,
    data: object = None,
) -> Path: ...


@overload
def save_checkpoint(
    engine: PlanEngine,
    optimizer: torch.optim.Optimizer,
    folder: Store,
    step: int,
    scheduler: LRScheduler | None = None,
    *,
    keep: int = 3,
    data: object = None,
) -> Stored: ...


def save_checkpoint(
    engine: PlanEngine,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str] | Store,
    step: int,
    scheduler: LRScheduler | None = None,
    *,
    keep: int = 3,
    data: object = None,
) -> Path | Stored:
    """Save the model, the optimizer, the scheduler if there is one, `engine.steps` and the loss scale where one is in use, as
    they are after `step`, complete or not at all, and keep the newest `keep` there: in a folder, or in another store. With
    `data`, the loop's data set, a digest of what is in it is saved, too, which `load_checkpoint` compares. Every rank of the
    engine calls it. InputError if there is no room, if the hosts do not share this folder, or if the scheduler's
    `state_dict` holds more than plain values; CheckpointError if it cannot be written; ReplicaMismatchError if replicas of a
    layer hold different parameters."""
    world = engine.world.patiently()
    engine.check_replicas()
    schedule = world.together(lambda: _saved_schedule(scheduler, optimizer))
    every = world.gather((_layers(engine), schedule))
    first, (_, of_first) = world.ranks[0], every[0]
    for rank, (_, other) in zip(world.ranks, every, strict=True):
        if other.get("scheduler") != of_first.get("scheduler"):
            called = [_called(s.get("scheduler")) for s in (of_first, other)]
            raise InputError(f"save_checkpoint was given {called[0]} on rank {first}, and {called[1]} on rank {rank}")
    base = (
        {"base": found, "adapter": adapter_keys(engine.layers), "adapter_names": adapter_names(engine.layers)}
        if (found := base_of(engine.layers)) is not None
        else {}
    )
    base |= numbers_key(numbers_of_base(engine.layers, world, engine.stage))
    content = content_in(data, world)
    extra = base | {"steps": engine.steps, "loss_scale": engine.loss_scale.state_dict(), **of_first}
    extra |= {"loop": world.first(loop_facts(engine, optimizer))}
    extra |= {"data": content.model_dump(mode="json")} if content is not None else {}
    if any(other != of_first for _, other in every):
        stages = {layers: {key: own[key] for key in ("scheduler_state", "scheduled")} for layers, own in every}
        extra["schedules"] = [{"layers": layers, **own} for layers, own in stages.items()]
    saved = checkpoint.begin(store_at(folder), step, engine.stage, optimizer, extra, world).finish(keep)
    return Path(folder, saved.name) if isinstance(folder, str | os.PathLike) else saved


def _layers(engine: PlanEngine) -> tuple[str, ...]:
    return tuple(name for name, _ in engine.stage.named_children())


def _saved_schedule(scheduler: LRScheduler | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if scheduler is None:
        return {}
    state, name = scheduler.state_dict(), type(scheduler).__name__
    if faults := unfit(state):
        raise InputError(
            f"the state of the scheduler {name} cannot be saved, because a checkpoint holds only numbers, texts, lists and "
            "mappings. "
            f"Let its state_dict() give no more than these:\n{listed(faults)}"
        )
    return {"scheduler": name, "scheduler_state": plain(state), "scheduled": scheduled(optimizer)}


def load_checkpoint(
    engine: PlanEngine,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str] | Store,
    scheduler: LRScheduler | None = None,
    *,
    data: object = None,
) -> int:
    """Take over the newest checkpoint of the folder, or of another store, whatever the plan under which it was saved, and return
    its step; 0 where there is none. The scheduler, and with it the learning rate, `engine.steps` and the loss scale go on from
    it, too. What else has changed in the loop is noted: arguments of the optimizer, the loss, the batch. Every rank of the engine
    calls it. InputError, before anything is changed, if the checkpoint is damaged, of another model, of another kind of optimizer
    or scheduler, or of other `data`, where both calls were given the loop's data set."""
    world = engine.world.patiently()
    newest = checkpoint.newest(store_at(folder), world)
    if newest is None:
        return 0
    newest.check_seen(world)
    state = world.together(lambda: read_saved(newest))
    world.together(lambda: check_adapted(state, list(engine.layers), newest))
    check_numbers(state.base_numbers, numbers_of_base(engine.layers, world, engine.stage), newest)
    content, facts = content_in(data, world), loop_facts(engine, optimizer)
    world.together(lambda: refuse_other_data(state.data, content, newest, "name another folder to start anew"))
    saved = state.loop if isinstance(state, LoopState) else facts_of_job(state)
    note = world.together(lambda: note_of_change(saved, facts, newest))
    if world.is_main:
        _tell(note, state, content)
    own = world.together(lambda: _own_schedule(newest, state, scheduler, optimizer, _layers(engine)))
    checkpoint.load(
        newest,
        engine.stage,
        optimizer,
        world,
        whole=engine.layers,
        keeps=state_keys(_like(optimizer)),
        advice="name another folder to start anew",
    )
    engine.left_to_others()
    if scheduler is not None:
        take_over(scheduler, optimizer, own)
    if state.loss_scale is not None:
        engine.loss_scale.load_state_dict(state.loss_scale.model_dump())
    engine.steps = state.steps if isinstance(state, LoopState) and state.steps is not None else state.step
    return state.step


def _tell(note: str | None, state: LoopState | TrainerState, content: Content | None) -> None:
    if note is not None:
        warn(note)
    if content is None or state.data is None:
        asked = {"save_checkpoint": state.data, "load_checkpoint": content}
        silent = " and ".join(name for name, known in asked.items() if known is None)
        warn(
            f"note: the data are not compared with those of the checkpoint. To compare them, give {silent} data=, the loop's "
            "data set"
        )


def _own_schedule(
    newest: Stored, state: SavedState, scheduler: LRScheduler | None, optimizer: torch.optim.Optimizer, layers: Sequence[str]
) -> SavedState:
    """What this rank takes over. InputError if that does not fit."""
    own = type(scheduler).__name__ if scheduler is not None else None
    if own != state.scheduler:
        raise InputError(
            f"checkpoint {newest} was saved with {_called(state.scheduler)}, but load_checkpoint was given {_called(own)}. "
            "Give it the same one, or name another folder to start anew"
        )
    if scheduler is not None:
        state = state.of(layers, newest.source)
        state.check(plain(scheduler.state_dict()), len(optimizer.param_groups), newest.source)
    return state


def _called(scheduler: str | None) -> str:
    return f"the scheduler {scheduler}" if scheduler is not None else "no scheduler"


def _like(optimizer: torch.optim.Optimizer) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """Others of its class, with its arguments."""
    known = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
    return lambda parameters: type(optimizer)(list(parameters), **arguments)
