"""Whether all ranks of a run see one folder. Each writes its own part of a checkpoint there, so what one host writes the others
must see: that is tried with empty files before anything depends on it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hetpipe.files.messages import InputError, listed, reason
from hetpipe.files.writing import make_folder
from hetpipe.processes.world import World

WAIT_SECONDS = 10.0  # within which a host sees what another has written: network file systems may show it late
_LOOK_SECONDS = 0.1
_found: set[str] = set()  # the folders that were found to be shared, as the main rank calls them


class _Place(NamedTuple):
    """The folder as a rank has it; `fault`: what is wrong with it there."""

    rank: int
    host: str
    path: str
    fault: str = ""

    @property
    def who(self) -> str:
        return f"rank {self.rank} on host {self.host}"


def check_shared(folder: str | os.PathLike[str], world: World, called: str) -> None:
    """InputError on every rank if some of them have another folder under this name than the main rank. A folder that all were
    found to share is not looked at again. Collective."""
    path = os.path.abspath(folder)
    if len(world.ranks) == 1 or world.first(path in _found):
        return
    token = Path(path, world.first(f".shared-{uuid.uuid4().hex}"))  # a name for which no cache has an answer
    with _given_back(token, _own(token, world.rank)):
        world.on_main(lambda: _begin(token))
        places = _look(token, world)
    if any(place.fault for place in places):
        raise InputError(_not_shared(folder, called, places))
    _found.add(path)


def check_seen(file: Path, world: World) -> None:
    """InputError on every rank if some of them do not see this file, which the main rank has found. Collective."""
    seen = appears(file) if len(world.ranks) > 1 else True
    places = world.gather(_place(file.parent, world, "" if seen else f"does not see {file.name}"))
    if any(place.fault for place in places):
        raise InputError(_not_shared(file.parent, "a checkpoint", places))


def appears(file: Path, size: int | None = None) -> bool:
    """Whether the file is there, with so many bytes, or will be soon."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(OSError):
            found = os.stat(file).st_size
            if size is None or found == size:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # a network file system asks its server again


def _begin(token: Path) -> None:
    make_folder(token.parent)
    token.touch()


@contextmanager
def _given_back(*files: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _own(token: Path, rank: int) -> Path:
    return token.with_name(f"{token.name}-{rank}")


def _place(folder: Path, world: World, fault: str) -> _Place:
    host = world.hosts[world.rank] if world.hosts else socket.gethostname()
    return _Place(world.rank, host, os.path.abspath(folder), fault)


def _look(token: Path, world: World) -> list[_Place]:
    """Every rank's place. All look for the main rank's file; then one rank of each host and path writes another, for which the
    main rank looks (where both are the main rank's, that adds nothing)."""
    fault = "" if appears(token) else "does not see that"
    places: list[_Place] = world.gather(_place(token.parent, world, fault))
    if any(place.fault for place in places):
        return places
    others = {(p.host, p.path): p.rank for p in reversed(places) if (p.host, p.path) != (places[0].host, places[0].path)}
    fault = _attempt(_own(token, world.rank)) if world.rank in others.values() else ""
    places = world.gather(_place(token.parent, world, fault))
    if any(place.fault for place in places):
        return places
    unseen = world.first([rank for rank in others.values() if not appears(_own(token, rank))] if world.is_main else [])
    return [p._replace(fault=f"writes what rank {places[0].rank} does not see") if p.rank in unseen else p for p in places]


def _attempt(file: Path) -> str:
    try:
        file.touch()
    except OSError as error:
        return f"cannot write ({reason(error)})"
    return ""


def _not_shared(folder: str | os.PathLike[str], called: str, places: Sequence[_Place]) -> str:
    main = places[0]
    rows = [f"{main.who} writes into {main.path}"]
    rows += [f"{place.who} {place.fault} in {place.path}" for place in places if place.fault]
    return (
        f"{folder} ({called}) is not one folder for all ranks, of which each writes its own part of a checkpoint; name a "
        f"folder on a file system that all hosts share (NFS, for example), by the same absolute path on each:\n{listed(rows)}"
    )
