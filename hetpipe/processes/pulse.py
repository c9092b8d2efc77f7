"""Signs of life: each rank writes every second into the job's store where it is and what it is doing, so that when a connection
breaks, every host can name the rank and the host that is gone. (What broke the connection knows addresses only, and after a
failure every survivor reports one of its neighbours.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

from hetpipe.files.messages import InputError, visible
from hetpipe.processes import whereabouts
from hetpipe.processes.environment import place
from hetpipe.processes.peers.beats import (
    Beat,
    KeyValueStore,
    Silence,
    ended_early,
    gone,
    held_up,
    is_echo,
    is_timeout,
    part_for_beats,
    read_beats,
    said,
)
from hetpipe.processes.peers.hang_up import hang_up, sockets
from hetpipe.processes.stopping import RunError

T = TypeVar("T")
LAUNCHED = "HETPIPE_LAUNCHED"  # in the environment of ranks that `hetpipe train` started, and not torchrun
BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # after a failure, who has not beaten for so long is gone
STORE_SECONDS = 10.0  # for an answer of the store
HEARD_SECONDS = 3 * BEAT_SECONDS  # for other hosts to hear why this one's agent ends, which may end the store


class PeerLostError(RuntimeError):
    """Another rank is gone, failed, or holds up all: the message says which, on which host, and what it was doing."""


class Pulse:
    """This rank's signs of life, and the reading of the others'. A store that is out of reach may not answer at all, so it is
    asked in threads that can be left behind. After `patience` seconds without a sign of another rank, or an answer, the process
    ends with a message even if nothing has failed (None: somebody else watches). `elsewhere`: ranks that other agents started,
    which may lose the store with this rank's agent and so are waited for until they have heard why."""

    def __init__(
        self, store: KeyValueStore, rank: int, size: int, *, patience: float | None = None, elsewhere: Sequence[int] = ()
    ) -> None:
        self.store, self.rank, self.size, self.patience, self.elsewhere = store, rank, size, patience, elsewhere
        self.heard: str | None = None  # what `said` once said
        self.host = socket.gethostname()
        self.count = 0
        self._silence = Silence(patience, STORE_SECONDS) if patience is not None else None
        self._over, self._changed, self._writing = False, threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        whereabouts.on_change(self._changed.set)
        self._beat()
        self._thread.start()

    def stop(self, error: str | None = None, cause: str | None = None) -> None:
        """The last sign: this rank ends, well, with these last words, or because of another rank (see `Beat`)."""
        if not self._over:
            self._over = True
            self._changed.set()
            with contextlib.suppress(RuntimeError):
                answered(lambda: self._beat(last=True, error=error, cause=cause))
                if error is not None or cause:
                    self._await_hearing()
            if error is None:
                self._thread.join(STORE_SECONDS)  # a thread that asks the store while the interpreter ends aborts the process

    def _await_hearing(self) -> None:
        """Until all that live elsewhere know why this rank ends, or for as long as they would need to."""
        if not self.elsewhere:
            return
        answered(lambda: self.store.set("failed", ""))
        deadline = time.monotonic() + HEARD_SECONDS
        while time.monotonic() < deadline:
            if not any(beat.lives and not beat.heard for beat in self._read(self.elsewhere).values()):
                return
            time.sleep(0.05)

    def _hear(self) -> None:
        """Remember why the first rank ends, and say so, while there is a store to ask."""
        if self.heard is None and self.store.check(["failed"]):
            self.heard = said(read_beats(self.store, range(self.size)), self.rank)
            self._beat()

    def _beat(self, *, last: bool = False, error: str | None = None, cause: str | None = None) -> None:
        with self._writing:  # one after the other, and none after the last
            if self._over and not last:
                return
            self.count += 1
            doing = whereabouts.now()
            beat = Beat(
                rank=self.rank,
                count=self.count,
                time=time.time(),
                host=self.host,
                place=whereabouts.described_place(),
                doing=doing.text,
                waits=doing.waits,
                seconds=doing.seconds,
                needed=whereabouts.needed(),
                resume=whereabouts.resume(),
                error=error,
                left=last and error is None,
                cause=cause,
                heard=self.heard is not None,
                figures=whereabouts.figures(),
            )
            self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        return answered(lambda: read_beats(self.store, ranks))

    def verdict(self, seconds: float | None = None, *, timed_out: bool = False) -> str | None:
        """Why a message of another rank did not come: who failed first, is gone, or has ended, waited for up to `seconds`; if it
        was late (`timed_out`), who holds up all. None where all others live and none of this is known."""
        everyone = range(self.size)
        try:
            before = self._read(everyone)
            deadline = time.monotonic() + (SILENT_SECONDS if seconds is None else seconds)
            while (words := said(beats := self._read(everyone), self.rank)) is None and time.monotonic() < deadline:
                time.sleep(0.2)
        except RuntimeError:
            return self.heard or store_gone(self.host)
        if words is not None:
            return words
        silent = [b for r, b in before.items() if r != self.rank and b.lives and beats[r].count == b.count]
        if silent:
            return gone(silent, beats)
        return ended_early(beats, self.rank) or (held_up(beats, self.rank) if timed_out else None)

    def first_to_say(self, words: str) -> bool:
        """Whether no other rank of this agent has said the same (or that cannot be known)."""
        agent = place().agent
        digest = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        try:
            return answered(lambda: self.store.add(f"said/{self.host}/{agent}/{digest}", 1)) == 1
        except RuntimeError:
            return True

    def _run(self) -> None:
        reached = time.monotonic()
        while True:
            self._changed.wait(BEAT_SECONDS)
            self._changed.clear()
            if self._over:
                return
            lost = None
            try:
                answered(self._beat)
                answered(self._hear)
                reached = time.monotonic()
                lost = self._lost()
            except RuntimeError:
                silence = time.monotonic() - reached
                if self.patience is not None and silence > self.patience:
                    since = time.strftime(" since %H:%M:%S", time.localtime(time.time() - silence))
                    lost = self.heard or store_gone(self.host, since)
            if lost is not None:
                resume = f"; the run goes on from {whereabouts.resume()}" if whereabouts.resume() else ""
                sys.stderr.write(f"error: {visible(lost + resume)}\n")
                sys.stderr.flush()
                os._exit(1)

    def _lost(self) -> str | None:
        """Who has been silent for too long: rank 0 looks at all, the others at rank 0."""
        looked_at = range(self.size) if self.rank == 0 else [0]
        silent = self._silence.look(lambda: self._read(looked_at)) if self._silence is not None else []
        if not silent:
            return None
        beats = self._read(looked_at)
        return said(beats, self.rank) or gone(silent, beats)


