"""pipeline_times against a slow search for what is ready next; and simulate's spans."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.plan import Plan
from hetpipe.partitioners.pipelines.line_cuts import about
from hetpipe.partitioners.stage_kinds.plan_class import depth
from hetpipe.predict import pipeline
from hetpipe.predict.pipeline import Array, PipelineCosts, arguments, pipeline_times, stage_ends
from hetpipe.predict.simulator import simulate
from tests.support.strategies import make_cluster, make_profile


def searched(costs: PipelineCosts, depths: list[int]) -> list[tuple[list[float], list[float]]]:
    """Round after round over the stages, each goes as far as it can: a forward while fewer than `depth` micro-batches are
    in flight, else a backward; it stops at the first action whose input has not arrived."""
    n, m = len(costs.forward), len(costs.which)
    ends: list[tuple[list[float], list[float]]] = [([], []) for _ in range(n)]
    arrived: dict[tuple[str, int, int], float] = {("F", 0, i): 0.0 for i in range(m)}
    arrived |= {("B", n - 1, i): 0.0 for i in range(m)}
    clock, links = [0.0] * n, {(kind, s): 0.0 for kind in "FB" for s in range(-1, n)}
    remaining = (2 * n - costs.frozen) * m
    while remaining:
        before = remaining
        for s in range(n):
            while len(ends[s][0 if s < costs.frozen else 1]) < m:
                f, b = len(ends[s][0]), len(ends[s][1])
                ahead = f < m and (s < costs.frozen or f - b < depths[s])
                kind, i, row = ("F", f, costs.forward) if ahead else ("B", b, costs.backward)
                if (kind, s, i) not in arrived or (kind == "B" and b >= f):
                    break
                clock[s] = max(clock[s], arrived[kind, s, i]) + float(row[s, costs.which[i]])
                ends[s]["FB".index(kind)].append(clock[s])
                to, wire = (s + 1, s) if kind == "F" else (s - 1, s - 1)
                if 0 <= to < n and not (kind == "B" and to < costs.frozen):
                    links[kind, wire] = max(clock[s], links[kind, wire]) + float(costs.occupied[wire, costs.which[i]])
                    arrived[kind, to, i] = links[kind, wire] + float(costs.latency[wire])
                remaining -= 1
        if remaining == before:
            raise ValueError("stalled")
    return ends


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineCosts, list[int]]:
    n, m, sizes = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(1, 3))
    seconds = st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0, 1.7, 40.0]) | st.floats(0, 3)

    def rows(count: int, size: int) -> Array:
        return np.array(draw(st.lists(seconds, min_size=count * size, max_size=count * size))).reshape(count, size)

    which = np.array(draw(st.lists(st.integers(0, sizes - 1), min_size=m, max_size=m)))
    frozen = draw(st.integers(0, n - 1) | st.just(0))  # which of these do not take part
    costs = PipelineCosts(
        forward=rows(n, sizes),
        backward=rows(n, sizes),
        occupied=rows(n - 1, sizes),
        latency=rows(n - 1, 1)[:, 0].copy(),
        which=which,
        frozen=frozen,
    )
    return costs, sorted(draw(st.lists(st.integers(1, m + 2), min_size=n, max_size=n)), reverse=True)


@given(pipelines())
def test_as_a_search_for_what_is_ready(case: tuple[PipelineCosts, list[int]]) -> None:
    costs, depths = case
    for found, expected in zip(pipeline_times(costs, depths), searched(costs, depths), strict=True):
        assert found.forward == pytest.approx(expected[0], rel=1e-12, abs=0)
        assert found.backward == pytest.approx(expected[1], rel=1e-12, abs=0)


@settings(deadline=None)  # numba compiles
@given(pipelines())
def test_compiled_to_the_bit(case: tuple[PipelineCosts, list[int]]) -> None:
    costs, depths = case
    found = list[list[Any]]()
    for run in (pipeline.run, pipeline.ready()):
        given = arguments(costs, depths, np.zeros((2, len(depths), len(costs.which))))
        run(*given, costs.frozen)
        found.append([x.tolist() for x in given[:3]])
    assert found[0] == found[1]
    ends = stage_ends(costs, depths)
    assert ends == [stage.end for stage in pipeline_times(costs, depths)]
    assert ends == found[0][0][0]


@settings(deadline=None)  # numba compiles
@given(st.integers(1, 6), st.integers(1, 60), st.booleans(), st.sampled_from([1, 2, 3]), st.randoms(use_true_random=False))
def test_what_repeats_itself_is_skipped(n: int, m: int, rest: bool, forwards: int, random: Random) -> None:
    times = [[random.choice([0.0, 0.5, 1.0, 1.01, random.random()]) for _ in range(n)] for _ in range(3)]
    forward, backward, occupied = (np.array([row, row[::-1]]).T.copy() for row in times)
    latency, which = np.array(times[0])[1:].copy(), np.array([0] * (m - 1) + [int(rest)])
    for frozen in range(n):
        depths = [m if s < frozen else depth(forwards, n - s, m) for s in range(n)]
        costs = PipelineCosts(
            forward=forward, backward=backward, occupied=occupied[1:].copy(), latency=latency, which=which, frozen=frozen
        )
        found = about(costs.forward, costs.backward, costs.occupied, latency, which, np.array(depths), frozen)
        assert found.tolist() == pytest.approx(stage_ends(costs, depths), rel=1e-9)


def two_stages(backward: float) -> PipelineCosts:
    """Of three micro-batches, over a link that takes no time."""
    ones = np.ones((2, 1))
    return PipelineCosts(
        forward=ones, backward=backward * ones, occupied=np.zeros((1, 1)), latency=np.zeros(1), which=np.zeros(3, np.int64)
    )


def test_three_micro_batches_over_two_stages() -> None:
    first, second = pipeline_times(two_stages(2.0), [2, 1])
    #   stage 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. .. B2 B2
    #   stage 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2
    assert (first.forward, first.backward) == ([1, 2, 7], [6, 9, 12])
    assert (second.forward, second.backward) == ([2, 5, 8], [4, 7, 10])


def test_depths_that_rise_are_refused() -> None:
    costs = two_stages(1.0)
    with pytest.raises(ValueError, match="warm-up depth 2 of stage 1 is above depth 1 of stage 0"):
        pipeline_times(costs, [1, 2])
    assert pipeline_times(costs, [4, 5]) == pipeline_times(costs, [3, 3])  # never above m


def test_spans_are_built_when_read_and_once() -> None:
    cluster, profile = make_cluster([{"a": 2}]), make_profile({"a": [1.0, 2.0]}, optimizer=0.5)
    stages = [{"layers": [0, 1], "devices": ["n0/0"]}, {"layers": [1, 2], "devices": ["n0/1"]}]
    replicas = [{"microbatch_sizes": [1, 1], "stages": stages}]
    plan = Plan.parse({"format": "hetpipe.plan/1", "model": "test", "global_batch": 2, "replicas": replicas}, "plan")
    timeline = simulate(plan, profile, cluster)
    spans = timeline.spans
    assert len(spans) == 2 * 2 * 2 + 2 * 2 + 2  # actions, transfers, optimizers
    assert spans[0] is spans[0]
    assert spans == tuple(spans)
    assert {span.kind for span in spans} == {"F", "B", "send", "optimizer"}
    assert max(span.end for span in spans) == timeline.step_seconds
    assert spans[:1] == (spans[0],)
    assert timeline == simulate(plan, profile, cluster)
