"""The last moves: neighbours are plans of the same problem, and what is found is never slower than what they begin with."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.partitioners.pipelines.real import Reals
from hetpipe.partitioners.search.planner import Planner
from hetpipe.partitioners.search.polish import Polish
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.step_times.desk import Desk
from hetpipe.partitioners.step_times.drafts import Draft, Work, in_runs
from hetpipe.planning.partition import Problem
from hetpipe.predict.simulator import simulate
from tests.support.plans import checked
from tests.support.strategies import UNHURRIED, crowds, make_cluster, make_problem, make_profile, problems
from tests.test_search import searchable

LOOKED = 40  # neighbours of a draft


def first_draft(problem: Problem) -> Draft | None:
    """The planner's, before any last move."""
    with Planner(problem) as whole:
        whole.effort = whole.effort._replace(finalists=0)
        whole.run()
        return whole.assembly.draft


@settings(max_examples=25, **UNHURRIED)
@given(problem=st.one_of(crowds(12), problems(most_devices=6, most_layers=6, tensor_parallel=True)).filter(searchable))
def test_moves_from_the_plan(problem: Problem) -> None:
    draft = first_draft(problem)
    if draft is None:
        return
    desk = Desk(problem)
    polish = Polish(desk, Reals(Types(problem)), 4 * LOOKED, 1e6)
    for neighbour in islice(polish.neighbours(draft), LOOKED):
        plan = neighbour.plan(problem)
        plan.check(cluster=problem.cluster, profile=problem.profile, global_batch=problem.global_batch)
        step = polish.step(neighbour, np.inf)
        if np.isfinite(step):
            assert checked(problem, plan).step_seconds == step
    begun = simulate(draft.plan(problem), problem.profile, problem.cluster).step_seconds
    better, seconds = polish.run(draft, begun)
    assert seconds <= begun
    assert checked(problem, better.plan(problem)).step_seconds == seconds


def begin(types: dict[str, list[float]], rows: list[list[int]], works: list[Work], memory: int = 10**9) -> tuple[Problem, Draft]:
    """A draft on one node, a device of each type after the other, each of which does `works[r]`."""
    cluster = make_cluster([dict.fromkeys(types, 1)], memory=memory)
    batch = sum(work.samples for work in works)
    problem = make_problem(cluster, make_profile(types, (1, 2, 4)), batch, schedule="1f1b")
    return problem, Draft("auto", "1f1b", np.array(rows), tuple(works), np.arange(len(works)))


def polished(problem: Problem, draft: Draft) -> Draft:
    """The best that is found."""
    step = simulate(draft.plan(problem), problem.profile, problem.cluster).step_seconds
    return Polish(Desk(problem), Reals(Types(problem)), 1000, 1e6).run(draft, step)[0]


def test_cuts_move() -> None:
    """Seven of eight equal layers are on the second of two equal devices."""
    types = {"a": [0.5] * 8, "b": [0.5] * 8}
    found = polished(*begin(types, [[0, 1]], [Work(in_runs(16, 1), (0, 1, 8), False)]))
    assert found.works[0].ends == (0, 4, 8)


def test_samples_move() -> None:
    """Fifteen of sixteen samples are on one of two equal devices."""
    types = {"a": [0.5] * 4, "b": [0.5] * 4}
    works = [Work(in_runs(15, 1), (0, 4), False), Work(in_runs(1, 1), (0, 4), False)]
    found = polished(*begin(types, [[0], [1]], works))
    assert [found.works[i].samples for i in found.which] == [8, 8]


def test_stages_change_places() -> None:
    """The first device is quick at the last layers, and the last at the first ones."""
    types = {"a": [4.0] * 3 + [0.5] * 3, "b": [0.5] * 3 + [4.0] * 3}
    found = polished(*begin(types, [[0, 1]], [Work(in_runs(16, 1), (0, 3, 6), False)]))
    assert found.rows.tolist() == [[1, 0]]
