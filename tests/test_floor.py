"""`auto` is never slower than the simple rules: at any size, on slow links, on a busy machine."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Link
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.even_pipelines import EvenPipelines
from hetpipe.partitioners.fasop import Fasop
from hetpipe.partitioners.search.floor import cost, rules, simple_plans
from hetpipe.partitioners.stage_kinds.limit import PER_SECOND, Limit
from hetpipe.partitioners.step_times import desk
from hetpipe.partitioners.step_times.drafts import Draft
from hetpipe.partitioners.step_times.steps import Steps
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import with_prediction
from hetpipe.planning.registry import partitioner
from hetpipe.predict.simulator import simulate
from tests.support.plans import ROUNDING, checked
from tests.support.strategies import UNHURRIED, crowds, make_cluster, make_problem, make_profile

LAYER = {"parameter_bytes": 400, "output_bytes_per_sample": 50, "saved_bytes_per_sample": 30}
SLOW = {"bandwidth": 2e3, "latency": 1e-3}


def step(problem: Problem, plan: Plan) -> float:
    return simulate(plan, problem.profile, problem.cluster).step_seconds


def unlike_nodes(**options: Any) -> Problem:
    """36 a on 18 nodes and 36 b on 5, 16 layers; two nodes of either have other links inside, and all are joined by slow ones."""
    cluster = make_cluster(
        [{"a": 2}] * 18 + [{"b": 8}] * 4 + [{"b": 4}],
        memory={"a": 9_000, "b": 6_000},
        link=SLOW,
        inside={"bandwidth": 4e5, "latency": 1e-4},
    )
    other = {6: 1e5, 15: 1e5, 20: 2e6, 21: 2e6}
    nodes = [
        node.model_copy(update={"link": Link(bandwidth=other[i], latency=1e-4)}) if i in other else node
        for i, node in enumerate(cluster.nodes)
    ]
    cluster = cluster.model_copy(update={"nodes": tuple(nodes)})
    profile = make_profile({"a": [0.05] * 16, "b": [0.085] * 16}, sizes=(1, 2, 4, 8), layer=LAYER, fixed=0.3)
    return make_problem(cluster, profile, 288, **options)


def few_unlike_nodes(**options: Any) -> Problem:
    """Ten devices on six nodes; more than a second of effort."""
    cluster = make_cluster(
        [{"a": 2}, {"a": 1}, {"b": 2}, {"b": 1}, {"a": 1, "b": 1}, {"b": 2}], memory={"a": 9_000, "b": 6_000}, link=SLOW
    )
    times = [0.05, 0.07, 0.04, 0.06, 0.05, 0.08, 0.03, 0.09]
    profile = make_profile({"a": times, "b": [1.9 * t for t in times[::-1]]}, sizes=(1, 2, 4), layer=LAYER, fixed=0.3)
    return make_problem(cluster, profile, 37, **options)


class TestNeverSlower:
    @pytest.mark.thorough
    def test_seventy_two_devices_over_slow_links(self) -> None:
        """`fasop` was not tried above 32 devices: its plan takes 18.3 s, and that of `auto` took 20.0 s."""
        problem = unlike_nodes()
        solution = Auto(time_limit_seconds=1.0)(problem)
        assert checked(problem, solution.plan).step_seconds <= step(problem, Fasop()(problem).plan)
        assert solution.plan.partitioner == "auto"

    @settings(max_examples=6, **UNHURRIED)
    @given(crowds(most_devices=110))
    def test_than_any_rule(self, problem: Problem) -> None:
        steps = {}
        for rule in rules():
            try:
                steps[rule.name] = step(problem, partitioner(rule.name)(problem).plan)
            except (PartitionError, InputError):
                continue
        try:
            solution = Auto(time_limit_seconds=0.2)(problem)
        except PartitionError:
            assert not steps
            return
        assert checked(problem, solution.plan).step_seconds <= min(steps.values(), default=math.inf)
        least = solution.lower_bound_seconds
        assert least is None or least <= min(steps.values(), default=math.inf) * ROUNDING

    @pytest.mark.thorough
    @settings(max_examples=6, **UNHURRIED)
    @given(crowds(most_devices=24, prices=True), st.sampled_from([0.6, 1.0, 1.5]), st.sampled_from([None, 1.0, 1.3]))
    def test_within_limits(self, problem: Problem, part: float, slack: float | None) -> None:
        """Of the rules' plans those that keep the price and the deadline."""
        plans = list(simple_plans(problem))
        if not plans:
            return
        price = sum(problem.cluster.type_of(d).price_per_hour for d in plans[-1].device_ids)
        deadline = None if slack is None else slack * step(problem, plans[-1])
        limited = make_problem(
            problem.cluster,
            problem.profile,
            problem.global_batch,
            max_price_per_hour=part * price,
            deadline_seconds_per_step=deadline,
        )
        least = min((cost(limited, plan) for plan in plans), default=math.inf)
        if math.isfinite(least):
            found = Auto(time_limit_seconds=0.2)(limited).plan
            assert cost(limited, found) <= least * ROUNDING

    def test_a_thousand_nodes(self) -> None:
        """All rules, each node with a device of its own."""
        profile = make_profile({"a": [0.05] * 8, "b": [0.1] * 8}, sizes=(1, 2), layer=LAYER)
        problem = make_problem(make_cluster([{"a": 1}] * 600 + [{"b": 1}] * 424, link=SLOW), profile, 2048)
        *_, best = simple_plans(problem)
        checked(problem, best)

    def test_a_back_end_on_hundreds_of_nodes(self) -> None:
        """Pipelines stay within a node, of which there are more than a search tells apart: the best rule, at once."""
        profile = make_profile({"a": [0.1] * 4, "b": [0.2] * 4}, sizes=(1, 2), layer=LAYER)
        problem = make_problem(make_cluster([{"a": 1}, {"b": 2}] * 100, link=SLOW), profile, 900, backend="fairscale")
        *_, best = simple_plans(problem)
        assert step(problem, Auto()(problem).plan) == step(problem, best)


