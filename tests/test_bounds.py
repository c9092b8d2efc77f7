from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.schedule import ScheduleName
from hetpipe.partitioners import auto
from hetpipe.planning.bounds import best_seconds_per_sample, fluid_bound, fluid_price
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.shares import proportional_shares
from hetpipe.predict.simulator import simulate
from tests.support.strategies import make_cluster, make_problem, make_profile, problems


def test_two_unequal_devices() -> None:
    """12 samples at 6 s and 12 s a sample: 8 and 4, both 48 s."""
    profile = make_profile({"a": [1.0, 1.0], "b": [2.0, 2.0]})
    assert fluid_bound(make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 12)) == pytest.approx(48.0)


def test_layers_go_where_they_are_relatively_cheap() -> None:
    """a does only layer 0 and b only layer 1, 3 s a sample each, though a alone would need 3 + 30."""
    profile = make_profile({"a": [1.0, 10.0], "b": [10.0, 1.0]})
    assert fluid_bound(make_problem(make_cluster([{"a": 1, "b": 1}]), profile, 10)) == pytest.approx(30.0)


def test_the_optimizer_counts_once_per_layer() -> None:
    profile = make_profile({"a": [1.0, 1.0]}, optimizer=0.5)
    assert fluid_bound(make_problem(make_cluster([{"a": 1}]), profile, 2)) == pytest.approx(2 * 6 + 1)
    assert fluid_bound(make_problem(make_cluster([{"a": 2}]), profile, 2)) == pytest.approx((2 * 6 + 1) / 2)


def test_the_best_measured_size_counts() -> None:
    """Half of the time is fixed: 3 s for one sample, 1.875 s a sample in fours."""
    profile = make_profile({"a": [1.0]}, sizes=(1, 2, 4), fixed=0.5)
    assert best_seconds_per_sample(profile.measurements[0], 8) == pytest.approx([7.5 / 4])
    assert best_seconds_per_sample(profile.measurements[0], 3) == pytest.approx([3.0 * 2.0 / 3])
    assert fluid_bound(make_problem(make_cluster([{"a": 1}]), profile, 8)) == pytest.approx(15.0)


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> Plan:
    """Any plan for the problem, whether or not it fits: shuffled devices, random cuts, shares, recompute,
    depths."""
    batch, L = problem.global_batch, len(problem.profile.layers)
    ids = draw(st.permutations([device.id for device in problem.cluster.devices]))
    largest = min(problem.profile.measurement(d.type).microbatch_sizes[-1] for d in problem.cluster.devices)
    R = draw(st.integers(1, min(len(ids), batch)))
    samples = [1 + extra for extra in proportional_shares([draw(st.floats(0.1, 1)) for _ in range(R)], batch - R)]
    replicas = []
    for r in range(R):
        line = ids[r::R][: draw(st.integers(1, L))]
        cuts = sorted(draw(st.permutations(range(1, L)))[: len(line) - 1])
        b = draw(st.integers(1, largest))
        sizes = (b,) * (samples[r] // b) + ((samples[r] % b,) if samples[r] % b else ())
        stages = tuple(
            StagePlan(layers=ends, devices=(device,), recompute=draw(st.booleans()))
            for ends, device in zip(zip((0, *cuts), (*cuts, L), strict=True), line, strict=True)
        )
        replicas.append(ReplicaPlan(microbatch_sizes=sizes, stages=stages))
    schedule: ScheduleName = draw(st.sampled_from(["gpipe", "1f1b"]))
    return Plan(model="test", global_batch=batch, schedule=schedule, replicas=tuple(replicas))


@settings(max_examples=150)
@given(st.data())
def test_no_plan_beats_it(data: st.DataObject) -> None:
    problem = data.draw(problems(most_devices=5, most_layers=6, most_batch=12))
    plan = data.draw(plans(problem))
    timeline = simulate(plan, problem.profile, problem.cluster)
    assert fluid_bound(problem) <= timeline.step_seconds * (1 + 1e-12)


@given(st.integers(1, 4), st.integers(1, 30))
def test_more_devices_divide_it(count: int, batch: int) -> None:
    profile = make_profile({"a": [1.0, 2.0, 3.0]})
    one = fluid_bound(make_problem(make_cluster([{"a": 1}]), profile, batch))
    assert fluid_bound(make_problem(make_cluster([{"a": count}]), profile, batch)) == pytest.approx(one / count)
    assert np.isclose(one, 18 * batch)


class TestPrice:
    def test_the_cheaper_type_as_far_as_the_deadline_leaves_room(self) -> None:
        """10 samples, 3 s on a for 4 an hour, 6 s on b for 1: all on b takes 60 s and costs 60. Within 24 s, b does 4 samples
        (24 s, 24) and a six (18 s, 72)."""
        profile = make_profile({"a": [1.0], "b": [2.0]})
        problem = make_problem(make_cluster([{"a": 1, "b": 1}], price={"a": 4.0, "b": 1.0}), profile, 10)
        assert fluid_price(problem, 60.0) == pytest.approx(60.0)
        assert fluid_price(problem, 24.0) == pytest.approx(24.0 + 72.0)

    def test_more_devices_of_a_type_cost_the_same_work(self) -> None:
        profile = make_profile({"a": [1.0]}, optimizer=0.5)
        cluster = make_cluster([{"a": 4}], price={"a": 2.0})
        assert fluid_price(make_problem(cluster, profile, 10), 100.0) == pytest.approx(2 * (30 + 0.5))

    @given(problems(most_devices=3, most_layers=4, most_batch=4))
    @settings(max_examples=30)
    def test_no_plan_in_time_is_cheaper(self, problem: Problem) -> None:
        problem = replace(problem, deadline_seconds_per_step=2 * fluid_bound(problem))
        try:
            plan = auto.partitioner(problem).plan
        except PartitionError:
            return
        step = simulate(plan, problem.profile, problem.cluster).step_seconds
        price = sum(problem.cluster.type_of(device).price_per_hour for device in plan.device_ids)
        assert problem.deadline_seconds_per_step is not None
        assert fluid_price(problem, problem.deadline_seconds_per_step) <= price * step * (1 + 1e-9)


def test_no_stage_can_be_put_anywhere() -> None:
    """Measured on pairs of devices only, and no node has two."""
    document = make_profile({"a": [1.0]}).model_dump()
    document["measurements"][0]["tensor_parallel"] = 2
    profile = type(make_profile({"a": [1.0]})).parse(document, "profile")
    assert fluid_bound(make_problem(make_cluster([{"a": 1}, {"a": 1}]), profile, 2)) == np.inf
