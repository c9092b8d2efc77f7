from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import hetpipe
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import with_assumed
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.planning.planner import make_plan, with_prediction
from hetpipe.predict.simulator import simulate
from hetpipe.show.report import prediction_facts
from tests.support.strategies import make_cluster, make_problem, make_profile

CLUSTER = make_cluster([{"a": 1, "b": 1}], price={"a": 3.0, "b": 1.0})
PROFILE = make_profile({"a": [1.0, 1.0], "b": [2.0, 2.0]}, layer={"parameter_bytes": 1000}, optimizer=0.1)


class TestPrediction:
    def test_is_what_the_simulator_says(self) -> None:
        plan = make_plan(PROFILE, CLUSTER, 6)
        timeline = simulate(plan, PROFILE, with_assumed(CLUSTER, PROFILE))
        assert plan.predicted is not None
        assert plan.predicted.step_seconds == timeline.step_seconds
        assert plan.predicted.gradient_sync_seconds == timeline.sync_seconds
        assert plan.predicted.peak_bytes == dict(timeline.peak_bytes)
        assert plan.predicted.samples_per_second == pytest.approx(6 / timeline.step_seconds)
        assert plan.partitioner == "auto"

    def test_prices(self) -> None:
        """4 devices-dollars an hour for two devices; 36 s for 6 samples are 6 s a sample."""
        plan = make_plan(make_profile({"a": [2.0], "b": [6.0]}), CLUSTER, 8)
        assert plan.predicted is not None
        assert plan.predicted.step_seconds == pytest.approx(36.0)
        assert plan.predicted.price_per_hour == 4.0
        assert plan.predicted.price_per_million_samples == pytest.approx(4.0 / 3600 * 36.0 / 8 * 1e6)

    def test_an_exhaustive_search_has_no_gap(self) -> None:
        plan = make_plan(PROFILE, CLUSTER, 6)
        assert plan.predicted is not None
        assert plan.predicted.proof == "exhaustive"
        assert plan.predicted.gap == 0
        assert plan.predicted.lower_bound_seconds == plan.predicted.step_seconds
        assert plan.predicted.fluid_bound_seconds == pytest.approx(fluid_bound(make_problem(CLUSTER, PROFILE, 6)))

    def test_a_baseline_is_measured_against_the_fluid_bound(self) -> None:
        plan = make_plan(PROFILE, CLUSTER, 6, partitioner="even")
        assert plan.predicted is not None
        fluid = fluid_bound(make_problem(CLUSTER, PROFILE, 6))
        assert plan.predicted.proof == "fluid"
        assert plan.predicted.lower_bound_seconds == fluid
        assert plan.predicted.gap is not None
        assert plan.predicted.gap == pytest.approx(plan.predicted.step_seconds / fluid - 1)
        assert plan.predicted.gap > 0

    def test_a_partitioner_that_overfills_memory_is_caught(self) -> None:
        stage = StagePlan(layers=(0, 2), devices=("n0/0",))
        plan = Plan(model="test", global_batch=2, replicas=(ReplicaPlan(microbatch_sizes=(2,), stages=(stage,)),))
        problem = Problem.create(cluster=make_cluster([{"a": 1}], memory=100), profile=PROFILE, global_batch=2)
        with pytest.raises(PartitionError, match="needs 8000 bytes on n0/0, which has 100"):
            with_prediction(Solution(plan=plan), problem)

    def test_a_partitioner_that_heeds_no_price_or_deadline_is_caught(self) -> None:
        solution = Solution(plan=make_plan(PROFILE, CLUSTER, 6, partitioner="even"))
        problem = make_problem(CLUSTER, PROFILE, 6)
        step = with_prediction(solution, problem).predicted
        assert step is not None
        cases: list[tuple[dict[str, Any], str]] = [
            ({"max_price_per_hour": 3.5}, r"the plan of 'even' costs 4 per hour, more than 3\.5"),
            ({"deadline_seconds_per_step": step.step_seconds / 2}, r"the plan of 'even' takes .* s per step, more than"),
        ]
        for limits, message in cases:
            with pytest.raises(PartitionError, match=message):
                with_prediction(solution, replace(problem, **limits))
        with_prediction(solution, replace(problem, max_price_per_hour=4.0, deadline_seconds_per_step=step.step_seconds))


