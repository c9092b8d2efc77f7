"""Ranks that are started again agree on a part of the store that is theirs alone, whoever comes first, and whoever died on the
way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hetpipe.processes import rendezvous
from hetpipe.processes.rendezvous import fresh_part

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
    with pytest.raises(RuntimeError) as caught:
        two.start(0, SOON).result()
    assert str(caught.value) == (
        "rank 0 of 2 waited 0.3 s (HETPIPE_LONG_TIMEOUT_SECONDS) for the start of ranks [1]: is the command running on every "
        "host?"
    )
    ranks = Ranks(2)
    with pytest.raises(RuntimeError, match="rank 1 of 2 waited 0.3 s .* for the start of rank 0: is"):
        ranks.start(1, SOON).result()
    ranks.pool.shutdown()


def test_a_part_is_a_prefix_of_the_same_store(two: Ranks) -> None:
    part, _ = meet(two.start(0), two.start(1))
    assert isinstance(part, PrefixStore)
    assert not two.store.check(["who"])
