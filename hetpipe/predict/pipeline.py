"""One pipeline by itself: a schedule and its durations → when every action ends. The longest path of the schedule's graph: an
action waits for the one before it on its stage, a forward for its activation, a backward for its gradient. Transfers are
first-in first-out on the directed link between two neighbouring stages and overlap compute. First stages that run forwards only
go on as long as there is input: what they wait for room is left out, as the next stage has room for more than it works on.

Nothing is searched: first every stage's warm-up forwards, stage by stage; then in round i the backwards of micro-batch i from the
last stage to the first, and the forwards that these let in, i + depth(s), from the first stage to the last. Each stage's order is
its schedule's, and every action stands behind those it waits for: forward j of stage s − 1 is let in by round j − depth(s − 1),
no later than round j − depth(s).

The loops are functions of numbers and arrays. Python runs them for few actions; for many they are compiled, as they are by the
planners, which have compiled loops of their own around them (`compiled.twin`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.schedule import check_depths

Array = NDArray[np.float64]
Index = NDArray[np.int64]
FEW_FORWARDS = 1_000_000  # forwards of a process: Python is through in the time that it takes to read what is compiled
SAME = 1e-9  # to such a part all has to repeat itself

_by_python = 0  # forwards so far


class StageTimes(NamedTuple):
    """Finish times of one stage in one step: forward[i] and backward[i] of micro-batch i (starts are finish − duration); no
    backwards where a stage runs forwards only."""

    forward: list[float]
    backward: list[float]

    @property
    def end(self) -> float:
        """When the stage has done all."""
        return (self.backward or self.forward)[-1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PipelineCosts:
    """Durations of one pipeline of n stages and m micro-batches, each of one of K sizes, `which` [m]. By size `forward` and
    `backward` [n, K] seconds, and `occupied` [n − 1, K] seconds that a boundary's transfer holds its link (either direction);
    `latency` [n − 1] seconds on top. The first `frozen` stages run forwards only, and nothing comes back to them."""

    forward: Array
    backward: Array
    occupied: Array
    latency: Array
    which: Index
    frozen: int = 0


def forward_depths(depths: Sequence[int], frozen: int, m: int) -> list[int]:
    """Warm-up depths [n], those of the first `frozen` stages, which run forwards only, as if they did all of them first."""
    return [m if s < frozen else min(depth, m) for s, depth in enumerate(depths)]


def pipeline_times(costs: PipelineCosts, depths: Sequence[int]) -> list[StageTimes]:
    """Finish times of each stage for warm-up `depths` [n]; see `action_ends`."""
    return stage_times(action_ends(costs, depths), costs.frozen)


def stage_times(ends: Array, frozen: int) -> list[StageTimes]:
    """When the forwards and backwards of each stage end [2, n, m], as lists; the first `frozen` stages have no backwards."""
    stages = zip(*ends.tolist(), strict=True)
    return [StageTimes(forward, backward if s >= frozen else []) for s, (forward, backward) in enumerate(stages)]


def action_ends(costs: PipelineCosts, depths: Sequence[int]) -> Array:
    """When the forwards and backwards of each stage end [2, n, m] (0 where there is no backward) for warm-up `depths` [n].
    ValueError where these rise along the pipeline. O(n·m)."""
    ends = np.zeros((2, len(depths), len(costs.which)))
    _timed(costs, depths, ends)
    return ends


def stage_ends(costs: PipelineCosts, depths: Sequence[int]) -> list[float]:
    """When each stage has done all [n]: the last of what `action_ends` has of it."""
    return _timed(costs, depths, np.zeros((2, len(depths), 0)))


def _timed(costs: PipelineCosts, depths: Sequence[int], ends: Array) -> list[float]:
    """When each stage has done all [n]; the end of each action goes to `ends`, if there is room in it."""
    global _by_python
    given, forwards = arguments(costs, depths, ends), len(depths) * len(costs.which)
    if ready.cache_info().currsize or _by_python + forwards > FEW_FORWARDS:
        ready()(*given, costs.frozen)
    else:
        _by_python += forwards
        views: list[Any] = [*(x.data for x in given), costs.frozen]  # Python reads numbers of these twice as fast as of arrays
        run(*views)
    found: list[float] = given[0][0].tolist()
    return found


def arguments(
    costs: PipelineCosts, depths: Sequence[int], ends: Array
) -> tuple[Array, Array, Array, Array, Array, Array, Array, Index, Index]:
    """What `run` wants beside `frozen`. ValueError where `depths` rise along the pipeline."""
    n, m = len(depths), len(costs.which)
    depths = forward_depths(depths, costs.frozen, m)
    check_depths(depths)
    durations = costs.forward, costs.backward, costs.occupied, costs.latency
    return np.zeros((3, n)), np.zeros((n, m)), ends, *durations, costs.which, np.array(depths, dtype=np.int64)


@cache
def ready() -> Callable[..., None]:
    """`run`, compiled, or read from disk: outside of any time limit."""
    from hetpipe.predict.compiled import get_ready, twin  # and with them numba, which few actions do without

    found, one = twin(run, PARTS), np.ones((1, 1))
    costs = PipelineCosts(forward=one, backward=one, occupied=one[:0], latency=np.zeros(0), which=np.zeros(1, np.int64))
    get_ready(lambda: found(*arguments(costs, [1], np.zeros((2, 1, 1))), 0))
    return found


def _forward(
    s: int, i: int, state: Array, arrivals: Array, ends: Array, forward: Array, occupied: Array, latency: Array, which: Index
) -> None:
    """Forward i of stage s, and its activation's way to the next. Comparisons instead of max(), which takes Python twice as
    long."""
    now, size = state[0, s], which[i]
    if s > 0 and arrivals[s - 1, i] > now:
        now = arrivals[s - 1, i]
    now += forward[s, size]
    state[0, s] = now
    if ends.shape[2] > 0:
        ends[0, s, i] = now
    if s < len(latency):
        free = state[1, s]
        if now > free:
            free = now
        free += occupied[s, size]
        state[1, s], arrivals[s, i] = free, free + latency[s]


def _warm(
    state: Array, arrivals: Array, ends: Array, forward: Array, occupied: Array, latency: Array, which: Index, depths: Index
) -> None:
    """The forwards before each stage's first backward."""
    for s in range(len(depths)):
        for i in range(depths[s]):
            _forward(s, i, state, arrivals, ends, forward, occupied, latency, which)


