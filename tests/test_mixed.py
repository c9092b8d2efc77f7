"""Unlike pipelines near an even deal: which are chosen, and what comes of it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.files.messages import InputError
from hetpipe.partitioners._desk import Desk
from hetpipe.partitioners._mixed import Mixed, _Pairs
from hetpipe.partitioners.even_pipelines import EvenPipelines
from hetpipe.planning.partition import PartitionError, Problem
from tests.plans import checked
from tests.strategies import UNHURRIED, make_cluster, make_problem, make_profile, problems


@given(st.data())
def test_the_best_two_sorts_of_a_pool(data: st.DataObject) -> None:
    types, R = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=types, max_size=types))
    sets = data.draw(st.lists(st.tuples(*[st.integers(0, 3)] * types), min_size=1, max_size=5))
    samples = np.array(data.draw(st.lists(st.integers(0, 20), min_size=len(sets), max_size=len(sets))), dtype=np.float64)
    used = np.array(sets)
    best = -1.0
    for i, j in product(range(len(sets)), repeat=2):
        for x in range(R + 1):
            if (x * used[i] + (R - x) * used[j] <= counts).all():
                best = max(best, float(x * samples[i] + (R - x) * samples[j]))
    batch = data.draw(st.integers(1, 60))
    found = _Pairs(used, counts, R, batch).chosen(samples)
    if found is None:
        assert best < batch
    else:
        assert found.sum() == R
        assert np.count_nonzero(found) <= 2
        assert (found @ used <= counts).all()
        assert samples @ found == best >= batch


@settings(max_examples=30, **UNHURRIED)
@given(problem=problems(most_devices=6, most_layers=6))
def test_plans_fit_meet_the_batch_and_take_what_is_said(problem: Problem) -> None:
    desk = Desk(problem)
    try:
        for candidate in Mixed().candidates(desk):
            step = desk.steps.step(candidate.draft, candidate.sketch)
            assert checked(problem, candidate.draft.plan(problem)).step_seconds == pytest.approx(step, rel=1e-12)
    except (PartitionError, InputError):  # no micro-batch size that all types have, or no link
        return


def test_what_equal_replicas_leave_is_used() -> None:
    """Three devices of one type and four of another: equal pairs of both leave one idle."""
    profile = make_profile({"a": [0.1] * 12, "b": [0.1] * 12}, sizes=(1, 2))
    problem = make_problem(make_cluster([{"a": 3}, {"b": 4}]), profile, 280)
    even = checked(problem, EvenPipelines()(problem).plan).step_seconds
    desk = Desk(problem)
    found = desk.quickest(Mixed().candidates(desk))
    assert found is not None
    assert found[0] < even
    assert len(found[1].plan(problem).device_ids) == 7
