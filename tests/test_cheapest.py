from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.partitioners import uneven_data_parallel
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.search import cheapest
from hetpipe.partitioners.search.cheapest import Cheapest, Subset, spread
from hetpipe.partitioners.search.floor import cost
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import PartitionError, Problem, Solution, no_plan_in_time
from hetpipe.planning.planner import make_plan, with_prediction
from hetpipe.predict.simulator import simulate
from tests.support.strategies import make_cluster, make_problem, make_profile

PRICE = {"a": 2.0, "b": 1.2}
PROFILE = make_profile({"a": [1.0] * 3, "b": [1.5] * 3}, sizes=(1, 2), layer={"parameter_bytes": 10**6})
NODES = [{"a": 2}, {"b": 2}, {"a": 2}]


def every_device(problem: Problem) -> Solution:
    """A planner of subsets: the whole model on every device."""
    return uneven_data_parallel.partitioner(problem)


def cluster(counts: dict[str, int]) -> Cluster:
    nodes = [{kind: 1} for kind, count in counts.items() for _ in range(count)]
    return make_cluster(nodes, price=PRICE)


def brute(batch: int, deadline: float) -> float:
    """The least price per hour × seconds over all subsets, planned in the same way."""
    best = math.inf
    for a, b in product(range(5), range(3)):
        if a + b:
            problem = make_problem(cluster({"a": a, "b": b}), PROFILE, batch)
            plan = every_device(problem).plan
            step = simulate(plan, PROFILE, problem.cluster).step_seconds
            used = sum(problem.cluster.type_of(d).price_per_hour for d in plan.device_ids)
            if step <= deadline:
                best = min(best, step * used)
    return best


@pytest.mark.parametrize("deadline", [30.0, 60.0, 200.0])
def test_finds_the_cheapest_subset(deadline: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheapest, "GOOD_PRICE", 1.0)
    problem = make_problem(make_cluster(NODES, price=PRICE), PROFILE, 13, deadline_seconds_per_step=deadline)
    found = with_prediction(Cheapest(problem, every_device).run(), problem).predicted
    assert found is not None
    assert found.step_seconds <= deadline
    assert found.step_seconds * found.price_per_hour == pytest.approx(brute(13, deadline))
    assert found.lower_bound_price_per_million_samples is not None
    assert found.lower_bound_price_per_million_samples <= found.price_per_million_samples
    assert found.gap == pytest.approx(found.price_per_million_samples / found.lower_bound_price_per_million_samples - 1)


def test_a_price_per_hour_holds_too() -> None:
    options = {"deadline_seconds_per_step": 100.0, "max_price_per_hour": 3.0}
    problem = make_problem(make_cluster(NODES, price=PRICE), PROFILE, 13, **options)
    found = with_prediction(Cheapest(problem, every_device).run(), problem).predicted
    assert found is not None
    assert found.price_per_hour <= 3.0


def test_what_cannot_be_says_so() -> None:
    machines = make_cluster(NODES, price=PRICE)
    late = make_problem(machines, PROFILE, 13, deadline_seconds_per_step=5.0)
    with pytest.raises(PartitionError, match="no plan has a step of at most 5.0 s: on all devices it takes at least 21.9"):
        Cheapest(late, every_device).run()
    tight = make_problem(machines, PROFILE, 13, deadline_seconds_per_step=22.0)
    with pytest.raises(PartitionError, match="was found; the fastest found takes .* s, and none can take less than 21.9"):
        Cheapest(tight, every_device).run()

    def never(problem: Problem) -> Solution:
        raise PartitionError("too slow", out_of_time=True)

    with pytest.raises(PartitionError, match="no plan was found within the time limit of 7 s"):
        Cheapest(replace(late_but_possible(), time_limit_seconds=7), never).run()

    def full(problem: Problem) -> Solution:
        raise PartitionError("no room")

    with pytest.raises(PartitionError, match="no room"):
        Cheapest(late_but_possible(), full).run()


