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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

from hetpipe.processes import whereabouts

T = TypeVar("T")
LAUNCHED = "HETPIPE_LAUNCHED"  # in the environment of ranks that `hetpipe train` started, and not torchrun
BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # after a failure, who has not beaten for so long is gone
STORE_SECONDS = 10.0  # for an answer of the store
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed",
           "Connection refused", "recvValue failed", "Timed out waiting", "NCCL communicator was aborted",
           "remote process exited", "Software caused connection abort", "Connection timed out", "No route to host",
           "Network is unreachable", "Connection was likely closed", "connectFullMesh failed")  # fmt: skip


def is_echo(message: str) -> bool:
    """Whether an error's message only says that a peer is gone."""
    return any(echo in message for echo in _ECHOES)


class KeyValueStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's sign of life. `error`: its last words, if it ends because of an error of its own; `left`: it ended well;
    `figures`: see `whereabouts.figures`."""

    rank: int
    count: int
    time: float
    host: str
    place: str
    doing: str
    resume: str = ""
    error: str | None = None
    left: bool = False
    figures: whereabouts.Figures = field(default_factory=dict)

    @property
    def who(self) -> str:
        """`rank 3 on host b (replica 0 stage 2, device n1/1)`."""
        return f"rank {self.rank} on host {self.host}{f' ({self.place})' if self.place else ''}"

    @property
    def last_seen(self) -> str:
        """When, and what it was doing."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"last heard of at {clock}{f', in {self.doing}' if self.doing else ''}"


class PeerLostError(RuntimeError):
    """Another rank is gone, or failed: the message says which, on which host, and what it was doing."""


class Silence:
    """How long ranks have given no sign of life, for a process that looks every so many seconds. One that is silent for more than
    `patience` seconds is missed. While this process itself stands still (its job is suspended), nobody's silence counts."""

    def __init__(self, patience: float, every: float) -> None:
        self.patience, self.every = patience, every
        self._looked = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}  # rank → the count of its last sign, and seconds since

    def look(self, read: Callable[[], Mapping[int, Beat]]) -> list[Beat]:
        """The last signs of those that are missed now, the longest silence first; none before it is time to look again."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < self.every:
            return []
        beats, self._looked = read(), now
        for rank, beat in beats.items():
            count, seconds = self._heard.get(rank, (-1, 0.0))
            self._heard[rank] = beat.count, seconds + min(passed, 2 * self.every) if count == beat.count else 0.0
        silent = [beat for rank, beat in beats.items() if self._heard[rank][1] > self.patience and not beat.left]
        return sorted(silent, key=lambda beat: -self._heard[beat.rank][1])


class Pulse:
    """This rank's signs of life, and the reading of the others'. A store that is out of reach may not answer at all, so it is
    asked in threads that can be left behind. After `patience` seconds without a sign of another rank, or an answer, the process
    ends with a message even if nothing has failed (None: somebody else watches)."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, *, patience: float | None = None) -> None:
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
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

    def stop(self, error: str | None = None) -> None:
        """The last sign: this rank ends, well or with these last words."""
        if not self._over:
            self._over = True
            self._changed.set()
            with contextlib.suppress(RuntimeError):
                _answer(lambda: self._beat(last=True, error=error))
            if error is None:
                self._thread.join(STORE_SECONDS)  # a thread that asks the store while the interpreter ends aborts the process

    def _beat(self, *, last: bool = False, error: str | None = None) -> None:
        with self._writing:  # one after the other, and none after the last
            if self._over and not last:
                return
            self.count += 1
            beat = Beat(rank=self.rank, count=self.count, time=time.time(), host=self.host, place=whereabouts.place(),
                        doing=whereabouts.doing(), resume=whereabouts.resume(), error=error,
                        left=last and error is None, figures=whereabouts.figures())  # fmt: skip
            self.store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        return _answer(lambda: read_beats(self.store, ranks))

    def verdict(self, seconds: float = SILENT_SECONDS) -> str | None:
        """Who is gone, or failed first: waited for up to `seconds`; None where all others live and have no errors."""
        everyone = range(self.size)
        try:
            before = self._read(everyone)
            deadline = time.monotonic() + seconds
            while True:
                now = self._read(everyone)
                failed = [b for b in now.values() if b.error is not None and b.rank != self.rank]
                if failed:
                    first = min(failed, key=lambda b: b.time)
                    return f"{first.who} failed{f' in {first.doing}' if first.doing else ''}: {first.error}"
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)
        except RuntimeError:
            return self._store_gone("")
        silent = [b for r, b in before.items() if r != self.rank and not b.left and now[r].count == b.count]
        return gone(silent, before) if silent else None

    def first_to_say(self, words: str) -> bool:
        """Whether no other rank of this agent has said the same (or that cannot be known)."""
        agent = os.environ.get("GROUP_RANK", "0")
        digest = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        try:
            return _answer(lambda: self.store.add(f"said/{self.host}/{agent}/{digest}", 1)) == 1
        except RuntimeError:
            return True

    def _store_gone(self, since: str) -> str:
        host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return (
            f"the job's store at {host}:{port} cannot be reached{since}: the host {host!r} is gone, or this host "
            f"({self.host!r}) is cut off"
        )

    def _run(self) -> None:
        reached = time.monotonic()
        while True:
            self._changed.wait(BEAT_SECONDS)
            self._changed.clear()
            if self._over:
                return
            lost = None
            try:
                _answer(self._beat)
                reached = time.monotonic()
                lost = self._lost()
            except RuntimeError:
                silence = time.monotonic() - reached
                if self.patience is not None and silence > self.patience:
                    lost = self._store_gone(time.strftime(" since %H:%M:%S", time.localtime(time.time() - silence)))
            if lost is not None:
                sys.stderr.write(f"error: {lost}\n")
                sys.stderr.flush()
                os._exit(1)

    def _lost(self) -> str | None:
        """Who has been silent for too long: rank 0 looks at all, the others at rank 0."""
        looked_at = range(self.size) if self.rank == 0 else [0]
        silent = self._silence.look(lambda: self._read(looked_at)) if self._silence is not None else []
        return gone(silent, self._read(looked_at)) if silent else None


