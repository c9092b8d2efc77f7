"""A rank that has lost another hangs up: those that wait for it find out at once, and not one after the other as ranks end."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def sockets() -> dict[str, int]:
    """This process's sockets, by what the system calls them, and their descriptors; none where it does not list them."""
    found = {}
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with contextlib.suppress(OSError):  # it is closed by now
            if (name := entry.readlink().name).startswith("socket:"):
                found[name] = int(entry.name)
    return found


def hang_up(names: Collection[str], kept_port: int) -> int:
    """Shut down those of these sockets that are TCP connections of which no end has this port (that of the job's store, where
    ranks say why they end). Return how many."""
    count = 0
    for name, descriptor in sockets().items():
        if name in names:
            with contextlib.suppress(OSError):
                count += _shut(os.dup(descriptor), kept_port)
    return count


def _shut(descriptor: int, kept_port: int) -> bool:
    with socket.socket(fileno=descriptor) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        if kept_port in (found.getsockname()[1], found.getpeername()[1]):
            return False
        found.shutdown(socket.SHUT_RDWR)
        return True
