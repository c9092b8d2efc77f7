"""A part of a cluster, and its plan several times."""

from __future__ import annotations

import math

from hypothesis import assume, given, settings

from hetpipe.partitioners._copies import TIMES, part, repeated
from hetpipe.partitioners._planner import Planner
from hetpipe.planning.partition import Problem
from hetpipe.predict.simulator import simulate
from tests.plans import checked
from tests.strategies import UNHURRIED, crowds, make_cluster, make_problem, make_profile
from tests.test_counted import counted


@settings(max_examples=15, **UNHURRIED)
@given(problem=crowds(24).filter(counted))
def test_copies_are_of_the_same_types_and_do_the_batch(problem: Problem) -> None:
    found = part(problem)
    assume(found is not None)
    assert found is not None
    whole, some = problem.cluster.devices, found.problem.cluster.devices
    assert found.places.shape == (TIMES, len(some))
    assert len(set(found.places.ravel().tolist())) == found.places.size  # no device twice
    for copy in found.places.tolist():
        assert [whole[place].type for place in copy] == [device.type for device in some]
        nodes = {(whole[place].node, device.node) for place, device in zip(copy, some, strict=True)}
        assert len(nodes) == len({node for node, _ in nodes}) == len({node for _, node in nodes})  # what shares a node still does
    assert 0 <= TIMES * found.problem.global_batch - problem.global_batch < TIMES
    planner = Planner(found.problem)
    planner.run(repeat=False)
    draft = planner.assembly.draft
    assume(draft is not None)
    assert draft is not None
    copies = repeated(found, draft, problem.global_batch)
    if copies is not None:
        plan = copies.plan(problem)
        assert sum(sum(replica.microbatch_sizes) for replica in plan.replicas) == problem.global_batch
        assert len(plan.replicas) == TIMES * len(draft.rows)
        checked(problem, plan)


def test_a_part_of_a_node_and_no_part_of_too_few() -> None:
    """Of nine nodes of three two are in each of four copies, and none of the ninth's devices."""
    profile = make_profile({"a": [0.1] * 4}, (1,))
    found = part(make_problem(make_cluster([{"a": 3}] * 9), profile, 27))
    assert found is not None
    assert [sum(node.devices.values()) for node in found.problem.cluster.nodes] == [3, 3]
    assert found.problem.global_batch == 7
    found = part(make_problem(make_cluster([{"a": 9}]), profile, 8))
    assert found is not None
    assert found.places.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert part(make_problem(make_cluster([{"a": 3}]), profile, 8)) is None


def test_a_plan_of_many_devices_is_no_slower_than_four_of_a_quarter() -> None:
    profile = make_profile({"a": [0.1] * 6, "b": [0.25] * 6}, (1, 2))
    problem = make_problem(make_cluster([{"a": 4}, {"b": 4}] * 8), profile, 256)
    found = part(problem)
    assert found is not None
    planner, whole = Planner(found.problem), Planner(problem)
    planner.run(repeat=False)
    assert planner.assembly.draft is not None
    copies = repeated(found, planner.assembly.draft, problem.global_batch)
    assert copies is not None
    step = simulate(copies.plan(problem), problem.profile, problem.cluster).step_seconds
    plan = whole.run()
    assert plan is not None
    assert checked(problem, plan).step_seconds <= step * (1 + 1e-9) < math.inf
