"""One pipeline by itself: a schedule and its durations → when every action ends. The longest path of the schedule's graph: an
action waits for the one before it on its stage, a forward for its activation, a backward for its gradient. Transfers are
first-in first-out on the directed link between two neighbouring stages and overlap compute. First stages that run forwards only
go on as long as there is input: what they wait for room is left out, as the next stage has room for more than it works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetpipe.spec.schedule import check_depths


class StageTimes(NamedTuple):
    """Finish times of one stage in one step: forward[i] and backward[i] of micro-batch i (starts are finish − duration); no
    backwards where a stage runs forwards only."""

    forward: list[float]
    backward: list[float]

    @property
    def end(self) -> float:
        """When the stage has done all."""
        return (self.backward or self.forward)[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCosts:
    """Durations of one pipeline: `forward` and `backward` [n][m] seconds; `occupied` [n − 1][m] seconds that a boundary's
    transfer holds its link (either direction) and `latency` [n − 1] seconds on top. The first `frozen` stages run forwards only,
    and nothing comes back to them."""

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    occupied: Sequence[Sequence[float]]
    latency: Sequence[float]
    frozen: int = 0


def forward_depths(depths: Sequence[int], frozen: int, m: int) -> list[int]:
    """Warm-up depths [n], those of the first `frozen` stages, which run forwards only, as if they did all of them first."""
    return [m if s < frozen else min(depth, m) for s, depth in enumerate(depths)]


def pipeline_times(costs: PipelineCosts, depths: Sequence[int]) -> list[StageTimes]:
    """Finish time of every action for warm-up `depths` [n], which must not rise along the pipeline. O(n·m).

    Nothing is searched: first every stage's warm-up forwards, stage by stage; then in round i the backwards of
    micro-batch i from the last stage to the first, and the forwards that these let in, i + depth(s), from the
    first stage to the last. Each stage's order is its schedule's, and every action stands behind those it waits
    for: forward j of stage s − 1 is let in by round j − depth(s − 1), no later than round j − depth(s).
    """
    n, m, frozen = len(costs.forward), len(costs.forward[0]), costs.frozen
    depths = forward_depths(depths, frozen, m)
    check_depths(depths)
    none = [0.0] * m
    down, up = (
        [*costs.occupied, none],
        [none, *costs.occupied],
    )  # of the boundary behind and before each stage
    latency, latency_up = [*costs.latency, 0.0], [0.0, *costs.latency][frozen:][::-1]
    stages, arrived = [], none
    for row, busy, delay, depth in zip(costs.forward, down, latency, depths, strict=True):
        stage = _warm_up(row, busy, delay, depth, arrived)
        stages.append(stage)
        arrived = stage.arrivals
    rows = list(zip(*reversed(costs.backward[frozen:]), strict=True))
    wires = list(zip(*reversed(up[frozen:]), strict=True))
    forwards, stages = stages, stages[frozen:]
    clock, links = [stage.now for stage in stages], [0.0] * (n - frozen)
    backward = []
    for i in range(m):
        ends, links = _backwards(clock, rows[i], links, wires[i], latency_up)
        backward.append(ends)
        clock = ends.copy()
        if i + depths[-1] < m:
            _forwards(clock, i, stages, m)
    columns = [[]] * frozen + [list(ends) for ends in zip(*backward, strict=True)]
    return [StageTimes(stage.ends, ends) for stage, ends in zip(forwards, columns, strict=True)]


@dataclass(slots=True)
class _Forwards:
    """The forwards of one stage so far: when each ended, `arrivals` at the next stage, and when its link is free.
    `now` is when the warm-up ended."""

    row: Sequence[float]
    busy: Sequence[float]
    delay: float
    depth: int
    arrived: Sequence[float]
    ends: list[float]
    arrivals: list[float]
    link: float
    now: float


def _warm_up(
    row: Sequence[float], busy: Sequence[float], delay: float, depth: int, arrived: Sequence[float]
) -> _Forwards:
    """A stage's first `depth` forwards. Comparisons instead of max(), which takes three times as long."""
    now = link = 0.0
    ends, arrivals = [], []
    for arrival, seconds, sending in zip(arrived, row[:depth], busy, strict=False):
        if arrival > now:
            now = arrival
        now += seconds
        ends.append(now)
        if now > link:
            link = now
        link += sending
        arrivals.append(link + delay)
    return _Forwards(row, busy, delay, depth, arrived, ends, arrivals, link, now)


def _backwards(
    clock: list[float],
    row: Sequence[float],
    links: list[float],
    busy: Sequence[float],
    delays: Sequence[float],
) -> tuple[list[float], list[float]]:
    """One micro-batch's backwards: when each stage's ends, and when each link is free then, last stage first
    (as are `row`, `links`, `busy` and `delays`; `clock` and the ends are first stage first)."""
    arrival = 0.0
    ends, free = [], []
    for now, seconds, link, sending, delay in zip(reversed(clock), row, links, busy, delays, strict=True):
        if arrival > now:
            now = arrival
        now += seconds
        ends.append(now)
        if now > link:
            link = now
        link += sending
        free.append(link)
        arrival = link + delay
    ends.reverse()
    return ends, free


def _forwards(clock: list[float], i: int, stages: Sequence[_Forwards], m: int) -> None:
    """The forwards that micro-batch i's backwards let in; `clock` moves on."""
    for s, stage in enumerate(stages):
        f = i + stage.depth
        if f >= m:
            continue
        now, arrival = clock[s], stage.arrived[f]
        if arrival > now:
            now = arrival
        now += stage.row[f]
        stage.ends.append(now)
        clock[s] = now
        link = stage.link
        if now > link:
            link = now
        link += stage.busy[f]
        stage.link = link
        stage.arrivals.append(link + stage.delay)
