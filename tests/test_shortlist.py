"""The search from a plan in hand, by what plans faster than a step could be made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners import _shortlist
from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._shortlist import Shortlists
from hetpipe.partitioners._stages import Stages
from hetpipe.partitioners.auto import simple_plans
from hetpipe.partitioners.chain import Chain
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.plan import Plan
from hetpipe.simulator import simulate
from tests.strategies import problems

UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


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
    @settings(max_examples=40, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6), st.data())
    def test_finds_and_proves_the_best(self, problem: Problem, data: st.DataObject) -> None:
        found, best = from_a_plan(problem, data)
        assert found.proof == "exhaustive"
        assert step(problem, found.plan) == pytest.approx(best, rel=1e-12)

    @settings(max_examples=40, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=6, tensor_parallel=True), st.data())
    def test_tensor_parallel(self, problem: Problem, data: st.DataObject) -> None:
        found, best = from_a_plan(problem, data)
        assert found.proof == "exhaustive"
        assert step(problem, found.plan) == pytest.approx(best, rel=1e-12)

    @settings(max_examples=30, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5), st.data(), st.sampled_from([1.01, 1.2]))
    def test_near_the_best(self, problem: Problem, data: st.DataObject, near: float) -> None:
        """A search that may end near the best proves how near it is."""
        found, best = from_a_plan(problem, data, near)
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= best * (1 + 1e-12)
        assert step(problem, found.plan) <= found.lower_bound_seconds * near * (1 + 1e-12)

    @settings(max_examples=30, **UNHURRIED)
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
