"""The search from a plan in hand, by what plans faster than a step could be made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations, product
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.partitioners import _shortlist
from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._floor import simple_plans
from hetpipe.partitioners._groupings import Bounds, Grouping
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._shortlist import Shortlists
from hetpipe.partitioners._space import Space
from hetpipe.partitioners._stages import Stages
from hetpipe.partitioners._symmetry import Symmetry
from hetpipe.partitioners.chain import Chain
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.predict.simulator import simulate
from hetpipe.spec.cluster import LinkBetween
from hetpipe.spec.plan import Plan
from tests.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems


def step(problem: Problem, plan: Plan) -> float:
    return simulate(plan, problem.profile, problem.cluster).step_seconds


def shortlists(problem: Problem) -> Shortlists:
    return Shortlists(Master(Columns(Stages(Kinds(problem)))))


def plans_in_hand(problem: Problem) -> Iterator[Plan]:
    """Plans that fit, of all sorts."""
    yield from simple_plans(problem)
    try:
        yield Chain()(problem).plan
    except PartitionError:
        return


def from_a_plan(problem: Problem, data: st.DataObject, near: float = 1.0) -> tuple[Solution, float]:
    """The search from one of several plans, and the optimum."""
    assume(problem.backend == "torch" and problem.schedule in ("auto", "1f1b", "gpipe"))
    there = list(plans_in_hand(problem))
    assume(there)
    first = data.draw(st.sampled_from(there))
    lists = shortlists(problem)
    found = Search(problem, "auto", start=[first], shortlists=lists, near=near).run()
    try:
        best = step(problem, Exhaustive(max_plans=1e12)(problem).plan)
    except PartitionError:
        best = math.inf
    return found, min(best, step(problem, first))


class TestAgainstTheOracle:
    @settings(max_examples=20, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6), st.data())
    def test_finds_and_proves_the_best(self, problem: Problem, data: st.DataObject) -> None:
        found, best = from_a_plan(problem, data)
        assert found.proof == "exhaustive"
        assert step(problem, found.plan) == pytest.approx(best, rel=1e-12)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6, tensor_parallel=True), st.data())
    def test_tensor_parallel(self, problem: Problem, data: st.DataObject) -> None:
        found, best = from_a_plan(problem, data)
        assert found.proof == "exhaustive"
        assert step(problem, found.plan) == pytest.approx(best, rel=1e-12)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5), st.data(), st.sampled_from([1.01, 1.2]))
    def test_near_the_best(self, problem: Problem, data: st.DataObject, near: float) -> None:
        """A search that may end near the best proves how near it is."""
        found, best = from_a_plan(problem, data, near)
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= best * (1 + 1e-12)
        assert step(problem, found.plan) <= found.lower_bound_seconds * near * (1 + 1e-12)

    @settings(max_examples=12, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5), st.data(), st.sampled_from([1.0, 1.1]), st.integers(0, 300))
    def test_lists_that_take_too_long(
        self, problem: Problem, data: st.DataObject, near: float, candidates: int
    ) -> None:
        """Then everything is searched, or what is proven is enough; nothing is claimed that is not."""
        with patch.object(_shortlist, "CANDIDATES", candidates):
            found, best = from_a_plan(problem, data, near)
        if near == 1.0:
            assert found.proof == "exhaustive"
            assert step(problem, found.plan) == pytest.approx(best, rel=1e-12)
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= best * (1 + 1e-12)


class TestSymmetry:
    def space(self, third: int = 2, links: tuple[LinkBetween, ...] = ()) -> Space:
        cluster = make_cluster([{"a": 2}, {"a": 2}, {"a": third}, {"b": 1}]).model_copy(update={"links": links})
        return Space(make_problem(cluster, make_profile({"a": [1.0] * 4, "b": [2.0] * 4}), 8))

    def test_blocks(self) -> None:
        """Nodes with the same devices and the same links to others."""
        assert Symmetry(self.space()).blocks == ((0, 1, 2),)
        assert Symmetry(self.space(third=1)).blocks == ((0, 1),)
        slow = LinkBetween(between=("n1", "n3"), bandwidth=1.0, latency=1.0)
        assert Symmetry(self.space(links=(slow,))).blocks == ((0, 2),)

    def test_the_first_of_a_composition(self) -> None:
        symmetry = Symmetry(self.space())
        assert symmetry.turned((2, 0, 1, 1)) == ((0, 1, 2, 1), (2, 0, 1, 3))
        assert symmetry.turned((0, 1, 2, 1)) == ((0, 1, 2, 1), (0, 1, 2, 3))

    @settings(max_examples=30, **UNHURRIED)
    @given(st.lists(st.sampled_from([{"a": 1}, {"a": 2}, {"a": 1, "b": 1}]), min_size=1, max_size=3), st.integers(1, 6))
    def test_one_grouping_of_each_sort(self, nodes: list[dict[str, int]], batch: int) -> None:
        """Every grouping is one of those listed, but for an exchange of nodes."""
        space = Space(make_problem(make_cluster(nodes), make_profile({"a": [1.0] * 3, "b": [2.0] * 3}), batch))
        bounds = Bounds(space)
        found = {sort(bounds.symmetry, grouping) for grouping in bounds.groupings(1e3)}
        bounds.symmetry.blocks = ()
        every = list(bounds.groupings(1e3))
        assert found == {sort(Symmetry(space), grouping) for grouping in every}


def sort(symmetry: Symmetry, grouping: Grouping) -> Grouping:
    """The same for groupings that an exchange of nodes makes the same: the least of all."""
    found = []
    for order in product(*(permutations(block) for block in symmetry.blocks)):
        to = list(range(symmetry.space.K))
        for block, new in zip(symmetry.blocks, order, strict=True):
            for a, b in zip(block, new, strict=True):
                for k, j in zip(symmetry.kinds[a], symmetry.kinds[b], strict=True):
                    to[k] = j
        found.append(tuple(sorted(tuple(c[k] for k in to) for c in grouping)))
    return min(found)


def test_what_a_shortlist_leaves_out() -> None:
    """Two devices of a second per sample and one of two: 10 samples take 4 s, in replicas of 4, 4 and 2."""
    problem = make_problem(make_cluster([{"a": 2, "b": 1}]), make_profile({"a": [1.0], "b": [2.0]}, sizes=(1,)), 10)
    lists = shortlists(problem)
    step = lists.master.columns.stages.work[0, 0, 0, 1]
    assert lists.below(3.9 * step, lambda: False) == {}
    listed = lists.below(4.1 * step, lambda: False)
    assert listed is not None
    assert {R: part.samples for R, part in listed.items()} == {3: {(1, 0): (4, 4), (0, 1): (2, 2)}}
    assert lists.below(4.1 * step, lambda: True) is None


def test_simple_plans_end_in_time() -> None:
    """Of those that fit the first is made, however late it is: data parallel, whose sums are slow here."""
    profile = make_profile({"a": [1.0] * 8, "b": [3.0] * 8}, layer={"parameter_bytes": 1000})
    cluster = make_cluster([{"a": 2}, {"b": 2}], link={"bandwidth": 100.0, "latency": 0.0})
    problem = make_problem(cluster, profile, 16)
    assert len(list(simple_plans(problem, late=lambda: True))) == 1
    assert len(list(simple_plans(problem))) > 1
    assert not list(simple_plans(problem, below=1e-6))


def test_types_measured_at_different_sizes() -> None:
    """Two samples as one micro-batch on b, whose next measured size is 3, while a's is 2: 3 s; one after the other, 6 s."""
    profile = make_profile({"a": [10.0], "b": [1.0]}, sizes=(1, 2), fixed=1.0)
    a, b = profile.measurements
    profile = profile.model_copy(
        update={"measurements": (a, b.model_copy(update={"microbatch_sizes": (1, 3)}))}
    )
    problem = make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 2)
    best = Exhaustive()(problem).plan
    (replica,) = best.replicas
    first = best.model_copy(update={"replicas": (replica.model_copy(update={"microbatch_sizes": (1, 1)}),)})
    found = Search(problem, "auto", start=[first], shortlists=shortlists(problem)).run()
    assert [step(problem, plan) for plan in (first, best, found.plan)] == [6.0, 3.0, 3.0]