def _back(
    i: int,
    state: Array,
    arrivals: Array,
    ends: Array,
    forward: Array,
    backward: Array,
    occupied: Array,
    latency: Array,
    which: Index,
    depths: Index,
    frozen: int,
) -> None:
    """The backwards of micro-batch i, and on each stage the forward that comes next."""
    arrival, size = 0.0, which[i]
    for s in range(len(depths) - 1, frozen - 1, -1):
        now = state[0, s]
        if arrival > now:
            now = arrival
        now += backward[s, size]
        state[0, s] = now
        if ends.shape[2] > 0:
            ends[1, s, i] = now
        if s > frozen:
            free = state[2, s]
            if now > free:
                free = now
            free += occupied[s - 1, size]
            state[2, s], arrival = free, free + latency[s - 1]
    for s in range(len(depths)):
        if i + depths[s] < len(which):
            _forward(s, i + depths[s], state, arrivals, ends, forward, occupied, latency, which)


def run(
    state: Array,
    arrivals: Array,
    ends: Array,
    forward: Array,
    backward: Array,
    occupied: Array,
    latency: Array,
    which: Index,
    depths: Index,
    frozen: int,
) -> None:
    """Run a pipeline of n stages and m micro-batches. Durations are as `PipelineCosts` has them; stage s does `depths[s]`
    forwards before its first backward, and the first `frozen` stages, of depth m, do only forwards.

    It writes into what it is given as zeros: into `state` [3, n] when each stage has done all, and when its links to the next and
    to the stage before are free; into `arrivals` [n, m] when activations are at the next stage; and into `ends` [2, n, m], if it
    is not [2, n, 0], when each forward and backward ends."""
    _warm(state, arrivals, ends, forward, occupied, latency, which, depths)
    for i in range(len(which)):
        _back(i, state, arrivals, ends, forward, backward, occupied, latency, which, depths, frozen)


def _later(i: int, every: int, state: Array, before: Array, arrivals: Array, depths: Index) -> float:
    """How much later all is after micro-batch i than it was `every` before; −1 where not all is as much."""
    n, later = len(depths), state[0, 0] - before[0, 0]
    for s in range(n):
        for x in range(3):
            if state[x, s] > 0 and abs(state[x, s] - before[x, s] - later) > later * SAME:
                return -1.0
        for j in range(i + depths[min(s + 1, n - 1)] + 1, i + depths[s] + 1):
            if abs(arrivals[s, j] - arrivals[s, j - every] - later) > later * SAME:
                return -1.0
    return float(later)


def about(forward: Array, backward: Array, occupied: Array, latency: Array, which: Index, depths: Index, frozen: int) -> Array:
    """When each stage has done all [n], as `run` has it but for rounding: once all repeats itself, as many micro-batches as there
    are of one size are skipped. All is compared to what it was at the last power of two (Brent 1980). (Of a first stage of depth
    m, nothing is.)"""
    n, m = len(depths), len(which)
    arrivals, state, before, ends = np.zeros((n, m)), np.zeros((3, n)), np.zeros((3, n)), np.zeros((2, n, 0))
    _warm(state, arrivals, ends, forward, occupied, latency, which, depths)
    i = then = 0
    while i < m:
        _back(i, state, arrivals, ends, forward, backward, occupied, latency, which, depths, frozen)
        every = i - then
        times = (m - 2 - depths[0] - i) // max(1, every)  # that all could repeat itself
        if every > 0 and times > 0:
            later = _later(i, every, state, before, arrivals, depths)
            if later >= 0:
                for s in range(n):
                    for j in range(i + depths[s], i + depths[min(s + 1, n - 1)], -1):
                        arrivals[s, j + times * every] = arrivals[s, j] + times * later
                    for x in range(3):
                        state[x, s] += times * later
                i += times * every
        if every >= then:
            for x in range(3):  # the whole array would take numba a second more to compile
                for s in range(n):
                    before[x, s] = state[x, s]
            then = i
        i += 1
    found: Array = state[0]
    return found


PARTS: tuple[Callable[..., object], ...] = (_forward, _warm, _back, _later)  # of `run` and `about`, to be compiled with them
