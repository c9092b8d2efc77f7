"""The simulator's arithmetic for many candidates at once: the sums and maxima of `hetpipe.simulator` in the
same order, so the same bits, with an array of K candidates in the place of each number."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._space import Array
from hetpipe.schedule import Action, pipeline_actions

Index = NDArray[np.int64]


class Durations(NamedTuple):
    """One pipeline's durations: of a full micro-batch and of the last one, [n, K] and, of transfers, [n − 1,
    K]."""

    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    occupied: tuple[Array, Array]
    latency: Array


@lru_cache(maxsize=512)
def action_order(depths: tuple[int, ...], m: int) -> tuple[Action, ...]:
    """All actions of a pipeline in an order in which each comes after those that it waits for. O(n·m)."""
    todo = [iter(actions) for actions in pipeline_actions(depths, m)]
    heads = [next(actions, None) for actions in todo]
    forwards, backwards = [0] * len(depths), [0] * len(depths)
    order: list[Action] = []
    n = len(depths)
    while any(heads):
        for s in range(n):
            while (head := heads[s]) is not None:
                ready = (
                    (s == 0 or forwards[s - 1] > head.microbatch)
                    if head.kind == "F"
                    else (s == n - 1 or backwards[s + 1] > head.microbatch)
                )
                if not ready:
                    break
                (forwards if head.kind == "F" else backwards)[s] += 1
                order.append(head)
                heads[s] = next(todo[s], None)
    return tuple(order)


def ready_times(times: Durations, depths: tuple[int, ...], m: int) -> Array:
    """When the last backward of each stage ends, [n, K]: `pipeline_times` for K pipelines of equal depths.
    O(n·m·K)."""
    n, K = times.forward[0].shape
    clock, sent_forward, sent_backward = np.zeros((n, K)), np.zeros((n, K)), np.zeros((n, K))
    arrived: dict[tuple[int, str, int], Array] = {}
    for s, kind, i in action_order(depths, m):
        last = int(i == m - 1)
        now = clock[s]
        if (s, kind, i) in arrived:
            np.maximum(now, arrived.pop((s, kind, i)), out=now)
        if kind == "F":
            now += times.forward[last][s]
            if s + 1 < n:
                np.maximum(now, sent_forward[s], out=sent_forward[s])
                sent_forward[s] += times.occupied[last][s]
                arrived[s + 1, "F", i] = sent_forward[s] + times.latency[s]
        else:
            now += times.backward[last][s]
            if s > 0:
                np.maximum(now, sent_backward[s], out=sent_backward[s])
                sent_backward[s] += times.occupied[last][s - 1]
                arrived[s - 1, "B", i] = sent_backward[s] + times.latency[s - 1]
    return clock


class Pipelines(NamedTuple):
    """K priced pipelines of n stages: kinds [K, n], cuts [K, n + 1], depths [K, n], recompute [K, n], when
    each stage's last backward ends [K, n], the longest optimizer [K], and a lower bound on the step of any
    plan that holds it [K]."""

    kinds: Index
    cuts: Index
    depths: Index
    recompute: NDArray[np.bool_]
    ready: Array
    optimizer: Array
    bound: Array

    @property
    def number(self) -> int:
        """K."""
        return len(self.bound)

    def pick(self, rows: Index | NDArray[np.bool_]) -> Pipelines:
        """Some of the rows."""
        return Pipelines._make(column[rows] for column in self)
