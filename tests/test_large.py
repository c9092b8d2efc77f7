"""The planner of `search` on more devices than any search can tell apart."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.partitioners.auto import Auto
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.uneven_data_parallel import UnevenDataParallel
from hetpipe.planning.registry import rules
from tests.support.plans import ROUNDING, checked
from tests.support.strategies import make_cluster, make_problem, make_profile, mixed


def test_twice_the_devices_and_the_batch_take_no_longer() -> None:
    steps = []
    for copies in (3, 6, 12, 24):
        problem = mixed(copies, 60 * copies)
        solution = Auto()(problem)
        steps.append(checked(problem, solution.plan).step_seconds)
        assert solution.lower_bound_seconds is not None
        assert steps[-1] <= solution.lower_bound_seconds * 1.25
    for before, after in pairwise(steps):
        assert after <= before * 1.005


def test_a_remainder() -> None:
    problem = mixed(4, 241)
    assert checked(problem, Auto()(problem).plan).step_seconds > 0


def test_devices_are_counted_by_type() -> None:
    assert Types(mixed(5, 100)).limits[1].tolist() == [10, 20]


def test_only_long_pipelines_fit() -> None:
    cluster = make_cluster([{"a": 10}, {"b": 10}], memory=2_300)
    profile = make_profile({"a": [0.1] * 9, "b": [0.2] * 9}, layer={"parameter_bytes": 500, "saved_bytes_per_sample": 10})
    problem = make_problem(cluster, profile, 12)
    solution = Auto(time_limit_seconds=5)(problem)
    checked(problem, solution.plan)
    assert all(len(replica.stages) == 9 for replica in solution.plan.replicas)


def test_a_type_that_only_some_nodes_have_enough_devices_of() -> None:
    """Measured split in two only, so that the node with one such device is of no use."""
    profile = make_profile({"a": [0.1, 0.2], "b": [0.1, 0.2]})
    document = profile.model_dump()
    document["measurements"][0]["tensor_parallel"] = 2
    problem = make_problem(make_cluster([{"a": 1}, {"a": 4}, {"b": 8}, {"b": 8}]), Profile.parse(document, "the test's"), 40)
    assert Types(problem).limits[1].tolist() == [2, 16]
    assert not any(device.startswith("n0/") for device in Auto()(problem).plan.device_ids)


def test_with_little_time_simple_plans_come_last() -> None:
    """18 of 32 devices, each with the whole model and one sample, are what the planner of `search` does not find."""
    cluster = make_cluster([{"a": 8}] * 4, link={"bandwidth": 1e4, "latency": 0.05})
    layer = {"parameter_bytes": 1000, "output_bytes_per_sample": 100, "saved_bytes_per_sample": 500}
    problem = make_problem(cluster, make_profile({"a": [0.3, 0.2, 0.5]}, layer=layer), 18, time_limit_seconds=4)
    solution = Auto()(problem)
    simple = UnevenDataParallel()(problem).plan
    assert checked(problem, solution.plan).step_seconds <= checked(problem, simple).step_seconds * ROUNDING
    assert solution.plan.partitioner == "auto"
    assert solution.lower_bound_seconds is not None


@pytest.mark.parametrize("devices", [2, 10, 20])
def test_a_batch_below_the_smallest_measured_size(devices: int) -> None:
    problem = make_problem(make_cluster([{"a": devices}]), make_profile({"a": [0.1, 0.2]}, sizes=(4, 8)), 3)
    for partitioner in (Auto(), *rules()):
        with pytest.raises(InputError, match="the global batch of 3 samples is below the smallest micro-batch .* 4; measure"):
            partitioner(problem)
