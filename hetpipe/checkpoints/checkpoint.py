"""State by layer: tensors and plain values under the whole model's names, so that a run saved under one plan goes on under any
other, in any store. A checkpoint is complete or absent: its state is written once the main rank sees every part whole; and it is
loaded only if every part is as it was written.

All ranks write to the same store: if it is a folder, to a shared file system on several machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.digests import REMOVE, HashedReader, RunningDigest, Take, Written, damage
from hetpipe.checkpoints.state_tensors import (
    Shards,
    StateKeys,
    empty_optimizer_state,
    install,
    model_faults,
    model_state,
    optimizer_faults,
    optimizer_state,
    shares,
)
from hetpipe.checkpoints.stores.folder import FolderStore, stored_at
from hetpipe.checkpoints.stores.store import Pending, RankError, Store, Stored, name_of
from hetpipe.checkpoints.stores.tensor_files import PartTensors, take_tensors, write_tensors
from hetpipe.checkpoints.training_state import LoopState, TrainerState, read_saved, state_text
from hetpipe.files.messages import InputError, listed
from hetpipe.files.units import human_bytes
from hetpipe.processes.stopping import RunError
from hetpipe.processes.whereabouts import during
from hetpipe.processes.world import World, alone

T = TypeVar("T")

PART = "shard-{:05d}-model-00001-of-00001.safetensors"  # of a rank, as torch.distributed.checkpoint calls it
ANEW = "name another checkpoint.folder to start anew"


class CheckpointError(RunError):
    """A checkpoint could not be written; those that were are as they were."""


def complete(store: Store) -> list[Stored]:
    """Its complete checkpoints, oldest first."""
    return [found for found in map(store.stored, store.names()) if found.is_complete()]


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    return [Path(folder, found.name) for found in complete(FolderStore(folder))]


def newest(store: Store, world: World) -> Stored | None:
    """The newest that is complete, as the main rank sees it. Collective."""
    names = world.first([found.name for found in complete(store)])
    return store.stored(names[-1]) if names else None


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
    """`begin` and `finish` one checkpoint in a folder."""
    return Path(folder, begin(FolderStore(folder), step, stage, optimizer, extra, world).finish(keep).name)


def begin(
    store: Store, step: int, stage: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Any], world: World
) -> Begun:
    """What a checkpoint from all ranks will hold. `extra` is plain data (sampler, schedule). InputError on every rank if they do
    not share this store."""
    world = world.patiently()
    store.check_shared(world, "the folder of checkpoints")
    held, split = model_state(stage) | optimizer_state(stage, optimizer), Shards(stage)
    shapes = split.shapes(held)
    every = world.gather({key: prod(shapes[key]) * tensor.element_size() for key, tensor in held.items()})
    sizes = {key: size for part in every for key, size in part.items()}
    tensors = split.whole(held, {*shares(every)[world.ranks.index(world.rank)]})
    return Begun(store, step, tensors, sizes, extra, world)


@dataclass(frozen=True)
class Begun:
    """A checkpoint that was begun, of which nothing is written before `finish`. Its tensors are those that train: until then, no
    step may follow."""

    store: Store
    step: int
    tensors: dict[str, Tensor]  # that this rank writes
    sizes: Mapping[str, int]  # bytes of those of all ranks
    extra: dict[str, Any]
    world: World

    def finish(self, keep: int, spared: str | None = None) -> Stored:
        """Write it from all ranks; then keep only the newest `keep`, and the one whose name is `spared`. On every rank InputError
        if there is no room for it; CheckpointError if it cannot be written: nothing of it is left then."""
        store, world, needed = self.store, self.world, sum(self.sizes.values())
        final, pending = store.stored(name_of(self.step)), store.begin(self.step)
        try:
            world.on_main(lambda: pending.prepare(needed))
            files = {name: file.model_dump() for name, file in _write(self.tensors, pending, world).items()}
            state = {"step": self.step, "tensors": len(self.sizes), "files": files, **self.extra}
            world.on_main(lambda: pending.finish(state_text(state)))
        except OSError as error:  # on every rank, whichever could not write
            world.on_main(pending.abandon)
            pending.abandon()  # by those that see another folder under this name
            free = human_bytes(world.first(store.free_bytes() if world.is_main else 0))
            raise CheckpointError(
                f"cannot write the checkpoint {final}: it needs {human_bytes(needed)}, and {free} are free there; {_told(error)}"
            ) from error
        except BaseException:  # this rank is told to stop in the midst of it, or another is gone
            if world.is_main:
                pending.abandon()
            raise
        world.on_main(lambda: _forget(store, final, keep, spared))
        return final


def _write(tensors: dict[str, Tensor], pending: Pending, world: World) -> dict[str, Written]:
    """Each rank writes its tensors into a part of its own, if it has any; what then is in all parts. OSError on every rank if one
    cannot, or if the main rank does not see what it has written."""
    name = PART.format(world.ranks.index(world.rank) + 1)

    def write() -> Written:
        with during("writing its part of the checkpoint"), RunningDigest() as digest:
            with pending.create(name) as file:
                write_tensors(tensors, file, digest)
            return digest.written()

    own = _by_each(world, lambda: {name: write()} if tensors else {})
    files = {name: file for part in world.gather(own) for name, file in part.items()}
    world.on_main(lambda: _check_all_there(pending, files))
    return dict(sorted(files.items()))


def _by_each(world: World, action: Callable[[], T]) -> T:
    """Done by every rank; its own value. What one of them raises is a RankError on all; a rank that is interrupted
    (KeyboardInterrupt, SystemExit, RunStopped) interrupts all."""
    result, failure = list[T](), None
    try:
        result.append(action())
    except BaseException as error:
        failure = error
    failures = {rank: found for rank, found in zip(world.ranks, world.gather(failure), strict=True) if found is not None}
    for found in failures.values():
        if not isinstance(found, Exception):
            raise found
    for rank, found in failures.items():
        host = f" on host {world.hosts[rank]}" if world.hosts else ""
        where = f"rank {rank}{host}: " if len(world.ranks) > 1 else ""
        raise RankError(f"{where}{type(found).__name__}: {found}") from found
    return result[0]


def _told(error: OSError) -> str:
    return str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"


def _check_all_there(pending: Pending, files: Mapping[str, Written]) -> None:
    """OSError unless this rank sees every part that was written, whole."""
    for name, file in files.items():
        if not pending.shows(name, file.size_bytes):
            raise RankError(f"the main rank does not see the {file.size_bytes} bytes that another has written as {name}")


def _forget(store: Store, final: Stored, keep: int, spared: str | None) -> None:
    for old in complete(store)[:-keep]:
        try:
            if old.name != spared:
                old.remove()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {final} is written, but {old}, older than the {keep} that are kept, cannot be removed: {error}"
            ) from error


# ---- loading ----


def read_state(checkpoint: Path | Stored) -> TrainerState:
    """The plain part of a checkpoint of a job's run."""
    found = stored_at(checkpoint)
    data = found.describe()
    if isinstance(data, Mapping) and "steps" in data and "sampler" not in data:
        raise InputError(
            f"checkpoint {found} comes from a loop of your own (hetpipe.save_checkpoint). It stores no position in the "
            "data, so a job's run cannot resume from it. Name another checkpoint.folder"
        )
    return TrainerState.whole(data, found.source)


