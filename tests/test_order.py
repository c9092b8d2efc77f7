"""hetpipe/runtime/stages/order.py: what each stage begins, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetpipe.documents.schedule import FORWARD_ONLY
from hetpipe.runtime.replicas import plan_groups
from hetpipe.runtime.stages.order import Step, agreed, early
from tests.support.ranks import make_plan

Item = tuple[str, tuple[int, ...], str]  # what it is, the ranks that must come to it, the same for all of them


def words(order: Sequence[Step]) -> str:
    return " ".join(f"{step.kind}{step.microbatch}" for step in order)


def ends_one_by_one(ranks: Sequence[Sequence[Item]]) -> bool:
    """Whether every rank gets to its end, if it does one thing after the other and each waits for all that take part in it."""
    at = [0] * len(ranks)
    heads = [r for r, items in enumerate(ranks) if items]
    while heads:
        rank = heads.pop()
        if at[rank] == len(ranks[rank]):
            continue
        item = ranks[rank][at[rank]]
        if all(at[other] < len(ranks[other]) and ranks[other][at[other]] == item for other in item[1]):
            for other in item[1]:
                at[other] += 1
            heads += item[1]
    return at == [len(items) for items in ranks]


def items(order: Sequence[Step], stage: int, ranks: Sequence[int]) -> list[Item]:
    """Those of one stage of a pipeline on these ranks."""
    found: list[Item] = []
    for kind, i in order:
        if kind in ("F", "B"):
            found.append((f"{kind}{i}", (ranks[stage],), ""))
        else:
            way = kind[-1]
            other = stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1
            found.append((f"{way}{i}", tuple(sorted((ranks[stage], ranks[other]))), way))
    return found


@st.composite
def depths_and_count(draw: st.DrawFn) -> tuple[list[int | None], int]:
    """(warm-up depths, of which some first ones, or all, are None; micro-batches)"""
    stages, m = draw(st.integers(1, 6)), draw(st.integers(1, 10))
    depths = draw(st.lists(st.integers(1, m + 2), min_size=stages, max_size=stages))
    frozen = draw(st.integers(0, stages) | st.just(0))
    return [None] * frozen + sorted(depths, reverse=True)[frozen:], m


def test_1f1b_of_two_stages() -> None:
    assert words(early([2, 1], 0, 3)) == "F0 SEND_F0 RECV_B0 RECV_B1 F1 SEND_F1 B0 RECV_B2 F2 SEND_F2 B1 B2"
    assert words(early([2, 1], 1, 3)) == "RECV_F0 RECV_F1 F0 B0 SEND_B0 RECV_F2 F1 B1 SEND_B1 F2 B2 SEND_B2"
    first, second = agreed([2, 1], 3)
    assert words(first) == "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 F2 SEND_F2 RECV_B1 B1 RECV_B2 B2"
    assert words(second) == "RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 RECV_F2 B1 SEND_B1 F2 B2 SEND_B2"
    ranks = range(2)
    assert ends_one_by_one([items(order, s, ranks) for s, order in enumerate((first, second))])
    assert not ends_one_by_one([items(early([2, 1], s, 3), s, ranks) for s in range(2)])


@given(depths_and_count())
def test_the_agreed_order_is_never_sooner_than_the_early_one_and_ends_one_by_one(case: tuple[list[int | None], int]) -> None:
    depths, m = case
    orders = agreed(depths, m)
    assert ends_one_by_one([items(order, s, range(len(depths))) for s, order in enumerate(orders)])
    for s, order in enumerate(orders):
        soonest = early(depths, s, m)
        assert Counter(order) == Counter(soonest)
        assert [step for step in order if step.kind in "FB"] == [step for step in soonest if step.kind in "FB"]
        computed = [dict(zip(o, accumulate(step.kind in "FB" for step in o), strict=True)) for o in (order, soonest)]
        for step in order:
            if step.kind.startswith("RECV"):
                assert computed[0][step] >= computed[1][step]
            elif step.kind.startswith("SEND"):
                assert order.index(step) > order.index(Step("F" if step.kind == "SEND_F" else "B", step.microbatch))
        made = [i for i, step in enumerate(order) if step.kind == "F"]
        left = [i for i, step in enumerate(order) if step.kind == "SEND_F"]
        for now, before in zip(made[FORWARD_ONLY:], left, strict=False) if depths[s] is None else ():
            assert before < now, "no more than FORWARD_ONLY outputs are waiting"


def test_a_first_stage_without_a_backward_only_sends() -> None:
    assert words(early([None, 1], 0, 3)) == "F0 SEND_F0 F1 SEND_F1 F2 SEND_F2"
    assert words(early([None, 1], 1, 3)) == "RECV_F0 RECV_F1 F0 B0 RECV_F2 F1 B1 F2 B2"
    first, second = agreed([None, 1], 4)
    assert words(first) == "F0 SEND_F0 F1 SEND_F1 F2 F3 SEND_F2 SEND_F3"
    assert words(second) == "RECV_F0 F0 RECV_F1 B0 RECV_F2 F1 B1 RECV_F3 F2 B2 F3 B3"


@st.composite
def replicas(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[int], int]], int]:
    """(layers, (cuts, depths, micro-batches) of each replica, first layers that are frozen)"""
    layers, rows = draw(st.integers(1, 6)), []
    for _ in range(draw(st.integers(1, 3))):
        stages = draw(st.integers(1, layers))
        bounds = [0, *sorted(draw(st.permutations(range(1, layers)))[: stages - 1]), layers]
        m = draw(st.integers(1, 5))
        depths = sorted(draw(st.lists(st.integers(1, m), min_size=stages, max_size=stages)), reverse=True)
        rows.append(([b - a for a, b in pairwise(bounds)], depths, m))
    return layers, rows, draw(st.integers(0, layers - 1) | st.just(0))


@given(replicas(), st.booleans())
def test_transfers_and_sums_of_gradients_together_end_one_by_one(
    case: tuple[int, list[tuple[list[int], list[int], int]], int], tied: bool
) -> None:
    """Sums are launched within the last backward, from the last layer to the first; of tied parameters, at the very end. Of a
    stage without a backward there are none."""
    layers, rows, frozen = case
    tied = tied and not frozen
    plan = make_plan([{"cuts": cuts, "sizes": [1] * m, "warmup": depths} for cuts, depths, m in rows])
    rank_of = {device: rank for rank, device in enumerate(plan.device_ids)}
    groups = plan_groups(plan, rank_of, {"w": sorted({0, layers - 1})} if tied else {})

    def trains(name: str) -> bool:
        return name.startswith("tied") or int(name.split(",")[0].split(":")[1]) > frozen

    lists: list[list[Item]] = [[] for _ in rank_of]
    for (_, depths, m), replica in zip(rows, plan.replicas, strict=True):
        ranks = [rank_of[stage.device] for stage in replica.stages]
        ends = [stage.layers[1] for stage in replica.stages]
        every = [None if end <= frozen else depth for depth, end in zip(depths, ends, strict=True)]
        for s, order in enumerate(agreed(every, m)):
            own = items(order, s, ranks)
            if every[s] is None:
                lists[ranks[s]] = own
                continue
            own_groups = [(name, members) for name, members in groups if ranks[s] in members and trains(name)]
            sums = [(name, tuple(sorted(set(members))), "sum") for name, members in own_groups]
            last = own.index((f"B{m - 1}", (ranks[s],), "")) + 1
            own[last:last] = [item for item in sums if not item[0].startswith("tied")]
            lists[ranks[s]] = own + [item for item in sums if item[0].startswith("tied")]
    assert ends_one_by_one(lists)
