"""The simple rules' drafts against the plans that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import LinkBetween
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.fasop import Fasop
from hetpipe.partitioners.rules.baseline import equal_parts
from hetpipe.partitioners.step_times.appraisal import unlike_rows
from hetpipe.partitioners.step_times.desk import Budget, Candidate, Desk, Rule
from hetpipe.partitioners.step_times.drafts import Draft, equal_runs, in_runs
from hetpipe.partitioners.step_times.links import Links
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.registry import rules
from hetpipe.predict.simulator import simulate
from tests.support.strategies import LINK, UNHURRIED, make_cluster, make_problem, make_profile, problems


def every(desk: Desk, rule: Rule) -> Iterator[tuple[tuple[int, ...], Candidate, Draft]]:
    """All drafts of a rule, with their places in its order."""
    for candidate in rule.candidates(desk):
        for start in candidate.starts:
            yield (start, *candidate.order), candidate, desk.moved(candidate.draft, start)


def missing(problem: Problem, plan: Plan) -> dict[str, float]:
    """The most bytes that are missing on a device of each type."""
    found: dict[str, float] = {}
    for device, peak in simulate(plan, problem.profile, problem.cluster).peak_bytes.items():
        kind = problem.cluster.device(device).type
        more = peak - problem.cluster.device_types[kind].memory * (1 - problem.memory_reserve)
        if more > 0:
            found[kind] = max(found.get(kind, 0.0), more)
    return found


class TestEveryDraft:
    @settings(max_examples=60, **UNHURRIED)
    @given(problems(most_devices=12, most_layers=6, most_batch=30), st.sampled_from(rules()), st.data())
    def test_bound_memory_and_step(self, problem: Problem, rule: Rule, data: st.DataObject) -> None:
        """The step and the bytes of the simulator, to the bit; and no bound above the step."""
        desk = Desk(problem)
        try:
            drafts = list(every(desk, rule))
        except (PartitionError, InputError):
            return
        assume(drafts)
        _, candidate, draft = data.draw(st.sampled_from(drafts))
        plan, types = draft.plan(problem), desk.appraiser.types
        step = simulate(plan, problem.profile, problem.cluster).step_seconds
        least = desk.steps.least(draft)
        assert Budget(desk.steps).step(draft, least) == step
        assert least <= step
        assert candidate.bound <= step
        for short in (desk.missing(candidate), desk.appraiser.missing(draft)):
            assert {types[kind]: more for kind, more in short.items()} == missing(problem, plan)

    @settings(max_examples=40, **UNHURRIED)
    @given(problems(most_devices=9, most_layers=5, most_batch=20), st.sampled_from(rules()))
    def test_the_quickest_is_the_first_of_the_quickest(self, problem: Problem, rule: Rule) -> None:
        """Nothing is left out: every draft is built and simulated here."""
        desk = Desk(problem)
        try:
            drafts = list(every(desk, rule))
        except (PartitionError, InputError):
            return
        found = {}
        for place, _, draft in drafts:
            plan = draft.plan(problem)
            if not missing(problem, plan):
                found[simulate(plan, problem.profile, problem.cluster).step_seconds, place] = plan
        quickest = desk.quickest(rule.candidates(desk))
        assert (quickest is None) == (not found)
        if quickest is not None:
            assert quickest[0] == min(found)[0]
            assert quickest[1].plan(problem) == found[min(found)]
            assert desk.quickest(rule.candidates(desk), quickest[0]) is None

    def test_few_are_simulated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 3,200 plans of FASOP's for 40 devices on 40 nodes."""
        link = {"bandwidth": 2e3, "latency": 0.05}
        layer = {"parameter_bytes": 400, "output_bytes_per_sample": 50, "saved_bytes_per_sample": 30}
        profile = make_profile({"a": [0.1] * 10, "b": [0.25] * 10}, sizes=(1, 2, 4, 8), layer=layer, fixed=0.3)
        problem = make_problem(make_cluster([{"a": 1}] * 20 + [{"b": 1}] * 20, link=link), profile, 400)
        desk, steps = Desk(problem), list[tuple[Any, ...]]()
        least = desk.steps.least

        def counted(*given: Any) -> float:
            steps.append(given)
            return least(*given)

        monkeypatch.setattr(desk.steps, "least", counted)
        assert sum(1 for _ in every(desk, Fasop())) > 1000
        assert desk.quickest(Fasop().candidates(desk)) is not None
        assert len(steps) < 100

    def test_a_link_that_nobody_gave(self) -> None:
        cluster = make_cluster([{"a": 1}, {"a": 1}]).model_copy(update={"link": None})
        with pytest.raises(InputError, match="no link is known between nodes 'n0' and 'n1'"):
            Fasop()(make_problem(cluster, make_profile({"a": [1.0, 1.0]}, layer={"parameter_bytes": 1}), 4))


class TestRuns:
    @given(st.integers(1, 60), st.integers(1, 20))
    def test_sizes(self, samples: int, number: int) -> None:
        def sizes(runs: tuple[tuple[int, int], ...]) -> list[int]:
            return [size for size, count in runs for _ in range(count)]

        assert sizes(equal_runs(samples, number)) == [x for x in equal_parts(samples, number) if x]
        found = sizes(in_runs(samples, number))
        assert sum(found) == samples
        assert set(found[:-1]) <= {number}
        assert all(a >= b for a, b in pairwise(found))


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=1, max_size=9))
def test_unlike_rows(rows: list[list[int]]) -> None:
    first, where = unlike_rows(np.array(rows))
    assert [rows[first[i]] for i in where] == rows
    assert len({tuple(rows[i]) for i in first}) == len(first) == len({tuple(row) for row in rows})


def test_links_by_number() -> None:
    """Own links of a node and of a pair of nodes, and the cluster's."""
    slow = LinkBetween(between=("n2", "n0"), bandwidth=7e9)
    cluster = make_cluster([{"a": 2}, {"a": 1}, {"a": 1}], inside={"bandwidth": 5e9, "latency": 0.0})
    links = Links(cluster.model_copy(update={"links": (slow,)}))
    numbers = links.numbers(*np.array([(0, 1), (0, 2), (2, 3), (3, 1)]).T)
    assert [links.all[i].bandwidth for i in numbers] == [5e9, LINK["bandwidth"], LINK["bandwidth"], 7e9]
