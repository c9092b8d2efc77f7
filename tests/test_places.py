"""Where stages are put, and about what whole plans take."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.files.messages import InputError
from hetpipe.partitioners.pipelines.real import Pipeline
from hetpipe.partitioners.search.assembly import Assembly
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.step_times.desk import Desk
from hetpipe.partitioners.step_times.drafts import Draft
from hetpipe.planning.partition import Problem
from hetpipe.predict.simulator import simulate
from tests.support.strategies import UNHURRIED, crowds, make_cluster, make_problem, make_profile


def pipeline(stages: tuple[int, ...], ends: tuple[int, ...]) -> Pipeline:
    return Pipeline(stages, 1, ends, (False,) * len(stages), 1, (), 1, 1.0, 1.0)


def assembly(problem: Problem) -> Assembly:
    return Assembly(Desk(problem), Types(problem), ThreadPoolExecutor(1))


PROFILE = make_profile({"a": [1.0] * 4, "b": [2.0] * 4}, sizes=(1,))


def test_tiles_of_stages_of_replicas() -> None:
    """Two replicas of four stages on two nodes of four: a replica on each; or the same two stages of both."""
    problem = make_problem(make_cluster([{"a": 4}, {"a": 4}]), PROFILE, 8)
    nodes = problem.cluster.devices
    found = [
        [["".join(nodes[d].node[-1] for d in row) for row in rows.tolist()]]
        for _, rows in assembly(problem).places.of([(pipeline((0, 0, 0, 0), (0, 1, 2, 3, 4)), 2)])
    ]
    first, second = sorted({device.node[-1] for device in nodes})
    whole, halves = [[first * 4, second * 4]], [[first * 2 + second * 2] * 2]
    assert found[0] == whole
    assert halves in found
    assert len(found) == 2  # tiles of one stage lie as those of two do


@settings(max_examples=60, **UNHURRIED)
@given(problem=crowds(24), data=st.data())
def test_every_stage_has_devices_of_its_own(problem: Problem, data: st.DataObject) -> None:
    try:
        found = assembly(problem)
    except InputError:  # no link
        return
    types, sorts = found.types, list[tuple[Pipeline, int]]()
    for _ in range(data.draw(st.integers(1, 3))):
        n = data.draw(st.integers(1, types.L))
        cuts = sorted(data.draw(st.sets(st.integers(1, types.L - 1), min_size=n - 1, max_size=n - 1))) if n > 1 else []
        stages = tuple(data.draw(st.integers(0, types.V - 1)) for _ in range(n))
        sorts.append((pipeline(stages, (0, *cuts, types.L)), data.draw(st.integers(1, 3))))
    devices = problem.cluster.devices
    for _, rows in found.places.of(sorts):
        used = Counter[int]()
        for row, p in zip(rows.tolist(), [p for p, count in sorts for _ in range(count)], strict=True):
            for device, v in zip(row, p.stages, strict=False):
                group = range(device, device + types.kinds[v].degree)
                used.update(group)
                assert {devices[d].type for d in group} == {types.kinds[v].type}
                assert len({devices[d].node for d in group}) == 1
        assert set(used.values()) == {1}


@settings(max_examples=60, **UNHURRIED)
@given(seconds=st.lists(st.floats(0.1, 2.0), min_size=2, max_size=6), batch=st.integers(1, 12), data=st.data())
def test_one_pipeline_on_one_node_takes_what_is_estimated(seconds: list[float], batch: int, data: st.DataObject) -> None:
    profile = make_profile({"a": seconds, "b": [2 * x for x in seconds]}, (1, 2), {"output_bytes_per_sample": 10**8})
    problem = make_problem(make_cluster([{"a": 3, "b": 3}]), profile, batch)
    found = assembly(problem)
    line = tuple(data.draw(st.lists(st.integers(0, found.types.V - 1), min_size=1, max_size=len(seconds))))
    assume(all(line.count(v) <= 3 for v in line))
    p = found.reals.of(line, batch, data.draw(st.sampled_from([1, 2])), 1, ())
    assert p is not None
    about, _, draft = next(found.drafts(((p, 1),), [batch]))
    assert about == pytest.approx(simulate(draft.plan(problem), profile, problem.cluster).step_seconds, rel=1e-9)


@pytest.mark.parametrize("seconds", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("rows", [[[0, 2], [3, 1]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]])
def test_what_crosses_an_adapter_takes_about_what_is_simulated(rows: list[list[int]], seconds: float) -> None:
    """Two replicas on two nodes: each begins on a node of its own, or both on the same, or none leaves its node. (Estimates
    do not know which of them send at the same moment.)"""
    profile = make_profile({"a": [1.0, 1.0]}, (1,), {"output_bytes_per_sample": 10**9, "parameter_bytes": 10**3})
    link = {"bandwidth": 1e9 / seconds, "latency": 0.0}
    problem = make_problem(make_cluster([{"a": 2}, {"a": 2}], link=link), profile, 8)
    found, both, which = assembly(problem), pipeline((0, 0), (0, 1, 2)), np.array([0, 0])
    draft = Draft("auto", "1f1b", np.array(rows), (both.work(4, found.types, 0),), which)
    nodes = found.desk.appraiser.links.node[draft.rows]
    about = found.estimates.seconds([(both, 4)], which, nodes)
    assert about == pytest.approx(simulate(draft.plan(problem), profile, problem.cluster).step_seconds, rel=0.12)
    found.estimates.capacity[:] = math.inf
    free = found.estimates.seconds([(both, 4)], which, nodes)
    assert about > 1.001 * free if rows[0] != [0, 1] else about == free
