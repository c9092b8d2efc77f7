"""Signs of life of ranks as they stand in the job's store, and what they say of why a run ends: which rank is to blame."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from hetpipe.files.messages import natural_key
from hetpipe.processes.progress import duration
from hetpipe.processes.whereabouts import Figures

MOST_TOLD = 4  # ranks in a message
LONG_SECONDS = 10.0  # a rank that had waited for longer when it ended may have ended because of that
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "recvValue failed",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
    "Software caused connection abort",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "Connection was likely closed",
    "connectFullMesh failed",
    "Application timeout caused pair closure",
    "wait timeout after",
)
_TIMEOUTS = ("Timed out waiting", "Application timeout caused pair closure", "wait timeout after", "connectFullMesh failed")


def is_echo(message: str) -> bool:
    """Whether an error's message only says that a peer is gone, or that nothing came of it in time."""
    return any(echo in message for echo in _ECHOES)


def is_timeout(message: str) -> bool:
    """Whether an error's message only says that nothing came of a peer in time."""
    return any(text in message for text in _TIMEOUTS)


class KeyValueStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's sign of life. `waits`: for other ranks; `seconds`: for how long it has been doing what it does; `needed`: by other
    ranks; `error`: its last words, if it ends because of an error of its own; `left`: it ended without one; `cause`: because of
    another rank, of which it says this (empty: it does not know); `heard`: it knows why another ended; `figures`:
    see `whereabouts.figures`."""

    rank: int
    count: int
    time: float
    host: str
    place: str
    doing: str
    waits: bool = False
    seconds: float = 0.0
    needed: bool = True
    resume: str = ""
    error: str | None = None
    left: bool = False
    cause: str | None = None
    heard: bool = False
    figures: Figures = field(default_factory=dict)

    @property
    def who(self) -> str:
        """`rank 3 on host b (replica 0 stage 2, device n1/1)`."""
        return f"rank {self.rank} on host {self.host}{f' ({self.place})' if self.place else ''}"

    @property
    def last_seen(self) -> str:
        """When, and what it was doing."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"last heard of at {clock}{f', in {self.doing}' if self.doing else ''}"

    @property
    def lives(self) -> bool:
        """Whether it has not ended by itself."""
        return self.error is None and not self.left


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


def newest_resume(beats: Mapping[int, Beat]) -> str:
    """What the run can go on from, by the rank that has saved most; empty where nothing is saved."""
    return max((beat.resume for beat in beats.values()), key=natural_key, default="")


def said(beats: Mapping[int, Beat], own: int) -> str | None:
    """Which other rank was the first that ended because of an error of its own; or what the first said that ended because of
    another rank, so that all hosts say the same. None where none has ended so."""
    found = [b for b in beats.values() if (b.error is not None or b.cause) and b.rank != own]
    if not found:
        return None
    first = min(found, key=lambda b: b.time)
    return first.cause or f"{first.who} failed{f' in {first.doing}' if first.doing else ''}: {first.error}"


def ended_early(beats: Mapping[int, Beat], own: int) -> str | None:
    """Which other rank ended without an error, though it is needed."""
    found = [b for b in beats.values() if b.left and b.needed and b.cause is None and b.rank != own]
    if not found:
        return None
    first = min(found, key=lambda b: b.time)
    return f"{first.who} has ended without an error (sys.exit in a script?), and the others still need it; {first.last_seen}"


def held_up(beats: Mapping[int, Beat], own: int) -> str | None:
    """Which other rank all wait for, after a message that did not come in time: of those that live and do not wait themselves,
    the one that has been doing the same for longest; or that there is none."""
    longest = _longest_at_work(beats, own)
    if longest is not None:
        return (
            f"{longest.who} holds up the others: it {_busy_with(longest)} (they wait for as long as HETPIPE_TIMEOUT_SECONDS "
            "says, and outside of steps HETPIPE_LONG_TIMEOUT_SECONDS)"
        )
    waiting = [b for b in beats.values() if b.lives and b.waits]
    if len(waiting) < 2:
        return None
    parts = [f"{b.who} in {b.doing or 'a message to all'}" for b in waiting[:MOST_TOLD]]
    parts += [f"{len(waiting) - MOST_TOLD} more"] * (len(waiting) > MOST_TOLD)
    return f"all ranks wait for each other, as where the connection between two hosts is cut: {'; '.join(parts)}"


def _longest_at_work(beats: Mapping[int, Beat], *others_than: int) -> Beat | None:
    found = [b for b in beats.values() if b.rank not in others_than and b.lives and b.needed and not b.waits]
    return max(found, key=lambda b: b.seconds, default=None)


def _busy_with(beat: Beat) -> str:
    return f"has been in {beat.doing or 'code of its own'} for {duration(beat.seconds)}"


def at_work(beats: Mapping[int, Beat]) -> str:
    """What the ranks do that do not wait for others, for who does."""
    found = [b for b in beats.values() if b.lives and b.needed and not b.waits and b.doing]
    parts = [f"rank {b.rank} on host {b.host}: {b.doing}" for b in found[:MOST_TOLD]]
    return "; ".join(parts + [f"{len(found) - MOST_TOLD} more"] * (len(found) > MOST_TOLD))


def gone(silent: Sequence[Beat], beats: Mapping[int, Beat]) -> str:
    """What is said of ranks that give no signs of life: whole hosts by their names."""
    parts = []
    for host in dict.fromkeys(b.host for b in silent):
        own = [b for b in silent if b.host == host]
        last = max(own, key=lambda b: b.time)
        if len(own) > 1 and len(own) == sum(b.host == host and not b.left for b in beats.values()):
            ranks = "; ".join(f"rank {b.rank}{f', {b.place}' if b.place else ''}" for b in own)
            parts.append(f"host {host} is gone or cut off, with all of its ranks ({ranks}); {last.last_seen}")
        else:
            parts += [f"{b.who} is gone; {b.last_seen}" for b in own]
    return "; ".join(parts) + waited(silent, beats)


def waited(ended: Sequence[Beat], beats: Mapping[int, Beat]) -> str:
    """What is said more where ranks have ended that all had waited for long: for whom. (NCCL kills who waits for too long.)"""
    longest = _longest_at_work(beats, *(b.rank for b in ended))
    if longest is None or not all(b.waits and LONG_SECONDS <= b.seconds <= longest.seconds for b in ended):
        return ""
    return f", and had waited for {duration(max(b.seconds for b in ended))}: {longest.who} {_busy_with(longest)}"