class TestOptions:
    def test_price_limit(self) -> None:
        plan = make_plan(PROFILE, CLUSTER, 6, max_price_per_hour=3.5)
        assert plan.device_ids == ("n0/0",)

    def test_deadline_takes_the_cheapest(self) -> None:
        """b takes twice as long as a for a third of the price."""
        slow = make_plan(PROFILE, CLUSTER, 2, deadline_seconds_per_step=1000.0)
        assert slow.device_ids == ("n0/1",)
        quick = make_plan(PROFILE, CLUSTER, 2, deadline_seconds_per_step=13.0)
        assert quick.device_ids == ("n0/0",)
        oracle = make_plan(PROFILE, CLUSTER, 2, deadline_seconds_per_step=13.0, partitioner="exhaustive")
        for plan in (quick, oracle):
            assert plan.predicted is not None
            assert plan.predicted.proof == "exhaustive"
            assert plan.predicted.gap == pytest.approx(0.0)
            assert plan.predicted.lower_bound_price_per_million_samples == pytest.approx(plan.predicted.price_per_million_samples)
        said = dict(prediction_facts(slow))
        assert said["gap of the price"] == "0.0 %"
        assert said["least price in time"].endswith("(exhaustive: the whole class of plans was searched)")
        with pytest.raises(PartitionError, match=r"at most 0.5 s per step"):
            make_plan(PROFILE, CLUSTER, 2, deadline_seconds_per_step=0.5)

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_schedule(self, schedule: str) -> None:
        small = make_cluster([{"a": 1, "b": 1}], memory=4500)
        assert make_plan(PROFILE, small, 6, schedule=schedule).schedule == schedule

    def test_backend(self) -> None:
        small = make_cluster([{"a": 1}, {"b": 1}], memory=4500)
        assert len(make_plan(PROFILE, small, 6).replicas[0].stages) == 2
        with pytest.raises(PartitionError):
            make_plan(PROFILE, small, 6, backend="fairscale")  # a pipeline would span two nodes

    def test_what_is_missing_is_a_number_too(self) -> None:
        with pytest.raises(PartitionError, match="needs 4000 bytes .* which has 3900 bytes: 100 bytes") as caught:
            make_plan(PROFILE, make_cluster([{"a": 1}], memory=3900), 2, memory_reserve=0.0)
        assert (caught.value.missing_bytes, caught.value.needed_bytes, caught.value.out_of_time) == (100, 4000, False)
        with pytest.raises(PartitionError, match="need 8000 bytes on device n0/0 .* 4100 bytes are missing") as caught:
            make_plan(PROFILE, make_cluster([{"a": 1}], memory=3900), 2, partitioner="even", memory_reserve=0.0)
        assert (caught.value.missing_bytes, caught.value.needed_bytes) == (4100, 8000)

    def test_memory_reserve(self) -> None:
        assert len(make_plan(PROFILE, make_cluster([{"a": 1}], memory=8000), 2, memory_reserve=0.0).replicas) == 1
        with pytest.raises(PartitionError, match=r"set the memory reserve of 10% to 0"):
            make_plan(PROFILE, make_cluster([{"a": 1}], memory=8000), 2, memory_reserve=0.1)

    def test_a_part_of_the_memory_is_left_free_unless_the_cluster_says_what_the_framework_takes(self) -> None:
        """One rule for GPUs that are declared and GPUs that are found; emulated devices count tensors only."""
        full = make_cluster([{"a": 1}], memory=8000)
        with pytest.raises(PartitionError, match=r"set the memory reserve of 8% to 0"):
            make_plan(PROFILE, full, 2)
        document = full.model_dump(mode="json", exclude_none=True)
        told = Cluster.parse({**document, "runtime_overhead": {"receive_buffers": "one"}}, "the test's")
        document["device_types"]["a"]["emulate"] = {"slowdown": 2.0}
        emulated = Cluster.parse(document, "the test's")
        for cluster in (told, emulated):
            assert len(make_plan(PROFILE, cluster, 2).replicas) == 1
        roomy = make_plan(PROFILE, make_cluster([{"a": 1}], memory=9000), 2)
        assert roomy.predicted is not None
        assert max(roomy.predicted.peak_bytes.values()) <= 9000 * 0.92

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"partitioner": "chian"}, "unknown partitioner 'chian'; did you mean 'chain'"),
            ({"global_batch": 0}, "the global batch must be at least 1, got 0"),
            ({"global_batch": 10**9}, "the global batch must be at most 1048576, got 1000000000"),
            ({"global_batch": 10**5000}, "the global batch must be at most 1048576, got a number of thousands of digits"),
            ({"memory_reserve": 1.0}, "memory_reserve is a fraction"),
            ({"time_limit_seconds": 0.0}, "time_limit_seconds must be a positive number, got 0.0"),
            (
                {"max_price_per_hour": -1.0, "memory_reserve": 2.0},
                "(?s)memory_reserve.*max_price_per_hour must be positive|must be a positive",
            ),
            ({"backend": "fairscale", "schedule": "1f1b"}, "back end 'fairscale' runs gpipe only"),
            ({"partitioner": "even", "max_price_per_hour": 1.0}, "'even' knows no prices and cannot honour"),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], message: str) -> None:
        given: dict[str, Any] = {"profile": PROFILE, "cluster": CLUSTER, "global_batch": 6}
        with pytest.raises(InputError, match=message):
            make_plan(**given | options)

    @pytest.mark.parametrize("name", ["auto", "chain"])
    def test_time_limit(self, name: str) -> None:
        """A moment is enough for a plan and a bound that the best plan of the class respects."""
        profile = make_profile({"a": [1.0] * 9, "b": [2.0] * 9}, layer={"parameter_bytes": 1000}, optimizer=0.1)
        cluster = make_cluster([{"a": 2, "b": 2}])
        best = make_plan(profile, cluster, 6, partitioner=name, time_limit_seconds=1000.0).predicted
        found = make_plan(profile, cluster, 6, partitioner=name, time_limit_seconds=1e-9).predicted
        assert best is not None
        assert found is not None
        assert found.step_seconds >= best.step_seconds
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= best.step_seconds

    def test_time_limit_before_any_plan(self) -> None:
        with pytest.raises(PartitionError, match="no plan was found within the time limit of 1e-09 s, and none"):
            make_plan(PROFILE, CLUSTER, 6, partitioner="exhaustive", time_limit_seconds=1e-9)
        assert make_plan(PROFILE, CLUSTER, 6, partitioner="exhaustive", time_limit_seconds=1e3) == make_plan(
            PROFILE, CLUSTER, 6, partitioner="exhaustive"
        )

    def test_stopped_before_any_plan(self) -> None:
        with pytest.raises(PartitionError, match="no plan was found before the search was stopped, and none") as raised:
            make_plan(PROFILE, CLUSTER, 6, partitioner="exhaustive", stopped=lambda: True)
        assert raised.value.out_of_time

    def test_no_time_leaves_the_plan_in_hand(self) -> None:
        problem = make_problem(CLUSTER, PROFILE, 6, time_limit_seconds=1e-9)
        plan = make_plan(PROFILE, CLUSTER, 6, partitioner="even")
        assert ExactSearch(problem, "even", time_limit_seconds=1e-9, start=[plan]).run().plan == plan
        with pytest.raises(PartitionError, match="no plan was found within the time limit") as raised:
            ExactSearch(problem, "auto", time_limit_seconds=1e-9).run()
        assert raised.value.out_of_time
        unlimited = make_problem(CLUSTER, PROFILE, 6)
        with pytest.raises(PartitionError, match="no plan was found by as much search as there is without a time limit"):
            ExactSearch(unlimited, "auto", time_limit_seconds=-1.0).run()  # no effort at all

    def test_deadline_without_prices(self) -> None:
        with pytest.raises(InputError, match="no device type of the cluster has a price_per_hour"):
            make_plan(PROFILE, make_cluster([{"a": 1}]), 6, deadline_seconds_per_step=1.0)

    def test_a_type_without_a_measurement(self) -> None:
        with pytest.raises(InputError, match="no measurement of device type 'c'.*known: a, b"):
            make_plan(PROFILE, make_cluster([{"a": 1, "c": 1}]), 6)

    def test_measured_links_override_the_clusters(self) -> None:
        document = PROFILE.model_dump(mode="json")
        document["links"] = [{"between": ["n0", "n0"], "bandwidth": 1.0}]
        slow = type(PROFILE).parse(document, "the profile with links")
        assert len(make_plan(PROFILE, CLUSTER, 6).device_ids) == 2
        assert len(make_plan(slow, CLUSTER, 6).device_ids) == 1


def test_make_plan_is_public() -> None:
    assert hetpipe.make_plan is make_plan


def test_planning_needs_no_torch_and_no_scipy() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None; from hetpipe import make_plan; "
        "from tests.test_planner import PROFILE, CLUSTER; make_plan(PROFILE, CLUSTER, 6); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
