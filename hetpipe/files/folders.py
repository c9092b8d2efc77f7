"""The folders that a run writes: there is room, and nobody else writes there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hetpipe.files.messages import InputError
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import check_output, make_folder, write_text, writing

LOCK_FILE, HOLDER_FILE = ".lock", ".run.json"


@contextmanager
def claimed(folders: Mapping[str, str]) -> Iterator[None]:
    """These folders (the job's key → the folder), made if need be, for this run alone. InputError if files cannot be written
    there, or if another run is at it: its host, process, start and command. The system gives a lock back when its process ends,
    however it does, so that of a run that was killed is simply taken over."""
    with ExitStack() as stack:
        for key in {Path(name).resolve(): key for key, name in folders.items()}.values():
            _claim(Path(folders[key]), key, stack)
        yield


def _claim(folder: Path, key: str, stack: ExitStack) -> None:
    make_folder(folder)
    check_output(folder / LOCK_FILE)
    lock = FileLock(str(folder / LOCK_FILE), timeout=0)
    try:
        with writing(folder / LOCK_FILE):
            stack.enter_context(lock)
    except Timeout:
        raise InputError(
            f"{folder} ({key}) is in use by another run: {_holder(folder)}. Wait for it, or name another folder"
        ) from None
    holder = folder / HOLDER_FILE
    write_text(
        holder,
        json.dumps(
            {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "command": shlex.join(["hetpipe", *sys.argv[1:]]),
            },
            indent=1,
        )
        + "\n",
    )
    stack.callback(holder.unlink, missing_ok=True)


def _holder(folder: Path) -> str:
    try:
        found = json.loads((folder / HOLDER_FILE).read_text(encoding="utf-8"))
        return f"process {found['process']} on host {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it has not yet said which"


def free_bytes(folder: str | Path) -> int:
    """What is free where the folder is, or will be."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_room(folder: str | Path, needed: int, what: str) -> None:
    """InputError if the folder's file system has less room than `what` needs."""
    free = free_bytes(folder)
    if free < needed:
        raise InputError(
            f"there is no room for {what} in {folder}: it needs {human_bytes(needed)}, but {human_bytes(free)} are free. "
            "Free some, or "
            "name another folder"
        )
