"""What is missing where none of a simple rule's plans fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hetpipe.files.units import in_bytes
from hetpipe.partitioners.step_times.desk import Candidate, Desk, Rule
from hetpipe.planning.partition import PartitionError, Problem


class Shortage(NamedTuple):
    """The most bytes that are missing on a device of this type."""

    missing: float
    type: str


def nothing_fits(desk: Desk, candidates: Sequence[Candidate], rule: Rule, *, by_memory: bool) -> PartitionError:
    """The error, which says where the least is missing."""
    problem, types = desk.problem, desk.appraiser.types
    short = [
        sorted(Shortage(missing, types[kind]) for kind, missing in desk.missing(candidate).items()) for candidate in candidates
    ]
    i = min(range(len(short)), key=lambda i: (short[i][-1], candidates[i].place))
    worst = short[i][-1]
    usable = problem.cluster.device_types[worst.type].memory * (1 - problem.memory_reserve)
    change = _change(problem, short, rule if by_memory else None)
    return PartitionError(
        f"{rule.name}: {_text(desk, candidates[i], worst)}. {change}Unequal stages or fewer devices may fit: use 'auto'",
        missing_bytes=round(worst.missing),
        needed_bytes=round(usable + worst.missing),
    )


def _text(desk: Desk, candidate: Candidate, worst: Shortage) -> str:
    """A sentence that says which layers lack how many bytes on which device."""
    appraiser, names = desk.appraiser, [layer.name for layer in desk.problem.profile.layers]
    kind = appraiser.types.index(worst.type)
    draft = desk.moved(candidate.draft, candidate.starts[0])
    for pipeline, rows in appraiser.pipelines(draft):
        for s, ((lo, hi), depth) in enumerate(zip(pipeline.work.stages, pipeline.work.in_flight(draft.schedule), strict=True)):
            peak = appraiser.peak(kind, s, pipeline.work, depth)
            if kind == pipeline.types[s] and peak - appraiser.limits[kind] == worst.missing:
                device = appraiser.ids[draft.rows[rows[0]][pipeline.work.used[s]]]
                return (
                    f"layers {lo} ({names[lo]!r}) to {hi - 1} ({names[hi - 1]!r}) need {in_bytes(peak)} on device {device} of "
                    f"type {worst.type!r}, which has {in_bytes(appraiser.limits[kind])}{desk.problem.without_reserve}: "
                    f"{in_bytes(worst.missing)} are missing"
                )
    raise AssertionError("the shortage is of another candidate")


def _change(problem: Problem, shortages: list[list[Shortage]], again: Rule | None) -> str:
    """The least memory more, on as few types as possible, with which one of these plans fits, to the byte; or, where the
    plans depend on memory and one type is short, with which one of the new plans does, and with one byte less none."""
    least = min(shortages, key=lambda short: (len(short), sum(s.missing for s in short)))
    more = {s.type: _least_memory(problem, s) for s in sorted(least, key=lambda s: s.type)}

    def enough(part: int, kind: str) -> bool:
        if again is None:
            return True
        desk = Desk(with_more_memory(problem, more | {kind: part}))
        return any(not desk.missing(candidate) for candidate in again.candidates(desk))

    kind = min(more)
    if not enough(more[kind], kind):
        return ""
    if again is not None and len(more) == 1:
        more[kind] = first_enough(lambda part: enough(part, kind), 0, more[kind])
    each = " and ".join(f"each {kind!r} {in_bytes(part, up=True)}" for kind, part in more.items())
    return f"It would fit if you give {each} more memory. "


def _least_memory(problem: Problem, shortage: Shortage) -> int:
    """Bytes more in a device of the type, of which the reserve takes its part, that end the shortage."""
    memory, usable = problem.cluster.device_types[shortage.type].memory, 1 - problem.memory_reserve
    needed = round(memory * usable + shortage.missing)  # the peak of the stage
    return first_enough(lambda more: (memory + more) * usable >= needed, 0, math.ceil(shortage.missing / usable) + 1)


def with_more_memory(problem: Problem, more: Mapping[str, int]) -> Problem:
    """The problem with so many bytes more on each device of some types."""
    types = problem.cluster.device_types
    richer = {kind: types[kind].model_copy(update={"memory": types[kind].memory + part}) for kind, part in more.items()}
    return replace(problem, cluster=problem.cluster.model_copy(update={"device_types": {**types, **richer}}))


def first_enough(enough: Callable[[int], bool], low: int, high: int, close: float = 0.0) -> int:
    """A number above `low` that is enough, where `high` is; and one that is less by 1, or by this part, is not: the least, if all
    above it are."""
    while high - low > max(1, close * high):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
