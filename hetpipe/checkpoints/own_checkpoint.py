"""Checkpoints in one's own loop: the same files as the trainer's, without its place in the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.runtime.plan_engine import PlanEngine


def save_checkpoint(
    engine: PlanEngine, optimizer: torch.optim.Optimizer, folder: str | Path, step: int, *, keep: int = 3
) -> Path:
    """Save the model and the optimizer as they are after `step`, complete or not at all, and keep the newest `keep` there. Every
    rank of the engine calls it; several hosts need one shared folder. InputError if there is no room, CheckpointError if it
    cannot be written."""
    return checkpoint.save(folder, step, engine.stage, optimizer, {}, engine.world, keep)


def load_checkpoint(engine: PlanEngine, optimizer: torch.optim.Optimizer, folder: str | Path) -> int:
    """Take over the newest checkpoint of the folder, whatever the plan under which it was saved, and return its step; 0 where
    there is none. Every rank of the engine calls it. InputError, before anything is changed, if it is of another model or of
    another kind of optimizer."""
    found = engine.world.first([str(path) for path in checkpoint.list_checkpoints(folder)])
    if not found:
        return 0
    newest = Path(found[-1])
    keeps = checkpoint.state_keys(_like(optimizer))
    checkpoint.load(newest, engine.stage, optimizer, engine.world, whole=engine.layers, keeps=keeps)
    return int(newest.name.removeprefix("step-"))


def _like(optimizer: torch.optim.Optimizer) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """Others of its class, with its arguments."""
    known = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
    return lambda parameters: type(optimizer)(list(parameters), **arguments)
