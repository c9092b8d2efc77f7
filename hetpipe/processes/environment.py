"""What the environment says of this process: which rank it is, as torchrun and `hetpipe train` tell it, and how long ranks wait
for each other. InputError, with the variable and its value, where that makes no sense."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import NamedTuple

from hetpipe.files.limits import MOST_SECONDS
from hetpipe.files.messages import InputError, shown

STEP_SECONDS, LONG_SECONDS = "HETPIPE_TIMEOUT_SECONDS", "HETPIPE_LONG_TIMEOUT_SECONDS"
NODE, WITHOUT = "HETPIPE_NODE", "HETPIPE_WITHOUT"
MOST_RANKS, MOST_PORT = 2**20, 2**16 - 1


class Place(NamedTuple):
    """This process among those that a launcher started, and among the `local_size` of them on this host, whose number with
    torchrun is `agent`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    agent: int = 0


def launched() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ


def place() -> Place:
    """As the launcher says; alone without one."""
    if not launched():
        return Place()
    rank = _number("RANK", 0, MOST_RANKS)
    size = _number("WORLD_SIZE", 1, MOST_RANKS, rank + 1)  # one's own process group needs no variables
    local, here = _number("LOCAL_RANK", 0, MOST_RANKS, rank), _number("LOCAL_WORLD_SIZE", 1, MOST_RANKS, size)
    if rank >= size:
        raise InputError(f"the environment variable RANK is {rank}, but WORLD_SIZE is {size}: ranks go from 0 to {size - 1}")
    if local >= here:
        raise InputError(f"the environment variable LOCAL_RANK is {local}, but there are {here} ranks on this host")
    return Place(rank, size, local, here, _number("GROUP_RANK", 0, MOST_RANKS, 0))


def own_node() -> str | None:
    """Which node of the cluster file this host says that it is."""
    return os.environ.get(NODE) or None


def left_out() -> tuple[str, ...]:
    """Devices of the cluster file for which no rank was started, as the command that started the ranks says."""
    return tuple(os.environ.get(WITHOUT, "").split())


def started_ranks() -> int:
    """How many ranks a launcher says that it started, also where it does not say which one this is."""
    return _number("WORLD_SIZE", 1, MOST_RANKS, 1)


def own_rank() -> int:
    """This process's rank for messages: 0 where the launcher says none that makes sense."""
    try:
        return place().rank
    except InputError:
        return 0


def step_timeout() -> timedelta:
    """A message of a training step that takes longer means a lost peer."""
    return timedelta(seconds=_seconds(STEP_SECONDS, 120.0))


def long_timeout() -> timedelta:
    """Measuring, planning, loading and saving, where ranks wait for one, may take long."""
    return max(step_timeout(), timedelta(seconds=_seconds(LONG_SECONDS, 3600.0)))


def check_environment() -> None:
    """InputError if ranks could not meet, or would not know how long to wait: known before anything starts."""
    long_timeout()
    place()
    if launched():
        _number("WORLD_SIZE", 1, MOST_RANKS)
        _number("MASTER_PORT", 1, MOST_PORT)
        if not os.environ.get("MASTER_ADDR"):
            raise InputError(f"the environment variable RANK is {os.environ['RANK']}, but MASTER_ADDR is not set{_AGAIN}")


_AGAIN = ": start the ranks with torchrun, which sets both, or unset RANK, and 'hetpipe train' starts its own"


def _number(name: str, least: int, most: int, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise InputError(f"the environment variable RANK is {shown(os.environ.get('RANK'))}, but {name} is not set{_AGAIN}")
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= most):
        raise InputError(f"the environment variable {name} is {shown(text)}: expected a whole number from {least} to {most}")
    return int(text)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= MOST_SECONDS:
        raise InputError(
            f"the environment variable {name} is {shown(text)}: write seconds, a number from 1 to {MOST_SECONDS:.0f}, such as "
            f"{default:.0f}, or unset it"
        )
    return seconds


def cores() -> int:
    """How many processors this process may use: those that its affinity leaves it, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