class SilentStoreError(RuntimeError):
    """The job's store does not answer."""


def answered(call: Callable[[], T], seconds: float | None = None) -> T:
    """What the call returns, or raises; SilentStoreError where it takes longer (by default than STORE_SECONDS)."""
    outcome: list[T | Exception] = []

    def ask() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS if seconds is None else seconds)
    if not outcome:
        raise SilentStoreError("the store does not answer")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def store_gone(here: str, since: str = "") -> str:
    """What is said on the host `here` where the job's store does not answer."""
    host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"the job's store at {host}:{port} cannot be reached{since}: the host {host!r} is gone, torchrun has ended there, or "
        f"this host ({here!r}) is cut off"
    )


_pulse: Pulse | None = None
_links: frozenset[str] = frozenset()  # sockets that end with the first loss of another rank


def start_pulse(store: Any, rank: int, size: int, patience: float) -> None:
    """Give signs of life from now on, in the ranks' part of the store that torchrun keeps, or `hetpipe train`, which watches its
    ranks itself (`patience`: see `Pulse`)."""
    global _pulse
    if _pulse is not None:
        return
    own = store.clone()  # for other threads, which may wait for an answer
    own.set_timeout(timedelta(seconds=STORE_SECONDS))
    if LAUNCHED in os.environ:
        _pulse = Pulse(part_for_beats(own), rank, size)
    else:
        first = rank - place().local_rank
        here = range(first, first + place().local_size)
        _pulse = Pulse(part_for_beats(own), rank, size, patience=patience, elsewhere=[r for r in range(size) if r not in here])
    _pulse.start()


def agent_keeps_store() -> bool:
    """Whether the store is torchrun's, or that of the command that started the ranks; else it is rank 0's, and ends with it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def watches_itself() -> bool:
    """Whether ranks give each other signs of life: those that torchrun, or `hetpipe train`, has started."""
    return agent_keeps_store() or "TORCHELASTIC_RUN_ID" in os.environ


def others_may_wait() -> bool:
    """Whether ranks on other hosts may wait for this one to join, which has given no sign of life yet. (Who started the ranks
    of this host ends them with it.)"""
    try:
        here = place()
    except InputError:
        return False
    return _pulse is None and here.size != here.local_size and agent_keeps_store() and LAUNCHED not in os.environ


def stop_pulse(error: str | None = None, cause: str | None = None) -> None:
    """The last sign of life (see `Pulse.stop`)."""
    if _pulse is not None:
        _pulse.stop(error, cause)


def is_of_another(error: BaseException) -> bool:
    """Whether an error of this rank only says that another is gone or late. (An OSError, or a RunError of one, may use the same
    words of a file system, or of a server that has the data.)"""
    if isinstance(error, PeerLostError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, RunError) and is_echo(str(error))


def cause(error: BaseException) -> str | None:
    """Of such an error: which rank is gone, failed or holds up all, as far as this one can find out."""
    if isinstance(error, PeerLostError):
        return str(error)
    if _pulse is None or not is_of_another(error):
        return None
    return _pulse.verdict(timed_out=is_timeout(str(error)))


def beats() -> dict[int, Beat]:
    """The last sign of life of every rank; none where this rank gives none, or cannot hear the others."""
    if _pulse is not None:
        with contextlib.suppress(RuntimeError):
            return answered(lambda: read_beats(_pulse.store, range(_pulse.size)))
    return {}


def others() -> dict[int, Beat]:
    """The same, of all ranks but this one."""
    return {rank: beat for rank, beat in beats().items() if _pulse is None or rank != _pulse.rank}


def first_to_say(words: str) -> bool:
    """Whether this rank is the first of its agent, and so in its log, to say this."""
    return _pulse is None or _pulse.first_to_say(words)


@contextmanager
def peers_named() -> Iterator[None]:
    """A broken connection in here, or a message that is late, is told as PeerLostError, which names the rank to blame."""
    try:
        yield
    except PeerLostError:
        raise
    except RuntimeError as error:
        if _links and is_of_another(error):
            hang_up(_links, int(os.environ.get("MASTER_PORT", "0")))
        words = cause(error)
        if words is None:
            raise
        raise PeerLostError(words) from error


def hang_up_on_loss() -> None:
    """From now on, when this rank has lost another, it ends the connections that it has by now at once, since the others have
    something to do before they end."""
    global _links
    _links = frozenset(sockets())
