"""Arrays that are made once on a host: one process makes the file, the others wait and map it. A lock of the system decides who
makes it. The system frees it as soon as that process has ended, however it did, so that nobody waits for a process that is gone;
and nobody waits in a collective."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hetpipe.files.folders import free_bytes
from hetpipe.files.messages import InputError, cut, one_line
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import make_folder, write_text
from hetpipe.language.kept.token_file import FOLDER, DamagedError, Kept, find, open_file, remove, save
from hetpipe.processes.environment import own_rank, place
from hetpipe.processes.progress import Activity, warn
from hetpipe.processes.whereabouts import waiting

LOOK_SECONDS = 0.05  # between two looks at whether the lock is free
ROOM = 4  # bytes that are to be free for each byte of the files: a token and its target are 8, of about 4 bytes of text


def once(key: str | None, size: int, make: Callable[[], Kept], still: Callable[[], bool]) -> Kept:
    """Return what `make` returns, made by this process or, from the same `key`, by another one before or meanwhile. Where the
    folder takes no file each process makes its own, and one of a host says so. Errors are those of `make`.

    Args:
        key: the name of the file, a digest of all that decides the arrays; None where that is not known, and no file is kept.
        size: of what they are made of, in bytes.
        make: makes the arrays.
        still: whether what they were made of is still as the key says, after it was read; else no file is kept.
    """
    if key is None:
        return make()
    try:
        found = _opened(key, mend=False)
        if found is not None:
            return found
        make_folder(FOLDER)
        if (free := free_bytes(FOLDER)) < ROOM * size:
            raise OSError(f"{human_bytes(free)} are free there, and {human_bytes(ROOM * size)} may be needed")
        lock = _acquired(key)
    except (OSError, NotImplementedError, InputError) as error:  # the second: a file system without locks
        _tell_unkept(error)
        return make()
    with _held(key, lock):
        return _opened(key, mend=True) or _saved(key, make(), still)


def _opened(key: str, *, mend: bool) -> Kept | None:
    """The arrays of the file, if there is a whole one; `mend`: delete one that is not, which only who has the lock may do."""
    path = find(key)
    try:
        if path is not None:
            return open_file(path)
    except DamagedError as error:
        if mend:
            warn(f"note: {error}, so its tokens are made again")
    except FileNotFoundError:  # another process has deleted it, since it was damaged or old
        pass
    if mend:
        remove(key)
    return None


def _saved(key: str, made: Kept, still: Callable[[], bool]) -> Kept:
    try:
        return save(key, made) if still() else made
    except (OSError, InputError) as error:
        _tell_unkept(error)
        return made


def _tell_unkept(error: Exception) -> None:
    if place().local_rank == 0:
        warn(f"note: tokens are not kept in {FOLDER} ({cut(one_line(error), 200)}), so each process makes its own at each start")


def _acquired(key: str) -> FileLock:
    """The lock of this key, as soon as no other process has it; meanwhile a line says which has it, and what that one does."""
    lock = FileLock(FOLDER / f"{key}.lock", timeout=0)
    try:
        lock.acquire()
        return lock
    except Timeout:
        pass
    with waiting(), Activity("waiting for the data", shown=own_rank() == 0, inner=True) as activity:
        while True:
            try:
                lock.acquire()
                return lock
            except Timeout:
                activity.say(_holder(_note(key)))
                time.sleep(LOOK_SECONDS)


@contextmanager
def _held(key: str, lock: FileLock) -> Iterator[None]:
    """Say meanwhile, to those that wait, which process has the lock."""
    note = _note(key)
    try:
        with contextlib.suppress(OSError, InputError):
            said = {"host": socket.gethostname(), "process": os.getpid(), "rank": own_rank()}
            write_text(note, json.dumps(said) + "\n")
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink(missing_ok=True)
        lock.release()


def _note(key: str) -> Path:
    return FOLDER / f"{key}.json"


def _holder(note: Path) -> str:
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        return f"process {said['process']} (rank {said['rank']}) on host {said['host']} makes the same tokens"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process makes the same tokens"
