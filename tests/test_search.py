"""The planner of `search`: its bound holds, and its plans are what it says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster, RuntimeOverhead
from hetpipe.documents.options import EffortChoice
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.bound.lower import Lower, least_sum
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.pipelines import line_cuts
from hetpipe.partitioners.search import assembly
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.partitioners.search.floor import simple_plans
from hetpipe.partitioners.search.planner import Planner
from hetpipe.partitioners.stage_kinds.limit import PER_SECOND, Limit
from hetpipe.partitioners.stage_kinds.plan_class import microbatch_sizes, require_stage_kinds
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import make_plan
from hetpipe.predict.compiled import Compiled
from tests.support.plans import ROUNDING, checked
from tests.support.strategies import UNHURRIED, crowds, make_cluster, make_problem, make_profile, problems

SMALL = st.booleans().flatmap(lambda split: problems(most_devices=4, most_layers=5, tensor_parallel=split))


def searchable(problem: Problem) -> bool:
    """Whether it is for the planner of `search`."""
    try:
        require_stage_kinds(problem)
        microbatch_sizes(problem)
    except (PartitionError, InputError):
        return False
    return problem.backend == "torch" and problem.deadline_seconds_per_step is None


@settings(max_examples=30, **UNHURRIED)
@given(problem=SMALL.filter(searchable))
def test_no_plan_is_below_the_bound(problem: Problem) -> None:
    """Of all plans there are, where they can be listed; and it is tried to rule out more than that."""
    try:
        best = checked(problem, Exhaustive()(problem).plan).step_seconds
    except PartitionError:
        return
    assert Lower(Types(problem), fluid_bound(problem)).run(1.5 * best, 100_000_000) <= best * ROUNDING


def test_the_seconds_of_actions_count_once() -> None:
    """One layer on one device, one micro-batch: 1 s, 2 s, and 0.01 s for each of both."""
    cluster = make_cluster([{"a": 1}]).model_copy(update={"runtime_overhead": RuntimeOverhead(action_seconds=0.01)})
    problem = make_problem(cluster, make_profile({"a": [1.0]}, sizes=(1,)), 1)
    step = checked(problem, Exhaustive()(problem).plan).step_seconds
    assert step == pytest.approx(3.02)
    assert 0.99 * step < Lower(Types(problem), fluid_bound(problem)).run(1.5 * step, 1e7) <= step * ROUNDING


def test_effort_that_ends_says_nothing_of_what_is_possible() -> None:
    """The T at which it ended was taken as one that can be reached, and no more was tried than that."""
    layer = {"parameter_bytes": 4_000_000, "output_bytes_per_sample": 10_000}
    profile = make_profile({"a": [0.1] * 8, "b": [0.25] * 8}, (1, 2, 4), layer)
    problem = make_problem(make_cluster([{"a": 2}, {"b": 2}] * 4, link={"bandwidth": 1e6, "latency": 0.0}), profile, 64)
    step = min(checked(problem, plan).step_seconds for plan in simple_plans(problem))
    lower, again = (Lower(Types(problem), fluid_bound(problem)) for _ in range(2))
    for effort in np.geomspace(1e3, 1e5, 20):
        lower.run(math.inf, effort)
    assert lower.run(step, 1e8) == pytest.approx(again.run(step, 1e8), rel=0.01)


@pytest.mark.thorough
@settings(max_examples=10, **UNHURRIED)
@given(problem=crowds(24).filter(searchable))
def test_no_plan_of_many_devices_is_below_the_bound(problem: Problem) -> None:
    steps = [checked(problem, plan).step_seconds for plan in simple_plans(problem)]
    assume(steps)
    planner = Planner(problem)
    plan = planner.run()
    if plan is not None:
        steps.append(checked(problem, plan).step_seconds)
    assert Lower(Types(problem), fluid_bound(problem)).run(2 * min(steps), 100_000_000) <= min(steps) * ROUNDING


@settings(max_examples=20, **UNHURRIED)
@given(problem=st.one_of(SMALL, problems(most_devices=7, tensor_parallel=True), crowds(20, prices=True)).filter(searchable))
def test_plans_fit_and_take_what_is_said(problem: Problem) -> None:
    try:
        planner = Planner(problem)
    except InputError:  # no link
        return
    plan = planner.run()
    if plan is None:
        assert planner.assembly.step == math.inf
        return
    assert checked(problem, plan).step_seconds == pytest.approx(planner.assembly.step, rel=1e-12)
    assert planner.lower.bound <= planner.assembly.step * ROUNDING
    most, prices = (problem.max_price_per_hour, [problem.cluster.type_of(x).price_per_hour for x in plan.device_ids])
    assert most is None or sum(prices) <= most * ROUNDING
    again = Planner(problem)
    assert again.run() == plan
    assert again.lower.bound == planner.lower.bound


@given(st.data())
def test_the_least_sum_of_a_convex_hull(data: st.DataObject) -> None:
    """No numbers of samples with the batch as their sum cost less."""
    points = data.draw(st.integers(1, 5))
    samples = np.cumsum([data.draw(st.integers(1, 4)) for _ in range(points)])
    costs = np.cumsum([data.draw(st.integers(0, 5)) for _ in range(points)]).astype(float)
    low = data.draw(st.integers(1, 4))
    high, batch = low + data.draw(st.integers(0, 2)), data.draw(st.integers(low, 16))
    found, R, on = least_sum(samples, costs, batch, low, high, exact=True)
    least = math.inf
    for count in range(low, high + 1):
        reached = {0: 0.0}
        for _ in range(count):
            after = dict[int, float]()
            for done, cost in reached.items():
                for n, more in zip(samples.tolist(), costs.tolist(), strict=True):
                    after[done + n] = min(after.get(done + n, math.inf), cost + more)
            reached = after
        least = min([least, *(cost for done, cost in reached.items() if done >= batch)])
    assert found <= least * ROUNDING + 1e-9
    assert low <= R <= high
    assert math.isinf(found) or on


def test_slow_links_make_few_long_pipelines() -> None:
    """Gradient sums of many replicas would take longer than all else."""
    profile = make_profile({"a": [0.1] * 16}, (1, 2), {"parameter_bytes": 10**6, "output_bytes_per_sample": 10})
    link = {"bandwidth": 1e6, "latency": 0.0}
    problem = make_problem(make_cluster([{"a": 1}] * 16, link=link, inside=link), profile, 64)
    plan = Planner(problem).run()
    assert plan is not None
    assert len(plan.replicas) == 1


def test_all_but_a_node_stay_idle() -> None:
    """An output takes 70 ms from node to node and a layer's gradients seven seconds; the two c of a node hold all layers."""
    profile = make_profile(
        {"a": [4e-3] * 34, "b": [7e-3] * 34, "c": [7e-4] * 34},
        (1, 2, 4, 8),
        {"parameter_bytes": 800_000_000, "output_bytes_per_sample": 8_400_000},
    )
    cluster = make_cluster(
        [{"a": 2}] * 17 + [{"b": 4}] * 17 + [{"c": 2}] * 13,
        memory={"a": 15 * 10**9, "b": 22 * 10**9, "c": 90 * 10**9},
        link={"bandwidth": 1.2e8, "latency": 0.0},
        inside={"bandwidth": 3e10, "latency": 0.0},
    )
    problem = make_problem(cluster, profile, 1024)
    plan = Planner(problem).run()
    assert plan is not None
    assert [problem.cluster.device(x).type for x in plan.device_ids] == ["c", "c"]
    assert len({problem.cluster.device(x).node for x in plan.device_ids}) == 1


