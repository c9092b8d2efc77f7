"""Ranks that are started again agree on a part of the store that is theirs alone, whoever comes first, and whoever died on the
way."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hetpipe.processes import rendezvous
from hetpipe.processes.peers.missing import Missing, find_missing, joins, last_words
from hetpipe.processes.pulse import others_may_wait
from hetpipe.processes.rendezvous import fresh_part, leave_word, meet_ranks
from hetpipe.processes.stopping import RunError
from tests.support.commands import free_port

SOON, LATE = timedelta(seconds=0.3), timedelta(seconds=30)


class Ranks:
    """Ranks as threads, each with the store that outlives them."""

    def __init__(self, size: int) -> None:
        self.store, self.size = dist.HashStore(), size  # type: ignore[attr-defined]
        self.pool = ThreadPoolExecutor(max_workers=8)

    def start(self, rank: int, timeout: timedelta = LATE) -> Future[Store]:
        return self.pool.submit(fresh_part, self.store, rank, self.size, timeout)

    def dies_early(self, rank: int) -> None:
        """It comes, and is gone before all others have come."""
        with pytest.raises(RuntimeError):
            self.start(rank, SOON).result()


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.pool.shutdown()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.005)


def meet(*coming: Future[Store]) -> list[Store]:
    """What each of them uses, if it is one part."""
    assert not wait(coming, 20).not_done
    parts = [rank.result() for rank in coming]
    parts[0].set("who", "the first")
    assert [part.get("who") for part in parts] == [b"the first"] * len(parts)
    return parts


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_restart_has_a_part_of_its_own(two: Ranks, order: tuple[int, int]) -> None:
    before, _ = meet(two.start(0), two.start(1))
    early = two.start(order[0])
    assert not wait([early], 0.2).done, "it waits for the other of its own start"
    again, _ = meet(early, two.start(order[1]))
    again.set("address", "new")
    assert not before.check(["address"])


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_before_all_have_come_is_replaced(dying: int) -> None:
    """Its agent alone starts its processes again and counts a restart; another rank still waits, a third is late."""
    ranks = Ranks(3)
    waiting = ranks.start(1 - dying)
    ranks.dies_early(dying)
    ranks.dies_early(dying)
    meet(waiting, ranks.start(dying), ranks.start(2))
    ranks.pool.shutdown()


def test_one_agent_restarts_without_counting_it() -> None:
    """Rank 2 alone knows that it was started three times."""
    ranks = Ranks(3)
    meet(*(ranks.start(rank) for rank in range(3)))
    ranks.dies_early(2)
    ranks.dies_early(2)
    meet(*(ranks.start(rank) for rank in (2, 1, 0)))
    ranks.pool.shutdown()


def test_another_number_of_ranks_is_another_job(two: Ranks) -> None:
    meet(two.start(0), two.start(1))
    waiting = two.start(1)  # of an agent that does not know yet
    alone = fresh_part(two.store, 0, 1, LATE)
    assert not wait([waiting], 0.1).done
    alone.set("who", "the only one")
    meet(waiting, two.start(0))


def test_who_is_missing_is_said(two: Ranks) -> None:
    with pytest.raises(RunError) as caught:
        two.start(0, SOON).result()
    words = re.sub(r"waited \d+ s", "waited 0 s", str(caught.value))
    assert words == (
        "rank 0 has waited 0 s for 1 of 2 ranks (rank 1 on another host): is the command running on every host? "
        "(HETPIPE_LONG_TIMEOUT_SECONDS says how long ranks wait at most)"
    )
    ranks = Ranks(2)
    with pytest.raises(RunError, match=r"rank 1 has waited \d+ s for 1 of 2 ranks \(rank 0 on another host\): is"):
        ranks.start(1, SOON).result()
    ranks.pool.shutdown()


def test_while_a_rank_waits_it_says_for_whom_and_why_a_missing_one_has_ended(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "RESTART_SECONDS", 0.2)
    said = list[str]()
    prefix = PrefixStore("hetpipe/2 ranks", two.store)
    prefix.set(last_words(1), "on host b: job.yaml is not there")
    with pytest.raises(RunError, match="rank 0 has waited .*; rank 1 has ended on host b: job.yaml is not there: is the command"):
        fresh_part(two.store, 0, 2, LATE, said.append)
    assert said[0] == "waiting for all 2 ranks"
    assert said[-1] == "waiting for 1 of 2 ranks (rank 1 on another host); rank 1 has ended on host b: job.yaml is not there"
    monkeypatch.setattr(rendezvous, "RESTART_SECONDS", 600.0)
    waiting = two.pool.submit(fresh_part, two.store, 0, 2, LATE, said.append)
    meet(waiting, two.start(1))  # it was started again
    assert prefix.get(last_words(1)) == b""


def test_a_rank_that_ends_before_it_could_join_leaves_word(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    place = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    assert not others_may_wait()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert others_may_wait()
    leave_word("job.yaml: 1 fault(s) in this job file\n  train.steps: too few")
    (text,) = find_missing(PrefixStore("hetpipe/4 ranks", store), 1, 4).ended.values()
    assert text == f"on host {socket.gethostname()}: job.yaml: 1 fault(s) in this job file train.steps: too few"
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    leave_word("nobody listens")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not others_may_wait(), "who started them ends them"


def test_the_hosts_of_missing_ranks_are_known_by_those_that_came() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank, came in {0: ("a", 0, 2), 1: ("a", 0, 2), 4: ("b", 2, 4)}.items():
        store.set(joins(7, rank), json.dumps(came))
    assert str(find_missing(store, 7, 9)) == "6 of 9 ranks (ranks 2, 3, 5 on host b; ranks 6, 7, 8 on another host)"
    assert str(find_missing(store, 0, 9)) == "1 of 9 ranks (rank 0 on another host)"  # it opens the round
    assert str(Missing({"": range(20)}, 99, {})) == "20 of 99 ranks (ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more on another host)"


def test_a_store_that_is_gone_or_silent_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous, "LOST_SECONDS", 0.1)
    with pytest.raises(RunError, match=rf"^rank 1 of 2: the job's store at 127.0.0.1:{port} cannot be reached: .* refused\)$"):
        meet_ranks(LATE)
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", port))
        silent.listen()
        stuck = threading.Event()
        monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: _Stuck(stuck))
        with pytest.raises(RunError, match="cannot be reached: .*the store does not answer"):
            meet_ranks(LATE)
        stuck.set()


class _Stuck(Store):
    """As torch's when its host is cut off: `add` waits without a limit."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self.over = over

    def set(self, key: str, value: str) -> None:
        """It is on its way."""

    def add(self, key: str, value: int) -> int:
        self.over.wait()
        return 0


def test_ranks_without_an_agent_meet_in_the_store_of_rank_0(tmp_path: Path) -> None:
    """Rank 1 comes first."""
    code = (
        "from datetime import timedelta; import sys; from hetpipe.processes.rendezvous import meet_ranks; "
        "print('here', flush=True); store, rank, size = meet_ranks(timedelta(seconds=60)); "
        "store.set(str(rank), 'from'); print(store.get(str(1 - rank)).decode(), 1 - rank, flush=True); "
        "store.set(f'{rank} heard', ''); store.wait([f'{1 - rank} heard'])"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "LOCAL_"))}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in (1, 0):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code], env={**kept, **place, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "here\n"
    said = [each.communicate(timeout=100)[0] for each in started]
    assert said == ["from 0\n", "from 1\n"]
    assert [each.returncode for each in started] == [0, 0]


def test_a_part_is_a_prefix_of_the_same_store(two: Ranks) -> None:
    part, _ = meet(two.start(0), two.start(1))
    assert isinstance(part, PrefixStore)
    assert not two.store.check(["who"])
