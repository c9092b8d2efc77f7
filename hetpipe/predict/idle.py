"""Why a device is idle: every moment of a step in which it does not compute, with its cause.

| cause | the device waits |
|---|---|
| fill and drain | for the first micro-batch to reach it or to come back, after its last one, and where forwards have run out |
| slower stage | for another stage of its pipeline, which takes longer than its own |
| link | for a message under way to it, or to the stage that it waits for |
| gradient sum | for other replicas, and for the sums of gradients with them, after its own pipeline has ended |
| slower optimizer | for an optimizer longer than its own: before a predicted step in its pipeline, behind a measured one in any |
| overhead | for nothing that a timeline shows: between actions of a measured step, and after its last optimizer |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hetpipe.predict.timeline import Span, Timeline

Cause = Literal["fill and drain", "slower stage", "link", "gradient sum", "slower optimizer", "overhead"]
CAUSES: tuple[Cause, ...] = ("fill and drain", "slower stage", "link", "gradient sum", "slower optimizer", "overhead")
Interval = tuple[float, float]
LEAST_GAP = 1e-14  # of a step: no interval
_Key = tuple[str, int]  # F or B, micro-batch


class Gap(NamedTuple):
    """An idle interval of one device, in seconds since the step began."""

    start: float
    end: float
    cause: Cause


@dataclass(slots=True)
class _Stage:
    """What one device does: its F and B by kind and micro-batch, its optimizers before and behind them, the idle interval before
    each action, and in it the intervals in which a message is under way."""

    actions: dict[_Key, Span]
    optimizers: list[Span]
    before: dict[_Key, Interval]
    links: dict[_Key, list[Interval]]
    order: list[Interval]  # all of `links`, by time

    def linked(self, a: float, b: float) -> list[Interval]:
        """The parts of `order` within [a, b]."""
        return _within(self.order[max(0, bisect_right(self.order, (a, a)) - 1) :], a, b)

    @property
    def leading(self) -> list[Span]:
        """The optimizers before the first action."""
        first = min((span.start for span in self.actions.values()), default=-1.0)
        return [span for span in self.optimizers if span.start <= first]

    @property
    def lead(self) -> float:
        """When the optimizers before the first action have ended."""
        return max((span.end for span in self.leading), default=0.0)

    @property
    def last_backward(self) -> float:
        return max((span.end for span in self.actions.values()), default=0.0)

    @property
    def depth(self) -> int:
        """Forwards before the first backward."""
        backward = min((span.start for (kind, _), span in self.actions.items() if kind == "B"), default=float("inf"))
        return sum(kind == "F" and span.start < backward for (kind, _), span in self.actions.items())


def idle_gaps(timeline: Timeline) -> dict[str, list[Gap]]:
    """Per device its idle intervals, in order; with the intervals in which it computes they fill the step, once.

    An idle interval before a forward (backward) is a wait for the stage before (behind) it. As long as the message is under
    way the cause is the link, also where the awaited stage itself waits for one. The rest is filling before the first forward
    and before the first backward. After its last forward a stage would do one more in each round if there were more
    micro-batches, as stages behind it still do: so much of a wait, its own F, is draining, and in a pipeline of equal stages
    all of it. What is left is the wait for a slower stage. Behind the last backward come the draining of the own pipeline,
    other replicas and the sums with them, and, where optimizers are the last, slower ones. O(actions × stages)."""
    replicas: dict[int, dict[int, dict[str, _Stage]]] = {}
    for span in timeline.spans:
        if span.kind in ("F", "B", "optimizer"):
            devices = replicas.setdefault(span.replica, {}).setdefault(span.stage, {})
            stage = devices.setdefault(span.device, _Stage({}, [], {}, {}, []))
            if span.kind == "optimizer" or span.microbatch is None:
                stage.optimizers.append(span)
            else:
                stage.actions[span.kind, span.microbatch] = span
    ends = {
        r: max(one.last_backward for devices in stages.values() for one in devices.values()) for r, stages in replicas.items()
    }
    optimized = max((span.end for span in timeline.spans if span.kind == "optimizer"), default=0.0)
    found: dict[str, list[Gap]] = {}
    for r, stages in replicas.items():
        pipeline = [stages[s] for s in sorted(stages)]
        begin = max(one.lead for devices in pipeline for one in devices.values())
        _mark_links(pipeline, begin)
        marks = (ends[r], max(ends.values()), optimized, timeline.step_seconds)
        least = min(one.depth for one in pipeline[-1].values())
        for s, group in enumerate(pipeline):
            drained = _draining(pipeline[:s])
            for device, one in group.items():
                gaps = [Gap(one.lead, begin, "slower optimizer"), *_gaps(one, least, drained, marks)]
                found[device] = sorted(gap for gap in gaps if gap.end - gap.start > LEAST_GAP * timeline.step_seconds)
    return found


def idle_seconds(timeline: Timeline) -> dict[str, dict[Cause, float]]:
    """Per device the seconds of each cause; they add up to the step less the seconds in which it computes."""
    return {
        device: {cause: sum(gap.end - gap.start for gap in gaps if gap.cause == cause) for cause in CAUSES}
        for device, gaps in idle_gaps(timeline).items()
    }


def _mark_links(pipeline: Sequence[dict[str, _Stage]], begin: float) -> None:
    """Fill in `before` and `links` of all devices of a pipeline that begins so late. The earliest interval comes first, so that
    what the awaited stage itself waited for until then is known."""
    waits = []
    for s, devices in enumerate(pipeline):
        for one in devices.values():
            now = begin
            for key, span in sorted(one.actions.items(), key=lambda item: (item[1].start, item[1].end)):
                if span.start > now:
                    one.before[key] = (now, span.start)
                    waits.append((span.start, s, key, one))
                now = max(now, span.end)
    for b, s, key, one in sorted(waits, key=lambda wait: wait[:2]):
        beside = s - 1 if key[0] == "F" else s + 1
        if 0 <= beside < len(pipeline) and key in (awaited := next(iter(pipeline[beside].values()))).actions:
            a, sent = one.before[key][0], awaited.actions[key].end
            own = [(max(a, sent), b)] if sent < b else []
            one.links[key] = awaited.linked(a, min(b, sent)) + own
            one.order += one.links[key]


def _draining(before: Sequence[dict[str, _Stage]]) -> list[Interval]:
    """When a message is under way while the last micro-batch goes back through these stages."""
    found: list[Interval] = []
    for devices in before:
        one = next(iter(devices.values()))
        last = max((i for kind, i in one.actions if kind == "B"), default=-1)
        found += one.links.get(("B", last), ())
    return _union(found)


def _gaps(one: _Stage, least: int, drained: Sequence[Interval], marks: tuple[float, float, float, float]) -> list[Gap]:
    """The idle intervals of one device; `least` is the depth of the last stage of its pipeline."""
    m, depth = sum(kind == "F" for kind, _ in one.actions), one.depth
    gaps: list[Gap] = []
    for key, (a, b) in one.before.items():
        kind, i = key
        if key not in one.links:
            gaps.append(Gap(a, b, "overhead"))  # nothing is waited for
            continue
        links = one.links.get(key, [])
        draining = b - a if i == 0 else 0.0
        if kind == "B" and least <= m - i < depth and i > 0 and ("F", i) in one.actions:
            draining = one.actions["F", i].end - one.actions["F", i].start
        gaps += [Gap(*interval, "link") for interval in links]
        for x, y in _without((a, b), links):
            cut = min(y, x + draining)
            draining -= cut - x
            gaps += [Gap(x, cut, "fill and drain"), Gap(cut, y, "slower stage")]
    return gaps + _tail(one, drained, marks)


def _tail(one: _Stage, drained: Sequence[Interval], marks: tuple[float, float, float, float]) -> list[Gap]:
    """The idle intervals behind the last backward. Where the optimizer came first, all up to the end is for the sums."""
    pipeline, pipelines, optimized, step = marks
    gaps, now, leading = list[Gap](), one.last_backward, one.leading
    after = sorted((span.start, span.end) for span in one.optimizers if span not in leading)
    for start, end in after or [(step, step)] * bool(leading):
        start = max(now, start)
        ended = min(max(now, pipeline), start)
        links = _within(drained, now, ended)
        gaps += [Gap(*interval, "link") for interval in links]
        gaps += [Gap(*interval, "fill and drain") for interval in _without((now, ended), links)]
        gaps.append(Gap(ended, start, "gradient sum"))
        now, pipeline = max(now, end), 0.0
    if not one.optimizers:
        gaps += [Gap(now, max(now, pipeline), "fill and drain"), Gap(max(now, pipeline), max(now, pipelines), "gradient sum")]
        now = max(now, pipelines)
    last = max(now, optimized)
    return [*gaps, Gap(now, last, "slower optimizer"), Gap(last, step, "overhead")]


def _within(intervals: Iterable[Interval], a: float, b: float) -> list[Interval]:
    """The parts of the intervals, which are in order, that lie in [a, b]."""
    found = []
    for x, y in intervals:
        if x >= b:
            break
        if y > a:
            found.append((max(x, a), min(y, b)))
    return found


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for a, b in sorted(intervals):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return found


def _without(whole: Interval, parts: Sequence[Interval]) -> list[Interval]:
    """What is left of an interval without these parts of it, which are in order and apart."""
    left, now = list[Interval](), whole[0]
    for a, b in parts:
        left.append((now, a))
        now = b
    return [(a, b) for a, b in [*left, (now, whole[1])] if b > a]
