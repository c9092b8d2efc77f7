from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.files.messages import InputError
from hetpipe.planning.shares import fastest_shares, proportional_shares, shares_for


def plan_of(*sizes: tuple[int, ...]) -> Plan:
    """One device a replica, with these micro-batches."""
    replicas = tuple(
        ReplicaPlan(microbatch_sizes=own, stages=(StagePlan(layers=(0, 1), devices=(f"n0/{r}",)),)) for r, own in enumerate(sizes)
    )
    return Plan(model="test", global_batch=sum(map(sum, sizes)), replicas=replicas)


class TestDeal:
    def test_by_hand(self) -> None:
        """Replica 0 takes 1 s a micro-batch, replica 1 takes 2 s and fills for 1 s: 4 s = 4 and (1 + 2 = 3 s) 1."""
        assert fastest_shares([[0, 1, 2, 3, 4, 5, 6], [0, 3, 5, 7, 9, 11, 13]], 6) == [5, 1]
        assert fastest_shares([[0, 1, 2, 3, 4], [0, 3, 6, 9, 12]], 4) == [3, 1]

    def test_the_first_of_equals(self) -> None:
        assert fastest_shares([[0, 1, 2], [0, 1, 2]], 1) == [1, 0]

    def test_a_replica_that_can_hold_no_more(self) -> None:
        assert fastest_shares([[0, 1, float("inf")], [0, 5, 10, 15]], 3) == [1, 2]
        assert fastest_shares([[0, 1], [0, 5, 10, 15]], 3) == [1, 2]

    def test_too_many(self) -> None:
        with pytest.raises(ValueError, match="the replicas can take 2 micro-batches, 3 are to be shared out"):
            fastest_shares([[0, 1], [0, 1]], 3)

    def test_falling_times_are_refused(self) -> None:
        with pytest.raises(ValueError, match="the times of replica 1 fall"):
            fastest_shares([[0, 1], [0, 2, 1]], 1)

    @given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 8))
    def test_no_shares_are_better(self, steps: list[list[int]], m: int) -> None:
        times = [[float(sum(row[:c])) for c in range(len(row) + 1)] for row in steps]
        every = [c for c in product(*(range(len(row)) for row in times)) if sum(c) == m]
        assume(every)
        shares = fastest_shares(times, m)
        assert sum(shares) == m

        def end(counts: tuple[int, ...] | list[int]) -> float:
            return max(row[c] for row, c in zip(times, counts, strict=True))

        assert end(shares) == min(map(end, every))


class TestProportionalShares:
    def test_by_hand(self) -> None:
        assert proportional_shares([3.0, 2.0, 1.0], 10) == [5, 3, 2]
        assert proportional_shares([1.0, 1.0, 1.0], 2) == [1, 1, 0]
        assert proportional_shares([0.0, 1.0], 3) == [0, 3]

    def test_no_weight(self) -> None:
        with pytest.raises(ValueError, match=r"cannot share 3 by the weights \[0.0, 0.0\]"):
            proportional_shares([0.0, 0.0], 3)

    @given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 200))
    def test_within_one_of_the_quota(self, weights: list[int], total: int) -> None:
        assume(sum(weights))
        parts = proportional_shares([float(w) for w in weights], total)
        assert sum(parts) == total
        assert all(abs(p - total * w / sum(weights)) < 1 for p, w in zip(parts, weights, strict=True))


class TestSharesFor:
    def test_the_whole_batch_is_the_plan(self) -> None:
        plan = plan_of((4, 4, 3), (2, 2))
        assert shares_for(plan, 15) == ((4, 4, 3), (2, 2))

    def test_half_the_batch(self) -> None:
        assert shares_for(plan_of((4, 4, 4, 4), (4, 4)), 12) == ((4, 4), (4,))

    def test_the_rest_is_one_smaller_microbatch(self) -> None:
        """5 of 24: the parts are 3.3 and 1.7, so the whole micro-batch goes to the first, the rest to the second."""
        assert shares_for(plan_of((4, 4, 4, 4), (4, 4)), 5) == ((4,), (1,))

    def test_a_replica_gets_none(self) -> None:
        assert shares_for(plan_of((4, 4, 4), (1,)), 4) == ((4,), ())

    def test_too_large_a_batch(self) -> None:
        with pytest.raises(InputError, match="a batch of 9 samples is too large for a plan of 8"):
            shares_for(plan_of((4, 4)), 9)
        with pytest.raises(InputError, match="a batch of 0 samples"):
            shares_for(plan_of((4, 4)), 0)

    @given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4), st.data())
    def test_exact_and_never_more_than_planned(self, sizes: list[tuple[int, ...]], data: st.DataObject) -> None:
        plan = plan_of(*sizes)
        batch = data.draw(st.integers(1, plan.global_batch))
        shares = shares_for(plan, batch)
        assert sum(map(sum, shares)) == batch
        assert shares == shares_for(plan, batch)
        for own, share in zip(sizes, shares, strict=True):
            assert len(share) <= len(own)
            assert sum(share) <= sum(own)
            assert share[:-1] == own[: max(0, len(share) - 1)]
            assert all(given_size <= size for given_size, size in zip(share, own, strict=False))
        partial = [r for r, share in enumerate(shares) if share and share[-1] != sizes[r][len(share) - 1]]
        assert len(partial) <= 1
