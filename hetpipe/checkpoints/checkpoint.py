"""State by layer: torch.distributed.checkpoint over safetensors files, keyed by the whole model's names, so that a run saved
under one plan goes on under any other. A checkpoint is complete or absent: it is written beside its place and then renamed, once
the main rank sees every file whole; and it is loaded only if every file is as it was written.

All ranks write to the same folder (a shared file system on several machines).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hetpipe.checkpoints.digests import Written, damage, written
from hetpipe.checkpoints.shared import appears, check_shared
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
from hetpipe.checkpoints.training_state import STATE_FILE, LoopState, TrainerState, read_saved, state_text
from hetpipe.files.folders import check_room, free_bytes
from hetpipe.files.messages import InputError, listed
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import write_text
from hetpipe.processes.stopping import RunError
from hetpipe.processes.whereabouts import during, waiting
from hetpipe.processes.world import World, alone

SUFFIX = ".safetensors"
ANEW = "name another checkpoint.folder to start anew"
REMOVE = "remove it to go on from the one before"


class CheckpointError(RunError):
    """A checkpoint could not be written; those that were are as they were."""


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(
        p
        for p in Path(folder).glob("step-*")
        if (p / STATE_FILE).exists() and not p.name.endswith(".partial")
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes of torch's about its own deprecated calls
        yield


# ---- saving ----


def save(
    folder: str | Path,
    step: int,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    world: World,
    keep: int,
) -> Path:
    """Save one checkpoint from all ranks; then keep only the newest `keep`. `extra` is plain data (sampler, schedule). On every
    rank InputError if there is no room for it, or no folder that all ranks share; CheckpointError if it cannot be written:
    nothing of it is left then."""
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
        files = _write(tensors, partial, world)
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


def _write(tensors: dict[str, Tensor], partial: Path, world: World) -> dict[str, Written]:
    """Each rank writes its tensors; what then is in all files. OSError on every rank if one cannot, or if the main rank does not
    see what it has written."""
    writer = _Writer(partial)
    with _failures_told(world), _quiet(), waiting():
        state_dict_saver.save(
            tensors, storage_writer=writer, process_group=world.control, no_dist=world.control is None
        )
    own = world.together(lambda: {name: written(partial / name) for name in writer.written})
    files = {name: file for part in world.gather(own) for name, file in part.items()}
    world.on_main(lambda: _check_all_there(partial, files))
    return dict(sorted(files.items()))


class _Writer(HuggingFaceStorageWriter):
    """Every rank writes a file of its own, and knows which (one whose tensors others write, too, may have none)."""

    def __init__(self, folder: Path) -> None:
        known = signature(HuggingFaceStorageWriter).parameters  # torch 2.8 has another name for that
        each: dict[str, Any] = {name: True for name in ("save_distributed", "save_sharded") if name in known}
        super().__init__(str(folder), **each)
        self.written: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with during("writing its part of the checkpoint"):
            future = super().write_data(plan, planner)
            results = future.wait()
        self.written = list(dict.fromkeys(result.storage_data.relative_path for result in results))
        return future


@contextmanager
def _failures_told(world: World) -> Iterator[None]:
    """torch's CheckpointException, which is no Exception, is told as the OSError of the first rank that failed. A rank that was
    interrupted (KeyboardInterrupt, SystemExit, RunStopped) interrupts all."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: found for rank, (found, _) in sorted(error.failures.items())}
        for found in failures.values():
            if not isinstance(found, Exception):
                raise found from error
        rank, first = next(iter(failures.items()))
        number = world.ranks[rank]
        host = f" on host {world.hosts[number]}" if world.hosts else ""
        where = f"rank {number}{host}: " if len(world.ranks) > 1 else ""
        raise _RankError(f"{where}{type(first).__name__}: {first}") from first


class _RankError(OSError):
    """Says itself of which rank it is, and what."""


def _told(error: OSError) -> str:
    return str(error) if isinstance(error, _RankError) else f"{type(error).__name__}: {error}"


def _check_all_there(partial: Path, files: Mapping[str, Written]) -> None:
    """OSError unless this rank sees every file that was written, whole."""
    for name, file in files.items():
        if not appears(partial / name, file.size_bytes):
            raise _RankError(f"the main rank does not see the {file.size_bytes} bytes that another has written as {name}")


def _complete(partial: Path, final: Path, state: dict[str, Any]) -> None:
    try:
        write_text(partial / STATE_FILE, state_text(state))
    except InputError as error:
        raise _RankError(str(error)) from error
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
    return state


def load(checkpoint: Path, stage: nn.Module, optimizer: torch.optim.Optimizer | None, world: World, *,
         whole: nn.Module | None = None, keeps: StateKeys | None = None, advice: str = ANEW) -> None:  # fmt: skip
    """Load this stage's part, whatever the plan under which it was saved. All ranks go on together.

    InputError on every rank, before anything is changed, where the checkpoint is damaged, or of something else: `whole` is the
    model of which `stage` is a part, `keeps` what the optimizer keeps of a parameter (None: not compared); `advice` says what to
    do then."""
    world = world.patiently()
    state = read_whole(checkpoint, world)
    reader = HuggingFaceStorageReader(str(checkpoint))
    available = world.together(lambda: tensors_in(checkpoint, state.tensors, reader))
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
        with _failures_told(world), _quiet():
            state_dict_loader.load(
                wanted, storage_reader=reader, process_group=world.control, no_dist=world.control is None
            )
    except _RankError as error:
        raise InputError(f"cannot read checkpoint {checkpoint}: {error}; {REMOVE}") from error
    if optimizer is not None:
        install(stage, optimizer, wanted)
    world.barrier()


def tensors_in(checkpoint: Path, count: int | None, reader: HuggingFaceStorageReader) -> dict[str, Any]:
    """What is known of each tensor of a checkpoint, by its key. InputError if it cannot be read, or there are not so many."""
    try:
        found: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    except Exception as error:  # whatever safetensors says of a damaged file
        raise InputError(f"cannot read checkpoint {checkpoint}: {type(error).__name__}: {error}; {REMOVE}") from error
    if count is not None and len(found) != count:
        raise InputError(
            f"checkpoint {checkpoint} holds {len(found)} tensors, and {count} were saved: a file is missing, or was "
            f"changed; {REMOVE}"
        )
    return found
