"""Meeting the other processes of a job, whose launcher may have started them before, and leaving them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from hetpipe.files.messages import clipped, cut
from hetpipe.processes.environment import place
from hetpipe.processes.peers.missing import Came, find_missing, joins, last_words
from hetpipe.processes.progress import Activity, duration
from hetpipe.processes.pulse import (
    STORE_SECONDS,
    PeerLostError,
    SilentStoreError,
    agent_keeps_store,
    answered,
    is_of_another,
    stop_pulse,
    store_gone,
)
from hetpipe.processes.stopping import RunError

POLL_SECONDS = 0.05
TELL_SECONDS = 2.0  # between two looks at who is missing
RESTART_SECONDS = 120.0  # in which a rank that has ended is started again, if it is
LOST_SECONDS = 60.0  # after which a store that does not answer is out of reach


class GroupHolder(Protocol):
    """What has process groups, and hooks on parameters that refer to them."""

    def close(self) -> None: ...


_holders: weakref.WeakSet[GroupHolder] = weakref.WeakSet()


def meet_ranks(timeout: timedelta) -> tuple[Store, int, int]:
    """(store, rank, size) for `init_process_group`, by the environment that a launcher prepared, also after a restart. The first
    rank of each host says for whom it waits."""
    here = place()
    rank, size, speaks = here.rank, here.size, here.local_rank == 0
    with Activity("starting", shown=speaks) as activity:
        try:
            store = _store(rank, size, timeout, activity)
            return fresh_part(store, rank, size, timeout, activity.say if speaks else None), rank, size
        except (OSError, dist.DistError, SilentStoreError) as error:
            first = str(error).splitlines()[0]
            raise RunError(f"rank {rank} of {size}: {store_gone(socket.gethostname())} ({first})") from error


def _store(rank: int, size: int, timeout: timedelta, activity: Activity) -> Store:
    """The job's store. That of an agent is there when its ranks are; that of rank 0 when this comes."""
    host, port, mine = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank == 0 and not agent_keeps_store()
    if not mine:
        activity.say(f"waiting for the job's store at {host}:{port}")
        _await_listener(host, port, LOST_SECONDS if agent_keeps_store() else timeout.total_seconds())
    return TCPStore(host, port, size, is_master=mine, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _await_listener(host: str, port: int, seconds: float) -> None:
    """Until something listens there. (torch's store tries it in a call that heeds no signal.) OSError if nothing does in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=STORE_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(10 * POLL_SECONDS)


def fresh_part(store: Store, rank: int, size: int, timeout: timedelta, say: Callable[[str], object] | None = None) -> Store:
    """A part of `store` in which nothing stands of an earlier start: torchrun keeps one store for all restarts (--max-restarts),
    with the addresses of processes that are gone. Every rank must call it; RunError if some do not within `timeout`. `say` is
    told for whom this rank waits; with it, also RunError if one of these has ended and is not started again.

    torchrun's count of restarts tells starts apart for one agent only. With several, an agent whose processes are only told to
    start again (another node failed) does not count that, and one whose processes die early counts alone. So the ranks agree
    in the store: rank 0 opens a round whenever it starts, the others join the newest that is still open, and once all have
    joined, it is closed for ever.
    """
    rounds = PrefixStore(_rounds(size), store)
    came, joined = json.dumps(Came.here()), 0
    rounds.set(last_words(rank), "")  # of an earlier start
    if rank == 0:
        joined = rounds.add("opened", 1)
        rounds.set(joins(joined, rank), came)
    if say is not None:
        say(f"waiting for all {size} ranks")
    waits = _Waits(rounds, rank, size, timeout.total_seconds(), say)

    def closed() -> bool:
        """Whether the newest round is, and this rank has joined it; else it does what is to be done for that."""
        nonlocal joined
        newest = rounds.add("opened", 0)
        if newest > 0 and rounds.check([f"{newest}/closed"]):
            return newest == joined
        if newest != joined:
            joined = newest
            rounds.set(joins(joined, rank), came)
        if rank == 0 and rounds.check([joins(joined, other) for other in range(1, size)]):
            rounds.set(f"{joined}/closed", "")
            return True
        return False

    def met() -> bool:
        if closed():
            return True
        waits.look(joined)
        return False

    while not answered(met, LOST_SECONDS):
        time.sleep(POLL_SECONDS)
    return part_of_start(store, size, joined)


class _Waits:
    """How long a rank has waited for the others of a round, and for whom."""

    def __init__(self, rounds: Store, rank: int, size: int, limit: float, say: Callable[[str], object] | None) -> None:
        self.rounds, self.rank, self.size, self.limit, self.say = rounds, rank, size, limit, say
        self.began = self.told = time.monotonic()
        self.ended: dict[int, float] = {}  # rank → since when it is known that it has ended

    def look(self, number: int) -> None:
        """Say for whom, now and then; RunError where that is in vain."""
        now = time.monotonic()
        late = now - self.began > self.limit
        if not late and (self.say is None or now - self.told < max(TELL_SECONDS, (now - self.began) / 20)):
            return
        self.told, missing = now, find_missing(self.rounds, number, self.size)
        self.ended = {rank: self.ended.get(rank, now) for rank in missing.ended}
        if late or any(now - since > RESTART_SECONDS for since in self.ended.values()):
            raise RunError(
                f"rank {self.rank} has waited {duration(now - self.began)} for {missing}: is the command running on every host? "
                "(HETPIPE_LONG_TIMEOUT_SECONDS says how long ranks wait at most)"
            )
        if self.say is not None:
            self.say(f"waiting for {missing}")


def leave_word(words: str) -> None:
    """Tell those that wait for this rank to join that it has ended, and why."""
    here = place()
    host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=STORE_SECONDS)
    with contextlib.suppress(OSError, dist.DistError):
        _await_listener(host, port, 0.0)
        store = TCPStore(host, port, here.size, timeout=limit, wait_for_workers=False)
        told = f"on host {socket.gethostname()}: {cut(' '.join(words.split()))}"
        PrefixStore(_rounds(here.size), store).set(last_words(here.rank), told)


def part_of_start(store: Store, size: int, number: int) -> Store:
    """What `fresh_part` gives the ranks that are the first to meet in `store` (number 1), the second, …"""
    return PrefixStore(f"{_rounds(size)}/{number}/store", store)


def _rounds(size: int) -> str:
    return f"hetpipe/{size} ranks"


def give_back_at_exit(holder: GroupHolder) -> None:
    """Close `holder` and take all that it has before the process groups are ended."""
    _holders.add(holder)


def leave() -> None:
    """End the process groups of a script that ended well. A thread of gloo's that still lets go of a finished message while
    the interpreter ends is stopped where it must not be, and the process aborts ("terminate called without an active
    exception"). These threads end with their group, and a group when nothing refers to it any more. After an exception nothing
    is waited for: peers are told by the closing connection."""
    error = getattr(sys, "last_value", None)
    if error is None:
        stop_pulse()
    elif is_of_another(error):
        stop_pulse(cause=clipped(str(error)) if isinstance(error, PeerLostError) else "")
    else:
        stop_pulse(clipped(f"{type(error).__name__}: {error}"))
    if error is not None:
        return
    for holder in list(_holders):
        holder.close()
        vars(holder).clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