def _answer(call: Callable[[], T]) -> T:
    """What the call returns; RuntimeError where it takes too long, or raises one."""
    outcome: list[T | RuntimeError] = []

    def ask() -> None:
        try:
            outcome.append(call())
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    if not outcome:
        raise RuntimeError("the store does not answer")
    if isinstance(outcome[0], RuntimeError):
        raise outcome[0]
    return outcome[0]


def read_beats(store: KeyValueStore, ranks: Sequence[int]) -> dict[int, Beat]:
    """The last sign of life of each of these ranks that gave one."""
    found = {}
    for rank in ranks:
        key = f"beat/{rank}"
        if store.check([key]):
            found[rank] = Beat(**json.loads(store.get(key)))
    return found


def part_for_beats(store: Any) -> KeyValueStore:
    """Where ranks beat, in their part of a store (see `hetpipe.processes.rendezvous`)."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return cast(KeyValueStore, PrefixStore("pulse", store))


def gone(silent: Sequence[Beat], all_beats: Mapping[int, Beat]) -> str:
    """What is said of ranks that give no signs of life: whole hosts by their names."""
    parts = []
    for host in dict.fromkeys(b.host for b in silent):
        own = [b for b in silent if b.host == host]
        last = max(own, key=lambda b: b.time)
        if len(own) > 1 and len(own) == sum(b.host == host and not b.left for b in all_beats.values()):
            ranks = "; ".join(f"rank {b.rank}{f', {b.place}' if b.place else ''}" for b in own)
            parts.append(f"host {host} is gone or cut off, with all of its ranks ({ranks}); {last.last_seen}")
        else:
            parts += [f"{b.who} is gone; {b.last_seen}" for b in own]
    return "; ".join(parts)


_pulse: Pulse | None = None


def start_pulse(store: Any, rank: int, size: int, patience: float) -> None:
    """Give signs of life from now on, in the ranks' part of the store that torchrun keeps, or `hetpipe train`, which watches its
    ranks itself (`patience`: see `Pulse`)."""
    global _pulse
    if _pulse is not None:
        return
    own = store.clone()  # for other threads, which may wait for an answer
    own.set_timeout(timedelta(seconds=STORE_SECONDS))
    _pulse = Pulse(part_for_beats(own), rank, size, patience=None if LAUNCHED in os.environ else patience)
    _pulse.start()


def stop_pulse(error: str | None = None) -> None:
    """The last sign of life (see `Pulse.stop`)."""
    if _pulse is not None:
        _pulse.stop(error)


def verdict() -> str | None:
    """Who is gone, or failed first, as far as this rank can find out."""
    return _pulse.verdict() if _pulse is not None else None


def beats() -> dict[int, Beat]:
    """The last sign of life of every rank; none where this rank gives none, or cannot hear the others."""
    if _pulse is not None:
        with contextlib.suppress(RuntimeError):
            return _answer(lambda: read_beats(_pulse.store, range(_pulse.size)))
    return {}


def first_to_say(words: str) -> bool:
    """Whether this rank is the first of its agent, and so in its log, to say this."""
    return _pulse is None or _pulse.first_to_say(words)


@contextmanager
def peers_named() -> Iterator[None]:
    """A broken connection in here is told as the loss of the rank that broke it (PeerLostError)."""
    try:
        yield
    except RuntimeError as error:
        words = verdict() if is_echo(str(error)) else None
        if words is None:
            raise
        raise PeerLostError(words) from error