def test_there_is_a_plan_however_little_may_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where adapters are shared; the best of the last is."""
    monkeypatch.setattr(assembly, "TASKS", 0)
    profile = make_profile({"a": [0.1] * 8}, (1, 2), {"parameter_bytes": 10**5, "output_bytes_per_sample": 1000})
    problem = make_problem(make_cluster([{"a": 4}] * 3, link={"bandwidth": 1e5, "latency": 0.0}), profile, 32)
    planner = Planner(problem)
    plan = planner.run()
    assert plan is not None
    assert planner.assembly.budget.left < 0
    assert checked(problem, plan).step_seconds == pytest.approx(planner.assembly.step, rel=1e-12)


def test_replica_counts_that_leave_no_device_idle_are_promising() -> None:
    """A ladder of numbers a fifth apart would miss them: 29 and 35, 60 and 72."""
    profile = make_profile({"a": [0.1] * 4}, (1, 2), {"parameter_bytes": 10**5, "output_bytes_per_sample": 1000})
    problem = make_problem(make_cluster([{"a": 8}] * 8), profile, 128)
    assert {16, 32, 64} <= set(Planner(problem).promising())


def test_slow_devices_stay_out() -> None:
    """They would hold up any pipeline that they are in, and replicas of their own are not worth the sums."""
    profile = make_profile({"a": [0.1] * 8, "b": [30.0] * 8}, (1,), {"parameter_bytes": 10**6, "output_bytes_per_sample": 10})
    problem = make_problem(make_cluster([{"a": 4}, {"b": 4}]), profile, 16)
    plan = Planner(problem).run()
    assert plan is not None
    assert {problem.cluster.device(x).type for x in plan.device_ids} == {"a"}


BERT = Path(__file__).resolve().parent.parent / "configs" / "bert-large"


@pytest.mark.parametrize("deadline", [None, 3_600.0])
def test_a_large_prime_batch_has_a_plan_near_its_bound(monkeypatch: pytest.MonkeyPatch, deadline: float | None) -> None:
    """In seconds: to the joint search every number of samples that a replica could get is a pipeline of its own."""
    refused = lambda *_, **__: pytest.fail("it looks at each number of samples")  # noqa: E731
    monkeypatch.setattr("hetpipe.partitioners.auto.ExactSearch", refused)
    cluster = Cluster.load(BERT / "cluster.yaml")
    types = {kind: own.model_copy(update={"price_per_hour": 1.0}) for kind, own in cluster.device_types.items()}
    cluster = cluster.model_copy(update={"device_types": types})
    plan = make_plan(Profile.load(BERT / "profile.json"), cluster, 100_003, deadline_seconds_per_step=deadline)
    assert sum(replica.samples for replica in plan.replicas) == plan.global_batch == 100_003
    assert plan.predicted is not None
    assert plan.predicted.lower_bound_seconds is not None
    assert plan.predicted.step_seconds < 1.01 * plan.predicted.lower_bound_seconds


def test_a_pipeline_without_a_link_is_not_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its micro-batches was, since what is infinite never repeats itself."""
    monkeypatch.setattr(line_cuts, "about", lambda *_: pytest.fail("it was followed"))
    times, sums, none = np.ones((2, 1, 3)), np.zeros((1, 3, 3)), np.zeros(2, np.int64)
    sent = np.full((2, 1, 1, 2, 3), np.inf)
    loaded = line_cuts.Loaded(times.cumsum(axis=2), times.cumsum(axis=2), sent, np.full((1, 1, 2), np.inf), 1, 10, 0)
    line, inside, ends = np.zeros(2, np.int64), np.zeros(1, np.bool_), np.arange(3)
    waits = line_cuts.Waits(sums, ends, ends)
    fixed = line_cuts.Fixed(sums, np.ones(1), sums, 0.0, False, False, True, 0)
    alone = Compiled(line_cuts.ended.function)  # type: ignore[attr-defined]  # with what `about` is now
    found = alone.by_python(line, inside, ends, none, 1, loaded, waits, fixed)
    assert found == np.inf


