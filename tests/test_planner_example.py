"""The worked example of docs/planner.md: every number that stands there is what the code computes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from docs import bound_picture as example
from hetpipe.partitioners.bound.lower import Lower, Part
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.planning.planner import make_plan
from tests.support.pages import Page

TEXT = " ".join(Page("docs/planner.md").text.partition("### A worked example")[2].partition("\n### ")[0].split())
ROW = re.compile(r"\| (\d+)(?: to (\d+))? \| ([ab ]+) \| ([\d.]+) \| ([\d.]+) \|")


@pytest.fixture(scope="module")
def bound() -> Lower:
    return example.lower(example.problem())


def test_what_there_is_and_the_first_prices(bound: Lower) -> None:
    assert [kind.type for kind in bound.types.kinds] == ["a", "b"]
    assert bound.there.tolist() == [1, 2]
    assert "A = (1, 2)" in TEXT
    assert bound.first().tolist() == [0.5, 0.25]
    assert "π = (0.5, 0.25)" in TEXT


def test_the_table_is_what_the_cheapest_pipelines_cost(bound: Lower) -> None:
    first, second = (example.curve(bound, example.RULED_OUT, np.array(prices)) for prices in ((0.5, 0.25), (0.55, 0.225)))
    found = ROW.findall(TEXT)
    assert tuple((int(low), int(high or low)) for low, high, *_ in found) == example.RANGES
    assert [line for _, _, line, *_ in found] == second.lines
    assert [float(row[3]) for row in found] == pytest.approx(first.costs)
    assert [float(row[4]) for row in found] == pytest.approx(second.costs)
    assert first.hull == pytest.approx(0.5)
    assert second.hull == pytest.approx(0.53125)
    assert "ĉ(4) = 0.5," in TEXT
    assert "ĉ(4) = 0.45 + (0.775 − 0.45) / 4 = 0.53125" in TEXT


def test_how_a_step_is_ruled_out(bound: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prices that are tried one after the other, the least sums, the ranges of samples, and the linear program between."""
    values, programs, value, program = list[Any](), list[Any](), Lower.value, Lower.program

    def told_value(self: Lower, part: Part, T: float, prices: Any, intervals: Any) -> Any:
        values.append((prices, *value(self, part, T, prices, intervals)))
        return values[-1][1:]

    def told_program(self: Lower, *given: Any) -> Any:
        z, prices, columns, ranges = program(self, *given)
        programs.append((z, prices, dict(columns)))
        return z, prices, columns, ranges

    monkeypatch.setattr(Lower, "value", told_value)
    monkeypatch.setattr(Lower, "program", told_program)
    assert bound.ruled_out(Part(2, 2, 0.0), example.RULED_OUT)
    (first, one, _, ranges), (second, other, *_) = values
    assert first.tolist() == [0.5, 0.25]
    assert second.tolist() == pytest.approx([0.55, 0.225])
    assert [one, other] == pytest.approx([1.0, 1.0625])
    assert "2 · 0.53125 = 1.0625 > 1" in TEXT
    assert tuple(ranges) == example.RANGES
    ((z, prices, columns),) = programs
    assert z == pytest.approx(1.2)
    assert prices.tolist() == pytest.approx([0.6, 0.2])
    assert "z = 1.2 and prices (0.6, 0.2)" in TEXT
    found = sorted((column.take, column.low, column.high) for column in columns)
    assert found == [((0, 2), 1, 1), ((1, 0), 4, 4), ((1, 1), 6, 7)]
    assert "`b b` for 1 sample, `a` for 4, and `a` with one `b` for 7" in TEXT


def test_what_is_not_ruled_out(bound: Lower) -> None:
    T = example.POSSIBLE
    assert not bound.ruled_out(Part(2, 2, 0.0), T)
    assert all(bound.ruled_out(Part(R, R, 0.0), T) for R in (1, 3))
    found = example.curve(bound, T, np.array([0.5, 0.25]))
    assert found.lines[2] == "b b"
    assert found.lines[4] == "a"
    columns = [bound.cheapest(Part(2, 2, 0.0), T, np.array([0.5, 0.25]), n, n, np.inf)[1] for n in (3, 5)]
    z, *_ = bound.program(Part(2, 2, 0.0), dict.fromkeys(columns), list(example.RANGES))
    assert z == pytest.approx(1)
    assert "so z = 1," in TEXT


def test_where_the_bound_and_the_plan_end() -> None:
    problem = example.problem()
    assert example.lower(problem).run(np.inf, EFFORTS["normal"].before) == pytest.approx(14.98, abs=0.005)
    assert "at 14.98 s" in TEXT
    plan = make_plan(problem.profile, problem.cluster, example.BATCH)
    replicas = sorted(plan.replicas, key=lambda replica: -replica.samples)
    stages = [[(problem.cluster.device(s.device).type, s.layers) for s in replica.stages] for replica in replicas]
    assert [replica.samples for replica in replicas] == [5, 3]
    assert stages == [[("a", (0, 3))], [("b", (0, 2)), ("b", (2, 3))]]
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == pytest.approx(15)
    assert plan.predicted.lower_bound_seconds == pytest.approx(15)
    assert plan.predicted.proof == "exhaustive"
    assert "Its step is 15 s" in TEXT


def test_the_picture_is_what_is_drawn() -> None:
    assert example.picture() == example.PICTURE.read_text("utf-8"), "the drawing has changed: run 'make pictures'"
