"""State by layer: tensors in safetensors files, keyed by the whole model's names, so that a run saved
under one plan goes on under any other. A checkpoint is complete or absent: it is written beside its place and then renamed, once
the main rank sees every file whole; and it is loaded only if every file is as it was written.

All ranks write to the same folder (a shared file system on several machines).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.digests import REMOVE, Written, damage, written
from hetpipe.checkpoints.shared import RankError, appears, check_shared
from hetpipe.checkpoints.state_tensors import (
    StateKeys,
    empty_optimizer_state,
    install,
    model_faults,
    model_state,
    optimizer_faults,
    optimizer_state,
    separate,
)
from hetpipe.checkpoints.tensor_files import read_tensors, tensors_in, write_tensors
from hetpipe.checkpoints.training_state import STATE_FILE, LoopState, TrainerState, read_saved, state_text
from hetpipe.files.folders import check_room, free_bytes
from hetpipe.files.messages import InputError, listed
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import write_text
from hetpipe.processes.stopping import RunError
from hetpipe.processes.whereabouts import waiting
from hetpipe.processes.world import World, alone

SUFFIX = ".safetensors"
ANEW = "name another checkpoint.folder to start anew"


class CheckpointError(RunError):
    """A checkpoint could not be written; those that were are as they were."""


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(
        p
        for p in Path(folder).glob("step-*")
        if (p / STATE_FILE).exists() and not p.name.endswith(".partial")
    )


# ---- saving ----


def save(
    folder: str | Path,
    step: int,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    world: World,
    keep: int,
    shard: tuple[int, int] = (0, 1),
) -> Path:
    """Save one checkpoint from all ranks; then keep only the newest `keep`. `extra` is plain data (sampler, schedule).
    `shard`: which of the stage this rank has, of how many. On every rank InputError if there is no room for it, or no folder that
    all ranks share; CheckpointError if it cannot be written: nothing of it is left then."""
    world = world.patiently()
    check_shared(folder, world)
    final = Path(folder) / f"step-{step:08d}"
    partial = final.with_name(final.name + ".partial")
    tensors = separate(model_state(stage) | optimizer_state(stage, optimizer))
    sizes = {key: size for part in world.gather({k: t.numel() * t.element_size() for k, t in tensors.items()})
             for key, size in part.items()}  # fmt: skip
    needed = sum(sizes.values())
    try:
        world.on_main(lambda: _prepare(partial, needed, step))
        files = _write(tensors, partial, world, shard)
        state = {"step": step, "tensors": len(sizes), "files": {n: w.model_dump() for n, w in files.items()}, **extra}
        world.on_main(lambda: _complete(partial, final, state))
    except OSError as error:  # on every rank, whichever could not write
        _remove(partial, world)
        free = human_bytes(world.first(free_bytes(final.parent) if world.is_main else 0))
        raise CheckpointError(
            f"cannot write the checkpoint {final}: it needs {human_bytes(needed)}, and {free} are free there; {_told(error)}"
        ) from error
    except BaseException:  # this rank is told to stop in the midst of it, or another is gone
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    world.on_main(lambda: _forget(final, keep))
    return final


def _prepare(partial: Path, needed: int, step: int) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    check_room(partial.parent, needed, f"the checkpoint of step {step}")
    partial.mkdir(parents=True)


def _write(tensors: dict[str, Tensor], partial: Path, world: World, shard: tuple[int, int]) -> dict[str, Written]:
    """Each rank writes its tensors; what then is in all files. OSError on every rank if one cannot, or if the main rank does not
    see what it has written."""
    with waiting():
        names = write_tensors(tensors, partial, world)
    own = world.together(lambda: {name: written(partial / name, shard) for name in names})
    files = {name: file for part in world.gather(own) for name, file in part.items()}
    world.on_main(lambda: _check_all_there(partial, files))
    return dict(sorted(files.items()))


def _told(error: OSError) -> str:
    return str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"


def _check_all_there(partial: Path, files: Mapping[str, Written]) -> None:
    """OSError unless this rank sees every file that was written, whole."""
    for name, file in files.items():
        if not appears(partial / name, file.size_bytes):
            raise RankError(f"the main rank does not see the {file.size_bytes} bytes that another has written as {name}")


def _complete(partial: Path, final: Path, state: dict[str, Any]) -> None:
    try:
        write_text(partial / STATE_FILE, state_text(state))
    except InputError as error:
        raise RankError(str(error)) from error
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)


def _remove(partial: Path, world: World) -> None:
    """By the main rank, then by those that see another folder under this name."""
    world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
    shutil.rmtree(partial, ignore_errors=True)


def _forget(final: Path, keep: int) -> None:
    for old in list_checkpoints(final.parent)[:-keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {final} is written, but {old}, older than the {keep} that are kept, cannot be removed: {error}"
            ) from error


# ---- loading ----


def read_state(checkpoint: Path) -> TrainerState:
    """The plain part of a checkpoint of a job's run."""
    return TrainerState.load(checkpoint / STATE_FILE)


