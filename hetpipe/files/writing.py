"""Writing files: whole or not at all, and a fault is known before the work whose result goes there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpipe.files.messages import InputError, cut, reason
from hetpipe.files.units import human_bytes


class WriteError(InputError, OSError):
    """A file could not be written: which, why, and what is free there."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """What the system refuses in here is told as a WriteError of this file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a WriteError, a Timeout of a lock
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise WriteError(cut(f"cannot write {path}: {reason(error)}{_free(Path(path).parent) if full else ''}")) from error


def _free(folder: Path) -> str:
    try:
        return f", {human_bytes(shutil.disk_usage(folder).free)} are free there; free some, or name another folder"
    except OSError:
        return ""


def check_output(path: str | Path | None, *endings: str) -> None:
    """InputError if no file can be written at `path` (None: nothing is to be), or if it has none of these endings. Called before
    the work whose result goes there; makes nothing."""
    if path is None:
        return
    target = Path(path)
    if endings and target.suffix.lower() not in endings:
        raise InputError(f"cannot write {str(path)!r}: unknown suffix {target.suffix!r}; known: {', '.join(endings)}")
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a folder; name a file in it" if os.path.isdir(target) else "no regular file"
        raise InputError(f"cannot write {path}: it is {what}")
    _probe(target.parent, target.name)


def check_folder(path: str | Path) -> None:
    """InputError if no files can be written into this folder, which need not be there yet. Makes nothing."""
    _probe(Path(path), "")


def _probe(folder: Path, name: str) -> None:
    """Try a file with such a name in the folder, or in the first that is there on the way up."""
    try:
        there = folder
        while not _is_there(there) and there != there.parent:
            there = there.parent
        handle, temporary = tempfile.mkstemp(dir=there, prefix=f".{name}.")
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot write {name}{' ' * bool(name)}into the folder {folder}: {reason(error)}")) from None
    os.close(handle)
    os.unlink(temporary)


def _is_there(path: Path) -> bool:
    """As `Path.exists`, but for links to nothing, and where the system refuses the name itself (OSError)."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_folder(path: str | Path) -> Path:
    """The folder, made if need be; an InputError if files cannot be written there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot write into the folder {folder}: {reason(error)}")) from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a reader (or a crash) sees the old content or the new, never a part."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """As `write_text`, of bytes."""
    check_output(path)
    target = Path(path)
    make_folder(target.parent)
    with writing(path):
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            mode = target.stat().st_mode if target.exists() else 0o644
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def append_line(path: str | Path, line: str) -> None:
    """A line more at the end of a file, which is made if need be."""
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
