"""Checkpoints as folders, which all ranks see (on several machines: of a shared file system): tensors in safetensors files, and
the state in trainer.json. A folder is written beside its place and then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from hetpipe.checkpoints.stores.shared import appears, check_seen, check_shared
from hetpipe.checkpoints.stores.store import RankError, Store, Stored, name_of
from hetpipe.files.folders import check_room, free_bytes
from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError
from hetpipe.files.writing import write_text
from hetpipe.processes.world import World

STATE_FILE, SUFFIX, PARTIAL, NOTE = "trainer.json", ".safetensors", ".partial", ".note"


@dataclass(frozen=True)
class StoredFolder:
    """A folder that is a checkpoint, or the place of one. (What its methods do is said of `Stored`.)"""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def source(self) -> str:
        return str(self.path / STATE_FILE)

    def is_complete(self) -> bool:
        return (self.path / STATE_FILE).exists()

    def describe(self) -> Any:
        try:
            return read_mapping(self.path / STATE_FILE)
        except InputError as error:
            raise InputError(f"{error}; remove this checkpoint to resume from the one before") from None

    def parts(self) -> list[str]:
        return sorted(file.name for file in self.path.glob(f"*{SUFFIX}"))

    def open(self, part: str) -> BufferedReader:
        return open(self.path / part, "rb")

    def check_seen(self, world: World) -> None:
        check_seen(self.path / STATE_FILE, world)

    def remove(self) -> None:
        shutil.rmtree(self.path)


@dataclass(frozen=True)
class PendingFolder:
    """`partial`, which becomes `final`."""

    partial: Path
    final: Path
    step: int

    def prepare(self, needed: int) -> None:
        for left in self.partial.parent.glob(f"step-*{PARTIAL}"):  # of any step: of those, no run goes on with one
            shutil.rmtree(left, ignore_errors=True)
        check_room(self.partial.parent, needed, f"the checkpoint of step {self.step}")
        self.partial.mkdir(parents=True)

    @contextmanager
    def create(self, part: str) -> Iterator[BinaryIO]:
        """A file, which is on the disk when the context ends."""
        self.partial.mkdir(exist_ok=True)  # on a host that has another folder under this name, as the main rank will tell
        with open(self.partial / part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def note(self, part: str, text: str) -> None:
        self._write(f"{part}{NOTE}", text)

    def noted(self, part: str) -> str | None:
        os.listdir(self.partial)  # a network file system asks its server again
        file = self.partial / f"{part}{NOTE}"
        return file.read_text(encoding="utf-8") if file.exists() else None

    def shows(self, part: str, size_bytes: int) -> bool:
        return appears(self.partial / part, size_bytes)

    def finish(self, state: str) -> None:
        """Write trainer.json, and rename the folder."""
        for note in self.partial.glob(f"*{NOTE}"):
            note.unlink()
        self._write(STATE_FILE, state)
        shutil.rmtree(self.final, ignore_errors=True)
        os.replace(self.partial, self.final)

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.partial / name, text)
        except InputError as error:
            raise RankError(str(error)) from error

    def abandon(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


class FolderStore:
    """A folder of such folders."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> list[str]:
        return sorted(path.name for path in Path(self.folder).glob("step-*") if path.suffix != PARTIAL)

    def stored(self, name: str) -> StoredFolder:
        return StoredFolder(Path(self.folder, name))

    def begin(self, step: int) -> PendingFolder:
        final = Path(self.folder, name_of(step))
        return PendingFolder(final.with_name(final.name + PARTIAL), final, step)

    def check_shared(self, world: World, called: str) -> None:
        check_shared(self.folder, world, called)

    def free_bytes(self) -> int:
        return free_bytes(Path(self.folder))


def store_at(place: str | os.PathLike[str] | Store) -> Store:
    """The store itself, or that of a folder."""
    return FolderStore(place) if isinstance(place, str | os.PathLike) else place


def stored_at(checkpoint: str | os.PathLike[str] | Stored) -> Stored:
    """The checkpoint itself, or the one in a folder."""
    return StoredFolder(Path(checkpoint)) if isinstance(checkpoint, str | os.PathLike) else checkpoint