def read_whole(checkpoint: Path, world: World | None = None) -> TrainerState | LoopState:
    """The plain part of a checkpoint. InputError on every rank if any of its files is not as it was written, as far as it says
    how that was: each file is read once, by one of the ranks (without a world, by this process). Collective."""
    world = world or alone()
    state = world.together(lambda: read_saved(checkpoint))
    files = state.files or {}
    own = dict([*files.items()][world.ranks.index(world.rank) :: len(world.ranks)])
    faults = [fault for part in world.gather(damage(checkpoint, own)) for fault in part]
    if state.files is not None and world.is_main:
        faults += [f"{p.name} was not written with it" for p in sorted(checkpoint.glob(f"*{SUFFIX}")) if p.name not in files]
    faults = world.first(faults)
    if faults:
        raise InputError(f"checkpoint {checkpoint} is not as it was written; {REMOVE}:\n{listed(faults)}")
    for name, file in files.items():
        if file.shard is not None:
            number, degree = file.shard
            raise InputError(
                f"checkpoint {checkpoint} is of tensor-parallel stages, which cannot be trained yet: {name} holds "
                f"shard {number} of {degree}"
            )
    return state


def load(checkpoint: Path, stage: nn.Module, optimizer: torch.optim.Optimizer | None, world: World, *,
         whole: nn.Module | None = None, keeps: StateKeys | None = None, advice: str = ANEW) -> None:  # fmt: skip
    """Load this stage's part, whatever the plan under which it was saved. All ranks go on together.

    InputError on every rank, before anything is changed, where the checkpoint is damaged, or of something else: `whole` is the
    model of which `stage` is a part, `keeps` what the optimizer keeps of a parameter (None: not compared); `advice` says what to
    do then."""
    world = world.patiently()
    state = read_whole(checkpoint, world)
    available = world.together(lambda: tensors_in(checkpoint, state.tensors))
    wanted: dict[str, Tensor] = model_state(stage)
    faults = model_faults(available, model_state(whole) if whole is not None else wanted, surplus=whole is not None)
    if optimizer is not None:
        wanted |= empty_optimizer_state(stage, optimizer, available)
        if keeps is not None and not faults:
            faults += optimizer_faults(stage, optimizer, available, keeps)
    faults = list(dict.fromkeys(fault for part in world.gather(faults) for fault in part))
    if faults:
        raise InputError(f"checkpoint {checkpoint} is of something else; {advice}:\n{listed(faults)}")
    try:
        read_tensors(wanted, checkpoint, world)
    except RankError as error:
        raise InputError(f"cannot read checkpoint {checkpoint}: {error}; {REMOVE}") from error
    if optimizer is not None:
        install(stage, optimizer, wanted)
    world.barrier()