@pytest.mark.thorough
def test_a_rule_has_a_plan_however_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one draft: the first that fits; and `auto`, which looks at as few of each rule, is no slower."""
    problem, rule, looked = unlike_nodes(), Fasop(), list[float]()
    least = Steps.least

    def counting(self: Steps, draft: Draft, below: float) -> float:
        looked.append(least(self, draft, below))
        return looked[-1]

    monkeypatch.setattr(Steps, "least", counting)
    many = step(problem, rule(problem).plan)
    assert len(looked) > 1
    monkeypatch.setattr(desk, "LOOKS", 1)
    looked.clear()
    few = step(problem, rule(problem).plan)
    assert len(looked) == 1
    assert many <= few
    assert step(problem, Auto()(problem).plan) <= few


@pytest.mark.parametrize(("name", "most"), [("HUGE", 0), ("EFFORT", 0.0)])
@pytest.mark.thorough
def test_a_rule_has_a_plan_however_long_a_simulation_takes(monkeypatch: pytest.MonkeyPatch, name: str, most: float) -> None:
    """It is the one of the fewest tasks; and `auto` is no slower."""
    problem = unlike_nodes()
    least = {rule.name: step(problem, rule(problem).plan) for rule in (Fasop(), EvenPipelines())}
    monkeypatch.setattr(desk, name, most)
    few = {rule.name: step(problem, rule(problem).plan) for rule in (Fasop(), EvenPipelines())}
    assert all(least[name] <= few[name] for name in least)
    assert step(problem, Auto()(problem).plan) <= min(few.values())


class TestTime:
    def busy(self, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
        """A clock that runs so many times as fast beside the work: a machine that is as busy."""
        clock = SimpleNamespace(monotonic=lambda: times * time.monotonic())
        monkeypatch.setattr("hetpipe.partitioners.stage_kinds.limit.time", clock)

    def test_the_load_of_the_machine_decides_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Few devices are searched with a counted effort."""
        found = []
        for times in (1.0, 100.0):
            self.busy(monkeypatch, times)
            found.append(Auto(time_limit_seconds=0.2)(few_unlike_nodes()))
        assert found[0] == found[1]
        assert found[0].proof == "search-bound"

    def test_a_time_limit_is_heeded(self) -> None:
        """The first rule that has a plan is enough then."""
        tried: list[str] = []
        for problem in (unlike_nodes(time_limit_seconds=1e-9, progress=tried.append), few_unlike_nodes(time_limit_seconds=1e-9)):
            solution = Auto()(problem)
            predicted = with_prediction(solution, problem).predicted
            assert predicted is not None
            assert predicted.gap is not None
            assert predicted.gap > 0.01  # the proof says what was not looked at
            assert solution.proof != "exhaustive"
            checked(problem, solution.plan)
        assert not any("fasop" in text for text in tried)

    @pytest.mark.parametrize("checks", [0, 1, 10, 100, 1000])
    def test_who_has_waited_enough_gets_the_plan_in_hand(self, checks: int) -> None:
        """Whenever that is. (Small problems ask less often than that, and end by themselves.)"""
        for problem in (unlike_nodes(), few_unlike_nodes()):
            asked = map(checks.__le__, count())
            solution = Auto()(replace(problem, stopped=partial(next, asked)))
            step = checked(problem, solution.plan).step_seconds
            assert solution.lower_bound_seconds is not None
            assert solution.lower_bound_seconds <= step
            assert checks > 0 or solution.proof != "exhaustive"

    @pytest.mark.parametrize("counted", [False, True])
    def test_what_ends_a_search(self, monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
        """A limit of a second, by the clock or by effort."""
        clock, done = [100.0], [7.0]
        monkeypatch.setattr("hetpipe.partitioners.stage_kinds.limit.time", SimpleNamespace(monotonic=lambda: clock[0]))
        limit = Limit(1.0, (lambda: done[0] * PER_SECOND) if counted else None)
        own, other = (done, clock) if counted else (clock, done)
        other[0] += 50.0
        assert not limit.late()
        own[0] += 1.5
        assert limit.late()
        assert not limit.late(grace=1.0)


def test_progress() -> None:
    said: list[str] = []
    list(simple_plans(few_unlike_nodes(progress=said.append)))
    assert said[0] == "trying the simple rules: even-pipelines"
    assert "trying the simple rules: fasop, 3 of 5 grids" in said
