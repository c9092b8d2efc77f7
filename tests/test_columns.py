"""The counted planner for large clusters, forced on small ones, where the oracle knows the optimum."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings

from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners._classes import Classes
from hetpipe.partitioners._columns import Columns, grid_of
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._relaxed import Relaxed
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.simulator import simulate
from tests.strategies import make_cluster, make_problem, make_profile, problems

UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def checked(problem: Problem, solution: Solution) -> float:
    """The step of a plan that fits and does the whole batch."""
    plan = solution.plan
    plan.check(cluster=problem.cluster, profile=problem.profile, global_batch=problem.global_batch)
    timeline = simulate(plan, problem.profile, problem.cluster)
    for device, peak in timeline.peak_bytes.items():
        assert peak <= problem.cluster.type_of(device).memory * (1 - problem.memory_reserve)
    return timeline.step_seconds


class TestAgainstTheOracle:
    @settings(max_examples=15, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5))
    def test_bound_optimum_plan(self, problem: Problem) -> None:
        assume(problem.backend == "torch")
        try:
            best = checked(problem, Exhaustive()(problem))
        except PartitionError:
            with pytest.raises(PartitionError):
                Large(problem, "auto").run()
            return
        solution = Large(problem, "auto").run()
        assert solution.lower_bound_seconds is not None
        assert solution.lower_bound_seconds <= best * (1 + 1e-9)
        assert checked(problem, solution) >= best * (1 - 1e-9)

    @settings(max_examples=15, **UNHURRIED)
    @given(problems(most_devices=4, most_layers=5))
    def test_long_pipelines_are_bounded_too(self, problem: Problem) -> None:
        """Compositions of one device only: all others are covered by the relaxed columns."""
        assume(problem.backend == "torch")
        try:
            solution = Exhaustive()(problem)
        except PartitionError:
            return
        best, plan = checked(problem, solution), solution.plan
        b, R = max(max(r.microbatch_sizes) for r in plan.replicas), len(plan.replicas)
        assume(
            all(b in problem.profile.measurement(d.type).microbatch_sizes for d in problem.cluster.devices)
        )
        space, need = Classes(problem), problem.global_batch // b
        columns, relaxed = Columns(space, b, [1], 1), Relaxed(space, b, grid_of(need, 2.0), 1)
        assert Master(columns, relaxed).solve(best * (1 + 1e-9), R, R).possible


def mixed(copies: int, batch: int) -> Problem:
    """So many pairs of nodes, of two fast and of four slow devices; free links."""
    cluster = make_cluster([{"a": 2}, {"b": 4}] * copies, memory={"a": 9_000, "b": 5_000},
                           link={"bandwidth": 1e12, "latency": 0.0})  # fmt: skip
    times = [0.02, 0.03, 0.05, 0.04, 0.06, 0.03]
    layer = {"parameter_bytes": 400, "output_bytes_per_sample": 50, "saved_bytes_per_sample": 300}
    profile = make_profile({"a": times, "b": [2.3 * t for t in times]}, sizes=(1, 2), layer=layer, fixed=0.3)
    return make_problem(cluster, profile, batch)


class TestManyDevices:
    def test_twice_the_devices_and_the_batch_take_no_longer(self) -> None:
        steps = []
        for copies in (3, 6, 12, 24):
            problem = mixed(copies, 60 * copies)
            solution = Auto()(problem)
            steps.append(checked(problem, solution))
            assert solution.lower_bound_seconds is not None
            assert steps[-1] <= solution.lower_bound_seconds * 1.25
        for before, after in pairwise(steps):
            assert after <= before * 1.005

    def test_a_remainder_and_a_price(self) -> None:
        problem = mixed(4, 241)
        assert checked(problem, Auto()(problem)) > 0

    def test_one_class_per_type_and_shape(self) -> None:
        assert Classes(mixed(5, 100)).counts == (10, 20)

    def test_grid(self) -> None:
        assert grid_of(12) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]

    def test_only_long_pipelines_fit(self) -> None:
        cluster = make_cluster([{"a": 10}, {"b": 10}], memory=2_300)
        profile = make_profile({"a": [0.1] * 9, "b": [0.2] * 9},
                               layer={"parameter_bytes": 500, "saved_bytes_per_sample": 10})  # fmt: skip
        problem = make_problem(cluster, profile, 12)
        solution = Auto(time_limit_seconds=5)(problem)
        checked(problem, solution)
        assert all(len(replica.stages) == 9 for replica in solution.plan.replicas)