def late_but_possible() -> Problem:
    return make_problem(make_cluster(NODES, price=PRICE), PROFILE, 13, deadline_seconds_per_step=50.0)


def test_nodes_of_two_types_are_taken_whole() -> None:
    machines = make_cluster([{"a": 1, "b": 2}, {"a": 3}], price=PRICE)
    search = Cheapest(make_problem(machines, PROFILE, 13, deadline_seconds_per_step=50.0), every_device)
    assert list(search.counts()) == [(0, 1), (0, 2), (0, 3), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert [d.id for d in search.subset((3, 2)).problem.cluster.devices] == ["n0/0", "n0/1", "n0/2", "n1/0", "n1/1"]


def test_many_counts_are_thinned() -> None:
    machines = make_cluster([{"a": 64}, {"b": 64}], price=PRICE)
    found = list(Cheapest(make_problem(machines, PROFILE, 13, deadline_seconds_per_step=50.0), every_device).counts())
    assert 150 < len(found) <= cheapest.SUBSETS
    assert (64, 64) in found


@given(groups=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), min_size=1, max_size=14))
def test_any_counts_are_thinned(groups: list[tuple[str, int]]) -> None:
    """Nodes of any sizes, which are as many groups: at most so many subsets, each another, of a few nodes all there are."""
    machines = make_cluster([{kind: 1 + i} for i, (kind, _) in enumerate(groups) for _ in range(groups[i][1])], price=PRICE)
    search = Cheapest(make_problem(machines, PROFILE, 13, deadline_seconds_per_step=50.0), every_device)
    found, every = list(search.counts()), [search.sizes(group) for group in search.groups]
    assert 0 < len(set(found)) == len(found) <= cheapest.SUBSETS
    assert all(any(counts) and all(c in own for c, own in zip(counts, every, strict=True)) for counts in found)
    assert tuple(own[-1] for own in every) in found


def test_spread() -> None:
    items = [Subset((i,), None, float(i), 0.0) for i in range(8)]  # type: ignore[arg-type]
    assert [s.counts[0] for s in spread(items)] == [0, 4, 2, 6, 1, 5, 3, 7]


def test_auto_uses_it_above_the_exact_search() -> None:
    """18 devices, one of which would do in time; more of them only have more to sum."""
    machines = make_cluster([{"a": 6}] * 3, price=PRICE)
    heavy = make_profile({"a": [1.0] * 3}, sizes=(1, 2), layer={"parameter_bytes": 10**9})
    plan = make_plan(heavy, machines, 36, deadline_seconds_per_step=1000.0, time_limit_seconds=20.0)
    assert plan.predicted is not None
    assert (plan.partitioner, len(plan.device_ids)) == ("auto", 1)
    assert plan.predicted.gap == pytest.approx(0.0)
    assert plan.predicted.proof == "fluid"


@pytest.mark.thorough
@pytest.mark.parametrize("counts", [{"a": 5, "b": 7}, {"a": 16}])
def test_on_few_devices_the_exact_search_starts_from_it(monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]) -> None:
    """Too many plans to look at all of them, or none at all: the cheapest subset that was found is the answer at least."""
    profile = make_profile({"a": [1.0] * 4, "b": [1.5] * 4}, layer={"parameter_bytes": 10**7})
    problem = make_problem(cluster(counts), profile, 20, deadline_seconds_per_step=50.0)
    auto = Auto(time_limit_seconds=0.1)
    least = cost(problem, Cheapest(problem, auto.quickly).run().plan)
    assert cost(problem, auto(problem).plan) <= least

    def nothing(*_: object) -> Solution:
        raise no_plan_in_time(problem)

    monkeypatch.setattr("hetpipe.partitioners.auto.ExactSearch.run", nothing)
    assert cost(problem, auto(problem).plan) == least
    if len(counts) == 1:  # whose fluid bound a plan reaches
        return
    with pytest.raises(PartitionError, match=r"was found; the fastest found takes .* none can take less than"):
        auto(replace(problem, deadline_seconds_per_step=fluid_bound(problem) * 1.001))
