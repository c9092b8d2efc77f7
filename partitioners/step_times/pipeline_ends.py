"""The simulator's pipelines, compiled: the same sums and maxima in the same order, so the same bits, much faster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.compiled import compiled, get_ready, inlined
from hetpipe.predict.cost import Costs
from hetpipe.predict.pipeline import PipelineCosts, forward_depths
from hetpipe.predict.simulator import costs_by_size
from hetpipe.spec.plan import ReplicaPlan
from hetpipe.spec.schedule import ScheduleName

Array = NDArray[np.float64]
Index = NDArray[np.int64]
SAME = 1e-9  # to such a part all has to repeat itself


def last_backwards(costs: PipelineCosts, which: Index, depths: Sequence[int]) -> list[float]:
    """When each stage has done all, as `pipeline_times` says. `costs` have a column for each different
    micro-batch, and `which` the column of each micro-batch [m]."""
    ready()
    stages = len(costs.forward)
    occupied = np.array(costs.occupied) if stages > 1 else np.zeros((0, len(costs.forward[0])))
    depth = np.array(forward_depths(depths, costs.frozen, len(which)), dtype=np.int64)
    latency = np.array(costs.latency, dtype=np.float64)
    times = np.array(costs.forward), np.array(costs.backward), occupied, latency
    found: list[float] = run(*times, which, depth, costs.frozen).tolist()
    return found


def replica_ends(costs: Costs, replica: ReplicaPlan, schedule: ScheduleName) -> list[float]:
    """When each stage of a replica has done all: its last backward, or, where it only runs forwards, the last of these."""
    _, which = np.unique(replica.microbatch_sizes, return_inverse=True)
    return last_backwards(costs_by_size(costs, replica), which, replica.depths(schedule))


@cache
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    one, none = np.ones((1, 1)), np.zeros((0, 1))
    given = one, one, none, np.zeros(0), np.zeros(1, np.int64), np.ones(1, np.int64), 0
    get_ready(lambda: (run(*given), about(*given)))


@inlined
def _forward(s: int, i: int, clock: Array, arrivals: Array, down: Array, forward: Array, occupied: Array, latency: Array,
             which: Index) -> None:  # fmt: skip
    """Forward i of stage s, and its activation's way to the next."""
    if s > 0:
        clock[s] = max(clock[s], arrivals[s - 1, i])
    clock[s] += forward[s, which[i]]
    if s + 1 < len(clock):
        down[s] = max(down[s], clock[s]) + occupied[s, which[i]]
        arrivals[s, i] = down[s] + latency[s]


@inlined
def _warm(clock: Array, arrivals: Array, down: Array, forward: Array, occupied: Array, latency: Array, which: Index,
          depths: Index) -> None:  # fmt: skip
    """The forwards before each stage's first backward."""
    for s in range(len(depths)):
        for i in range(depths[s]):
            _forward(s, i, clock, arrivals, down, forward, occupied, latency, which)


@inlined
def _back(i: int, clock: Array, arrivals: Array, down: Array, up: Array, forward: Array, backward: Array, occupied: Array,
          latency: Array, which: Index, depths: Index, frozen: int) -> None:  # fmt: skip
    """The backwards of micro-batch i, and on each stage the forward that comes next."""
    arrival = 0.0
    for s in range(len(depths) - 1, frozen - 1, -1):
        clock[s] = max(clock[s], arrival) + backward[s, which[i]]
        if s > frozen:
            up[s] = max(up[s], clock[s]) + occupied[s - 1, which[i]]
            arrival = up[s] + latency[s - 1]
    for s in range(len(depths)):
        if i + depths[s] < len(which):
            _forward(s, i + depths[s], clock, arrivals, down, forward, occupied, latency, which)


@compiled
def run(forward: Array, backward: Array, occupied: Array, latency: Array, which: Index, depths: Index, frozen: int) -> Array:
    """When each stage has done all [n], of a pipeline of n stages and m micro-batches.

    `forward` and `backward` [n, sizes] and, for each boundary, `occupied` and `latency` [n − 1, sizes] are seconds; `which` [m]
    is the size of each micro-batch; stage s does `depths[s]` forwards before its first backward, and the first `frozen` stages,
    of depth m, do only forwards."""
    n, m = len(depths), len(which)
    arrivals, clock = np.zeros((n, m)), np.zeros(n)  # of activations at the next stage
    down, up = np.zeros(n), np.zeros(n)  # when the links are free
    _warm(clock, arrivals, down, forward, occupied, latency, which, depths)
    for i in range(m):
        _back(i, clock, arrivals, down, up, forward, backward, occupied, latency, which, depths, frozen)
    return clock


@inlined
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


@compiled
def about(forward: Array, backward: Array, occupied: Array, latency: Array, which: Index, depths: Index, frozen: int) -> Array:
    """What `run` returns, but for rounding: once all repeats itself, as many micro-batches as there are of one size are skipped.
    All is compared to what it was at the last power of two (Brent 1980). (Of a first stage of depth m, nothing is.)"""
    n, m = len(depths), len(which)
    arrivals, state, before = np.zeros((n, m)), np.zeros((3, n)), np.zeros((3, n))
    clock: Array = state[0]
    down, up = state[1], state[2]
    _warm(clock, arrivals, down, forward, occupied, latency, which, depths)
    i = then = 0
    while i < m:
        _back(i, clock, arrivals, down, up, forward, backward, occupied, latency, which, depths, frozen)
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
            before[:] = state
            then = i
        i += 1
    return clock