@pytest.mark.parametrize("seconds", [None, 1.0, 60.0])
def test_a_longer_time_limit_proves_more(monkeypatch: pytest.MonkeyPatch, seconds: float | None) -> None:
    """A limit of a minute changed nothing after the seconds that the search takes without one."""
    efforts = list[float]()

    def run(self: Lower, _: float, effort: float) -> float:
        efforts.append(effort)
        return self.bound

    monkeypatch.setattr(Lower, "run", run)
    problem = make_problem(make_cluster([{"a": 2}]), make_profile({"a": [1.0, 2.0]}), 8, time_limit_seconds=seconds)
    limit, effort = Limit.of(problem), EFFORTS["normal"]
    with Planner(problem, limit.half_over, limit.late) as found:
        found.run()
        found.prove(math.inf)
    assert efforts == [effort.before, max(effort.after, (seconds or 0.0) * PER_SECOND)]


def test_more_effort_finds_no_slower_plan_here() -> None:
    """Each with its own bound, which no plan is below."""
    layer, steps = {"parameter_bytes": 4_000_000, "output_bytes_per_sample": 10_000}, list[float]()
    profile = make_profile({"a": [0.1] * 8, "b": [0.25] * 8}, (1, 2, 4), layer)
    problem = make_problem(make_cluster([{"a": 2}, {"b": 2}] * 4, link={"bandwidth": 1e6, "latency": 0.0}), profile, 64)
    for effort in get_args(EffortChoice):
        found = Auto()(replace(problem, effort=effort))
        steps.append(checked(problem, found.plan).step_seconds)
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= min(steps)
    assert steps == sorted(steps, reverse=True)


