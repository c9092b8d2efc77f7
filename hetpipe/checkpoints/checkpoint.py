"""State by layer: tensors and plain values under the whole model's names, so that a run saved under one plan goes on under any
other, in any store. A checkpoint is complete or absent: its state is written once the main rank sees every part whole; and it is
loaded only if every part is as it was written.

All ranks write to the same store: if it is a folder, to a shared file system on several machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.beside.copies import HostCopies
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
from hetpipe.checkpoints.stores.layout import Described
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
    store: Store,
    step: int,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    world: World,
    copies: HostCopies | None = None,
) -> Begun:
    """What a checkpoint from all ranks will hold: with `copies`, if there is memory for them, as all is now, whatever becomes of
    it. `extra` is plain data (sampler, schedule). InputError on every rank if they do not share this store."""
    world = world.patiently()
    store.check_shared(world, "the folder of checkpoints")
    held, split = model_state(stage) | optimizer_state(stage, optimizer), Shards(stage)
    there = {key: Described(shape, held[key].dtype) for key, shape in split.shapes(held).items()}
    every = world.gather({key: like.size_bytes for key, like in there.items()})
    writers = shares(every)
    own = {*writers[world.ranks.index(world.rank)]}
    lacking = None
    if copies is not None:
        on_card = any(held[key].is_cuda for key in own)
        lacking = copies.make_room({key: there[key] for key in own}, world, pinned=on_card)
    if copies is None or lacking is not None:
        tensors, copied = split.whole(held, own), False
    else:
        with during("copying what it saves into host memory"):
            tensors, copied, extra = split.whole(held, own, copies.take), True, deepcopy(extra)
            copies.settle()
    sizes = {key: size for part in every for key, size in part.items()}
    parts = [PART.format(number) if keys else None for number, keys in enumerate(writers, 1)]
    return Begun(store, store.begin(step), step, tensors, copied, lacking, sizes, parts, extra, world)


@dataclass(frozen=True)
class Begun:
    """A checkpoint that was begun, of which nothing is written yet. Unless its tensors are copies, they are those that train, and
    no step may follow before they are written."""

    store: Store
    pending: Pending
    step: int
    tensors: dict[str, Tensor]  # that this rank writes
    copied: bool
    lacking: str | None  # for copies that were wanted: which memory
    sizes: Mapping[str, int]  # bytes of those of all ranks
    parts: Sequence[str | None]  # what each rank writes
    extra: dict[str, Any]
    world: World

    @property
    def final(self) -> Stored:
        """Its place in the store."""
        return self.store.stored(name_of(self.step))

    def finish(self, keep: int, spared: str | None = None) -> Stored:
        """Write it from all ranks; then keep only the newest `keep`, and the one whose name is `spared`. On every rank InputError
        if there is no room for it; CheckpointError if it cannot be written: nothing of it is left then."""
        with self.or_nothing():
            self.prepare()
            files = self.all_written(self.write)
            self.world.on_main(lambda: self.conclude(files))
        self.world.on_main(lambda: self.forget(keep, spared))
        return self.final

    @contextmanager
    def or_nothing(self, abandon: Callable[[], None] | None = None) -> Iterator[None]:
        """What is done in here is done by every rank. Nothing of the checkpoint is left where that fails: CheckpointError on
        every rank where it cannot be written. `abandon`: what else this rank does where it alone leaves this."""
        try:
            yield
        except CheckpointError:
            raise  # of those that are complete
        except OSError as error:  # on every rank, whichever could not write
            self._refuse(error)
        except BaseException:  # this rank is told to stop in the midst of it, or another is gone
            if abandon is not None:
                abandon()
            elif self.world.is_main:
                self.pending.abandon()
            raise

    def _refuse(self, error: OSError) -> NoReturn:
        self.world.on_main(self.pending.abandon)
        self.pending.abandon()  # by those that see another folder under this name
        free = human_bytes(self.world.first(self.store.free_bytes() if self.world.is_main else 0))
        needed = human_bytes(sum(self.sizes.values()))
        raise CheckpointError(
            f"cannot write the checkpoint {self.final}: it needs {needed}, and {free} are free there; {_told(error)}"
        ) from error

    def prepare(self) -> None:
        """Have room for it. InputError, or OSError, on every rank."""
        self.world.on_main(lambda: self.pending.prepare(sum(self.sizes.values())))

    @property
    def part(self) -> str | None:
        """What this rank writes; None if it has nothing to write."""
        return self.parts[self.world.ranks.index(self.world.rank)]

    def write(self, stopped: Callable[[], bool] = lambda: False) -> Written | None:
        """Write this rank's part, which is kept safe then. OSError if that fails, or once it is `stopped`."""
        if self.part is None:
            return None
        if stopped():
            raise InterruptedError
        with RunningDigest() as digest:
            with self.pending.create(self.part) as file:
                write_tensors(self.tensors, file, digest, stopped)
            return digest.written()

    def all_written(self, write: Callable[[], Written | None]) -> dict[str, Written]:
        """What is in all parts, once each rank has its own by `write`. OSError on every rank if one cannot be written."""

        def own() -> Written | None:
            with during("writing its part of the checkpoint"):
                return write()

        found = self.world.gather(_by_each(self.world, own))
        pairs = zip(self.parts, found, strict=True)
        return {name: file for name, file in pairs if name is not None and file is not None}

    def conclude(self, files: Mapping[str, Written]) -> None:
        """On the main rank: it is a checkpoint now. OSError if that cannot be written, or does not see each part whole."""
        for name, file in files.items():
            if not self.pending.shows(name, file.size_bytes):
                raise RankError(f"the main rank does not see the {file.size_bytes} bytes that another has written as {name}")
        written = {name: file.model_dump() for name, file in files.items()}
        self.pending.finish(state_text({"step": self.step, "tensors": len(self.sizes), "files": written, **self.extra}))

    def forget(self, keep: int, spared: str | None) -> None:
        """On the main rank: remove all but the newest `keep`, and the `spared` one. CheckpointError if one cannot be removed."""
        for old in complete(self.store)[:-keep]:
            try:
                if old.name != spared:
                    old.remove()
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint {self.final} is written, but {old}, older than the {keep} that are kept, cannot be removed: "
                    f"{error}"
                ) from error


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
