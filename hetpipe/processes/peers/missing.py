"""Which ranks of a job have not come, and on which hosts they are, by what those that came have left in the store."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hetpipe.processes.environment import place

MOST_RANKS, MOST_ENDED = 8, 3  # in a message


class Readable(Protocol):
    """What is used of torch's stores."""

    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def joins(number: int, rank: int) -> str:
    """The key that says that a rank has joined the start of this number."""
    return f"{number}/rank {rank}"


def last_words(rank: int) -> str:
    """The key of why a rank ended before it could join."""
    return f"ended/rank {rank}"


class Came(NamedTuple):
    """What a rank leaves when it joins: its host, and which ranks a launcher started with it there."""

    host: str
    first: int
    size: int

    @classmethod
    def here(cls) -> Came:
        """Of this one."""
        here = place()
        return cls(socket.gethostname(), here.rank - here.local_rank, here.local_size)


@dataclass(frozen=True)
class Missing:
    """Who has not come: host (empty: one of which no rank has come) → ranks; and of those that have ended, their last words."""

    on: Mapping[str, Sequence[int]]
    size: int
    ended: Mapping[int, str]

    def __str__(self) -> str:
        parts = [f"{_numbered(ranks)} on {f'host {host}' if host else 'another host'}" for host, ranks in self.on.items()]
        text = f"{sum(map(len, self.on.values()))} of {self.size} ranks ({'; '.join(parts)})"
        return text + "".join(f"; rank {rank} has ended {words}" for rank, words in list(self.ended.items())[:MOST_ENDED])


def _numbered(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:MOST_RANKS]))}{more}"


def find_missing(rounds: Readable, number: int, size: int) -> Missing:
    """Who has not joined a round of this number; before there is one, rank 0 is awaited, which opens it."""
    here = [rank for rank in range(size) if number and rounds.check([joins(number, rank)])]
    ranks = [rank for rank in range(size) if rank not in here] if number else [0]
    host_of: dict[int, str] = {}
    for rank in here:
        came = Came(*json.loads(rounds.get(joins(number, rank))))
        host_of |= dict.fromkeys(range(came.first, came.first + came.size), came.host)
    on: dict[str, list[int]] = {}
    for rank in ranks:
        on.setdefault(host_of.get(rank, ""), []).append(rank)
    words = {rank: rounds.get(last_words(rank)).decode() for rank in ranks if rounds.check([last_words(rank)])}
    return Missing(on, size, {rank: text for rank, text in words.items() if text})
