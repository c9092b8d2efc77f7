from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetpipe.documents.schedule
from hetpipe.documents.schedule import check_depths, default_depths, pipeline_actions, stage_actions


def words(stage: int, depth: int, m: int) -> str:
    return " ".join(str(action)[1:] for action in stage_actions(stage, depth, m))


def test_1f1b_of_three_stages_and_four_microbatches() -> None:
    assert default_depths("1f1b", 3, 4) == (3, 2, 1)
    assert words(0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(1, 2, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(2, 1, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    assert default_depths("gpipe", 2, 3) == (3, 3)
    assert words(0, 3, 3) == "F0 F1 F2 B0 B1 B2"


def test_depths_stay_within_the_microbatches() -> None:
    assert default_depths("1f1b", 4, 2) == (2, 2, 2, 1)


@given(st.integers(1, 6), st.integers(1, 12))
def test_each_action_once_and_backward_after_forward(depth: int, m: int) -> None:
    actions = stage_actions(0, depth, m)
    assert len(actions) == len(set(actions)) == 2 * m
    in_flight = most = 0
    for action in actions:
        in_flight += 1 if action.kind == "F" else -1
        assert in_flight >= 0
        most = max(most, in_flight)
    assert most == min(depth, m)


def test_depths_that_rise_would_deadlock() -> None:
    with pytest.raises(ValueError, match=r"warm-up depth 3 of stage 1 is above depth 2 of stage 0.*never rise"):
        pipeline_actions((2, 3), 4)
    with pytest.raises(ValueError, match="stage 1: warm-up depth 0 is below 1"):
        check_depths((1, 0))


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(hetpipe.documents.schedule).failed == 0
