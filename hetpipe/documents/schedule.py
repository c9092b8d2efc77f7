"""Schedules as data: per stage the list of its actions. Apart from whatever runs or simulates them.

A schedule of this project is its warm-up depths: depth w of a stage is the number of forwards before its first
backward; then backwards and forwards alternate. Depth m everywhere is GPipe (Huang et al. 2019); n − s on stage s of n is
1F1B (PipeDream-Flush, Narayanan et al. 2021). At most min(w, m) micro-batches are in flight on a stage.

First stages that hold nothing that trains, nor follow anything that does, run forwards only, whatever their depth: they keep
nothing for a backward, and go on as soon as there is room for what they send (`FORWARD_ONLY`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b"]
FORWARD_ONLY = 2  # micro-batches in flight on a stage that keeps nothing for a backward


class Action(NamedTuple):
    """One computation: stage 2's forward of micro-batch 0 is written `2F0`."""

    stage: int
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def default_depths(schedule: ScheduleName, n: int, m: int) -> tuple[int, ...]:
    """Warm-up depth of each of `n` stages for `m` micro-batches, within [1, m]."""
    return tuple(max(1, min(m, m if schedule == "gpipe" else n - s)) for s in range(n))


def stage_actions(stage: int, depth: int, m: int) -> list[Action]:
    """The actions of one stage in order: `depth` forwards, then backward and forward in turn, then the last backwards.

    >>> [str(a) for a in stage_actions(0, 2, 3)]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    actions = [Action(stage, "F", i) for i in range(min(depth, m))]
    for i in range(m):
        actions.append(Action(stage, "B", i))
        if i + depth < m:
            actions.append(Action(stage, "F", i + depth))
    return actions


def pipeline_actions(depths: Sequence[int], m: int) -> list[list[Action]]:
    """The actions of every stage. Depths must not rise along the pipeline, or a stage would wait for ever."""
    check_depths(depths)
    return [stage_actions(s, depth, m) for s, depth in enumerate(depths)]


def check_depths(depths: Sequence[int]) -> None:
    """ValueError if a depth is below 1, or rises from a stage to the next (a deadlock)."""
    for s, depth in enumerate(depths):
        if depth < 1:
            raise ValueError(f"stage {s}: warm-up depth {depth} is below 1")
        if s and depth > depths[s - 1]:
            raise ValueError(
                f"warm-up depth {depth} of stage {s} is above depth {depths[s - 1]} of stage {s - 1}: stage {s} would wait for a "
                f"forward that stage {s - 1} starts only after a backward of stage {s}; "
                "give depths that never rise along the pipeline"
            )
