"""`even-pipelines`: its cuts, its bounds, and what it finds."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.files.messages import InputError
from hetpipe.partitioners.even_pipelines import EvenPipelines, EvenShapes
from hetpipe.partitioners.rules.balance import shortest_cuts
from hetpipe.partitioners.step_times.desk import Desk
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.spec.plan import Plan
from tests.support.plans import checked
from tests.support.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems


@settings(deadline=None)  # numba compiles
@given(st.data())
def test_cuts_fit_and_on_devices_of_one_speed_the_longest_stage_is_as_short_as_it_can_be(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 6))
    n = data.draw(st.integers(1, layers))
    times = st.lists(st.floats(0, 5), min_size=layers, max_size=layers)
    unlike = data.draw(st.booleans())
    rows = [data.draw(times) for _ in range(n)] if unlike else [data.draw(times)] * n
    seconds = np.array([[0.0, *np.cumsum(row)] for row in rows])
    most = [data.draw(st.integers(0, layers)) for _ in range(n)]  # layers that fit
    reach = np.array([[min(lo + count, layers) for lo in range(layers + 1)] for count in most])

    def longest(ends: tuple[int, ...]) -> float:
        return max(float(row[hi] - row[lo]) for row, (lo, hi) in zip(seconds, pairwise(ends), strict=True))

    every = [(0, *inner, layers) for inner in combinations(range(1, layers), n - 1)]
    fitting = [ends for ends in every if all(hi - lo <= count for count, (lo, hi) in zip(most, pairwise(ends), strict=True))]
    found = shortest_cuts(seconds, reach)
    if found is None:
        assert unlike or not fitting
    else:
        assert found in fitting
        assert unlike or longest(found) <= min(longest(ends) for ends in fitting) * (1 + 2e-6) + 1e-12


@settings(max_examples=40, **UNHURRIED)
@given(problem=problems(most_devices=5, most_layers=6))
def test_no_shape_has_a_shorter_step_than_its_bound(problem: Problem) -> None:
    desk = Desk(problem)
    try:
        search = EvenShapes(desk, "test")
        shapes = search.all
    except (PartitionError, InputError):  # no micro-batch size that all types have, or no link
        return
    for shape in shapes:
        for line in search.lines.of(shape.used):
            search.best.step = float("inf")
            for candidate in search.of(shape, line):
                assert shape.bound <= candidate.bound * (1 + 1e-9) or shape.bound <= search.best.step * (1 + 1e-9)
                plan = candidate.draft.plan(problem)
                assert search.best.step == pytest.approx(checked(problem, plan).step_seconds, rel=1e-12)


def test_slow_devices_stay_out_and_slow_links_make_few_pipelines_or_owners_that_are_neighbours() -> None:
    """Sixteen fast devices beside sixteen that take a hundred times as long; gradients that cost more to sum than all else."""
    profile = make_profile({"fast": [0.1] * 16, "slow": [10.0] * 16}, sizes=(1, 2), layer={"parameter_bytes": 10**9})
    slow_link, fast_link = {"bandwidth": 1e9, "latency": 0.0}, {"bandwidth": 1e12, "latency": 0.0}

    def plan(per_node: int, link: dict[str, float]) -> Plan:
        nodes = [{"fast": per_node}] * (16 // per_node) + [{"slow": per_node}] * (16 // per_node)
        problem = make_problem(make_cluster(nodes, link=link, inside=fast_link), profile, 32)
        found = EvenPipelines()(problem).plan
        assert {problem.cluster.device(device).type for device in found.device_ids} == {"fast"}
        return found

    assert [len(replica.stages) for replica in plan(1, slow_link).replicas] == [16]
    assert len(plan(1, fast_link).replicas) > 1
    beside = plan(4, slow_link)
    assert len(beside.replicas) == 4
    for stages in zip(*(replica.stages for replica in beside.replicas), strict=True):
        assert len({stage.device.split("/")[0] for stage in stages}) == 1