def read_whole(checkpoint: Stored, world: World | None = None, take: Take | None = None) -> TrainerState | LoopState:
    """The plain part of a checkpoint. InputError on every rank if any of its parts is not as it was written, as far as it says
    how that was: each part is read once, by one of the ranks and its `take` (without a world, by this process). Collective."""
    world = world or alone()
    state = world.together(lambda: read_saved(checkpoint))
    files = state.files or {}
    own = dict([*files.items()][world.ranks.index(world.rank) :: len(world.ranks)])
    faults = [fault for part in world.gather(damage(checkpoint.open, own, take)) for fault in part]
    if state.files is not None and world.is_main:
        faults += [f"{name} was not written with the checkpoint" for name in checkpoint.parts() if name not in files]
    faults = world.first(faults)
    if faults:
        raise InputError(f"checkpoint {checkpoint} is not as it was written; {REMOVE}:\n{listed(faults)}")
    return state


def tensors_in(checkpoint: Stored, count: int | None) -> PartTensors:
    """The tensors of a checkpoint. InputError if it cannot be read, or there are not so many."""
    try:
        found = PartTensors(checkpoint.open, checkpoint.parts())
    except (InputError, OSError) as error:
        raise InputError(f"cannot read checkpoint {checkpoint}: {error}; {REMOVE}") from error
    if count is not None and len(found) != count:
        raise InputError(
            f"checkpoint {checkpoint} holds {len(found)} tensors, but {count} were saved. A file is missing or has been "
            f"changed; {REMOVE}"
        )
    return found


def load(
    checkpoint: Path | Stored,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    *,
    whole: nn.Module | None = None,
    keeps: StateKeys | None = None,
    advice: str = ANEW,
) -> None:
    """Load this stage's part, whatever the plan under which it was saved. All ranks go on together.

    InputError on every rank, before anything is changed, where the checkpoint is damaged, or of something else: `whole` is the
    model of which `stage` is a part, `keeps` what the optimizer keeps of a parameter (None: not compared); `advice` says what to
    do then."""
    world, found, taken = world.patiently(), stored_at(checkpoint), dict[str, Tensor]()

    def take(_: str, reader: HashedReader) -> None:
        """Read what is the optimizer's beside hashing it: nothing has it yet."""
        with suppress(InputError):  # of a damaged part, as its digest will tell
            taken.update(take_tensors(reader, lambda there: empty_optimizer_state(stage, optimizer, there) if optimizer else {}))

    state = read_whole(found, world, take)
    available = world.together(lambda: tensors_in(found, state.tensors))
    own, split = model_state(stage), Shards(stage)
    wanted = split.room(own)
    faults = model_faults(available, whole if whole is not None else stage, surplus=whole is not None)
    if optimizer is not None:
        wanted |= empty_optimizer_state(stage, optimizer, {key: place for key, place in available.items() if key not in taken})
        if keeps is not None and not faults:
            faults += optimizer_faults(stage, optimizer, available, keeps)
    faults = list(dict.fromkeys(fault for part in world.gather(faults) for fault in part))
    if faults:
        raise InputError(f"checkpoint {checkpoint} holds another model or optimizer; {advice}:\n{listed(faults)}")
    try:
        _by_each(world, lambda: available.read_into(wanted))
    except OSError as error:
        raise InputError(f"cannot read checkpoint {checkpoint}: {_told(error)}; {REMOVE}") from error
    split.take(own, wanted)
    if optimizer is not None:
        install(stage, optimizer, wanted | taken)
    world.barrier()
