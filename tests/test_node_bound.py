"""The bound of what whole nodes can do: no plan is below it, and it knows of adapters that several devices share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import InputError
from hetpipe.partitioners.bound.lower import Lower
from hetpipe.partitioners.bound.nodes import NodeBound
from hetpipe.partitioners.exhaustive import Exhaustive
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.predict.simulator import simulate
from tests.support.plans import ROUNDING, checked
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems
from tests.test_bounds import plans
from tests.test_search import searchable

SLOW: dict[str, Any] = {"bandwidth": 1e6, "latency": 0.0}
FAST: dict[str, Any] = {"bandwidth": 1e12, "latency": 0.0}


def bound(problem: Problem, low: int, high: int, least: float, most: float) -> float:
    """What is shown of plans of `low` to `high` replicas."""
    return NodeBound(Types(problem)).bound(low, high, least, most)


@st.composite
def shared(draw: st.DrawFn, most_devices: int, most_layers: int, most_batch: int, split: bool) -> Problem:
    """A problem whose nodes have adapters of their own, some slower one way, or as many as devices; times may be next to nothing,
    so that adapters decide; memory may be ample."""
    several = problems(most_devices, most_layers, most_batch, tensor_parallel=split, least_devices=2)
    problem = draw(several.filter(searchable))
    document = problem.cluster.model_dump(mode="json", exclude_none=True)
    document["link"] = {"bandwidth": draw(st.sampled_from([2e3, 1e5, 1e7])), "latency": draw(st.sampled_from([0.0, 1e-3]))}
    document["runtime_overhead"]["overlap_transfers"] = True
    for node in document["nodes"]:
        node["link"] = draw(st.sampled_from([SLOW, FAST]))
        if draw(st.booleans()):
            node["adapter"] = {"bandwidth": draw(st.sampled_from([1e3, 1e4, 1e6]))}
            node["adapter"]["bandwidth_in"] = node["adapter"]["bandwidth"] * draw(st.sampled_from([0.1, 1.0, 1.0, 3.0]))
            node["adapters"] = draw(st.sampled_from([1, 1, "per_device"]))
    if draw(st.booleans()):
        for kind in document["device_types"].values():
            kind["memory"] = 10**12
    profile, faster = problem.profile.model_dump(), draw(st.sampled_from([1.0, 0.1, 1e-3]))
    for measured in profile["measurements"]:
        for key in ("forward_seconds", "backward_seconds"):
            measured[key] = [[faster * seconds for seconds in row] for row in measured[key]]
    for layer in profile["layers"]:
        layer["output_bytes_per_sample"] += 1
    found = type(problem.profile).parse(profile, "the test's profile")
    return replace(problem, cluster=Cluster.parse(document, "shared adapters"), profile=found)


@settings(max_examples=25, **UNHURRIED)
@given(problem=st.booleans().flatmap(lambda split: shared(4, 4, 6, split)))
def test_no_plan_is_below_it(problem: Problem) -> None:
    """The bound is compared with all plans there are, where they can be listed."""
    try:
        plan = Exhaustive()(problem).plan
    except (PartitionError, InputError):
        return
    best = checked(problem, plan).step_seconds
    for low, high in ((1, 1), (1, 2), (2, 3), (3, 4)):
        if low <= len(plan.replicas) <= high:
            assert bound(problem, low, high, best / 1000, 2 * best) <= best * ROUNDING
    assert Lower(Types(problem), fluid_bound(problem)).run(1.5 * best, 20_000_000) <= best * ROUNDING


@settings(max_examples=60, **UNHURRIED)
@given(data=st.data())
def test_no_plan_of_as_many_replicas_is_below_it(data: st.DataObject) -> None:
    """Of any plan, good or bad, with memory for everything."""
    problem = data.draw(shared(8, 6, 12, False))
    document = problem.cluster.model_dump(mode="json", exclude_none=True)
    for kind in document["device_types"].values():
        kind["memory"] = 10**12
    problem = replace(problem, cluster=Cluster.parse(document, "ample"))
    plan = data.draw(plans(problem))
    step, R = simulate(plan, problem.profile, problem.cluster).step_seconds, len(plan.replicas)
    for low, high in {(R, R), ((R + 1) // 2, R), (R, R + 2)}:
        assert bound(problem, low, high, step / 1000, 2 * step) <= step * ROUNDING


def apart(**changes: Any) -> Problem:
    """Two nodes of four devices, joined by 1 MB/s, and two layers of 40 MB of parameters each, between which 1 MB a sample goes.
    One sample takes 1 s on a device, both layers together; there are 32."""
    layer = {"parameter_bytes": 40_000_000, "output_bytes_per_sample": 1_000_000}
    cluster = make_cluster([{"a": 4}] * 2, link=SLOW, inside=FAST, **changes)
    return make_problem(cluster, make_profile({"a": [1 / 6] * 2}, (1,), layer), 32)


def test_two_nodes_sum_all_gradients_or_send_all_samples() -> None:
    """One replica on each node sums 80 MB, which takes 80 s; a layer on each sends 32 samples, which takes 32 s. A node alone
    computes for 8 s: that is the best, where the fluid bound says 4 s, with all devices."""
    problem = apart()
    assert fluid_bound(problem) == pytest.approx(4.0)
    assert bound(problem, 1, 1, 4.0, 100.0) == pytest.approx(8.0, rel=0.01)
    assert 7.4 < bound(problem, 4, 4, 4.0, 100.0) <= 8.0  # layers are shared out in parts
    assert bound(problem, 8, 8, 4.0, 100.0) == 100.0  # each node sums 1.75 times 80 MB


def test_memory_for_one_layer_makes_samples_cross() -> None:
    """No node holds both layers (40 MB, and as many gradients, and twice as much for the optimizer): all samples cross."""
    assert bound(apart(memory=45_000_000), 1, 1, 4.0, 100.0) == pytest.approx(32.0, rel=0.01)


def test_the_bound_of_the_search_has_it() -> None:
    """It was 4.2 s, as if gradients of both nodes were summed for nothing."""
    problem = apart()
    assert 7.4 < Lower(Types(problem), fluid_bound(problem)).run(8.5, 1e7) <= 8.5


@pytest.mark.parametrize(
    "changes", [{"overhead": {"overlap_transfers": False}}, {"link": {"points": [[1, 0.01], [10_000_000, 10.0]]}}]
)
def test_nothing_is_shown_where_adapters_may_carry_less(changes: dict[str, Any]) -> None:
    layer = {"parameter_bytes": 40_000_000, "output_bytes_per_sample": 1_000_000}
    cluster = make_cluster([{"a": 4}] * 2, **({"link": SLOW, "inside": FAST} | changes))
    problem = make_problem(cluster, make_profile({"a": [1 / 6] * 2}, (1,), layer), 32)
    assert bound(problem, 8, 8, 4.0, 100.0) == 4.0