def test_layers_that_are_free_somewhere_leave_a_bound_of_nothing() -> None:
    """Each of two layers takes no time on one of two types."""
    problem = make_problem(make_cluster([{"a": 1, "b": 1}]), make_profile({"a": [0.1, 0.0], "b": [0.0, 0.1]}), 3)
    found = Auto()(problem)
    assert checked(problem, found.plan).step_seconds == pytest.approx(checked(problem, Exhaustive()(problem).plan).step_seconds)


def test_a_middle_stage_alone_on_its_node_receives_inputs_and_gradients_over_one_adapter() -> None:
    """Three nodes of one device, each with memory for one layer. Into the middle one come 8 inputs and 8 gradients, 1 s each:
    16 s, where each boundary alone asks for 8."""
    layer = {"buffer_bytes": 10**9, "output_bytes_per_sample": 1_000_000}
    cluster = make_cluster([{"a": 1}] * 3, memory=15 * 10**8, link={"bandwidth": 1e6, "latency": 0.0})
    problem = make_problem(cluster, make_profile({"a": [0.01] * 3}, (1,), layer), 8)
    step = checked(problem, Exhaustive()(problem).plan).step_seconds
    assert 15.0 < Lower(Types(problem), fluid_bound(problem)).run(1.5 * step, 1e8) <= step * ROUNDING


@settings(max_examples=30, **UNHURRIED)
@given(data=st.data())
def test_no_plan_over_slow_adapters_is_below_the_bound(data: st.DataObject) -> None:
    """Nodes of one device, some of two; measured links and given ones; frozen layers; transfers that overlap or block."""
    problem = data.draw(SMALL.filter(searchable))
    slow: dict[str, object] = {"bandwidth": data.draw(st.sampled_from([1e4, 1e5, 1e6, 1e7])), "latency": 0.01}
    if data.draw(st.booleans()):
        slow = {"points": [[0, 0.01], [1000, 0.02], [100_000, data.draw(st.sampled_from([0.03, 0.5]))]]}
    devices = [device.type for device in problem.cluster.devices]
    apart = [{"name": f"n{i}", "devices": {kind: 1}} for i, kind in enumerate(devices)]
    given_ = problem.cluster.model_dump(mode="json", exclude_none=True) | {"nodes": apart, "link": slow, "links": []}
    profile = problem.profile.model_copy(update={"links": ()})
    problem = replace(problem, cluster=Cluster.parse(given_, "apart"), profile=profile)
    try:
        best = checked(problem, Exhaustive()(problem).plan).step_seconds
    except (PartitionError, InputError):
        return
    assert Lower(Types(problem), fluid_bound(problem)).run(1.5 * best, 20_000_000) <= best * ROUNDING
