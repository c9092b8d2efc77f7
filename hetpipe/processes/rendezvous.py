"""Meeting the other processes of a job, whose launcher may have started them before, and leaving them."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hetpipe.processes.pulse import stop_pulse

POLL_SECONDS = 0.05


class Holder(Protocol):
    """What has process groups, and hooks on parameters that refer to them."""

    def close(self) -> None: ...


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def meet_ranks(timeout: timedelta) -> tuple[Store, int, int]:
    """(store, rank, size) for `init_process_group`, by the environment that a launcher prepared, also after a restart."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    return fresh_part(store, rank, size, timeout), rank, size


def fresh_part(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """A part of `store` in which nothing stands of an earlier start: torchrun keeps one store for all restarts (--max-restarts),
    with the addresses of processes that are gone. Every rank must call it; RuntimeError if some do not within `timeout`.

    torchrun's count of restarts tells starts apart for one agent only. With several, an agent whose processes are only told to
    start again (another node failed) does not count that, and one whose processes die early counts alone. So the ranks agree
    in the store: rank 0 opens a round whenever it starts, the others join the newest that is still open, and once all have
    joined, it is closed for ever.
    """
    rounds = PrefixStore(_rounds(size), store)
    deadline = time.monotonic() + timeout.total_seconds()
    joined: int = rounds.add("opened", 1) if rank == 0 else 0
    while True:
        newest = rounds.add("opened", 0)
        closed = newest > 0 and rounds.check([f"{newest}/closed"])
        if closed and newest == joined:
            return part_of_start(store, size, joined)
        if not closed and newest != joined:
            joined = newest
            rounds.set(_joins(joined, rank), "")
        if rank == 0 and rounds.check([_joins(joined, other) for other in range(1, size)]):
            rounds.set(f"{joined}/closed", "")
            continue
        if time.monotonic() > deadline:
            late = [other for other in range(1, size) if not rounds.check([_joins(joined, other)])] if joined else []
            raise RuntimeError(
                f"rank {rank} of {size} waited {timeout.total_seconds():g} s (HETPIPE_LONG_TIMEOUT_SECONDS) for the start of "
                f"{f'ranks {late}' if late else 'rank 0'}: is the command running on every host?"
            )
        time.sleep(POLL_SECONDS)


def part_of_start(store: Store, size: int, number: int) -> Store:
    """What `fresh_part` gives the ranks that are the first to meet in `store` (number 1), the second, …"""
    return PrefixStore(f"{_rounds(size)}/{number}/store", store)


def _rounds(size: int) -> str:
    return f"hetpipe/{size} ranks"


def _joins(number: int, rank: int) -> str:
    """The key that says so."""
    return f"{number}/rank {rank}"


def give_back_at_exit(holder: Holder) -> None:
    """Close `holder` and take all that it has before the process groups are ended."""
    _holders.add(holder)


def leave() -> None:
    """End the process groups of a script that ended well. A thread of gloo's that still lets go of a finished message while
    the interpreter ends is stopped where it must not be, and the process aborts ("terminate called without an active
    exception"). These threads end with their group, and a group when nothing refers to it any more. After an exception nothing
    is waited for: peers are told by the closing connection."""
    error = getattr(sys, "last_value", None)
    stop_pulse(f"{type(error).__name__}: {error}" if error is not None else None)
    if error is not None:
        return
    for holder in list(_holders):
        holder.close()
        vars(holder).clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
