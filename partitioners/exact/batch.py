"""The simulator's arithmetic for many candidates at once: the sums and maxima of `hetpipe.predict.simulator` in the
same order, so the same bits, with an array of K candidates in the place of each number."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.stage_kinds.space import Array
from hetpipe.predict.pipeline import forward_depths
from hetpipe.spec.schedule import Action, pipeline_actions

Index = NDArray[np.int64]


class Durations(NamedTuple):
    """One pipeline's durations: of a full micro-batch and of the last one, [n, K] and, of transfers, [n − 1,
    K]."""

    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    occupied: tuple[Array, Array]
    latency: Array


@lru_cache(maxsize=512)
def action_order(depths: tuple[int, ...], m: int, frozen: int = 0) -> tuple[Action, ...]:
    """All actions of a pipeline in an order in which each comes after those that it waits for; the first `frozen` stages run
    forwards only. O(n·m)."""
    every = pipeline_actions(forward_depths(depths, frozen, m), m)
    todo = [iter(actions[: m if s < frozen else None]) for s, actions in enumerate(every)]
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


def ready_times(times: Durations, depths: tuple[int, ...], m: int | Index, frozen: int = 0) -> Array:
    """When each stage has done all, [n, K]: `pipeline_times` for K pipelines of equal depths (those above m count as m), of which
    the first `frozen` stages run forwards only, with m micro-batches, or m[i] ≥ m[i + 1] in pipeline i. A smaller number leaves
    actions out of the order of a larger one, so each action is a prefix of the rows. O(n·m·K)."""
    n, K = times.forward[0].shape
    most = int(np.max(m))
    rows = np.searchsorted(-np.broadcast_to(m, K), -np.arange(most + 1), side="left")  # with more than i micro-batches
    clock, sent_forward, sent_backward = np.zeros((n, K)), np.zeros((n, K)), np.zeros((n, K))
    arrived: dict[tuple[int, str, int], Array] = {}
    for s, kind, i in action_order(tuple(min(depth, most) for depth in depths), most, frozen):
        here, full = int(rows[i]), int(rows[i + 1])
        now = clock[s, :here]
        if (s, kind, i) in arrived:
            np.maximum(now, arrived.pop((s, kind, i)), out=now)
        forward = kind == "F"
        _add(now, times.forward if forward else times.backward, s, full, here)
        to, at = (s + 1, s) if forward else (s - 1, s - 1)
        if (0 if forward else frozen) <= to < n:
            sent = (sent_forward if forward else sent_backward)[s, :here]
            np.maximum(now, sent, out=sent)
            _add(sent, times.occupied, at, full, here)
            arrived[to, kind, i] = sent + times.latency[at, :here]
    return clock


def _add(total: Array, durations: tuple[Array, Array], s: int, full: int, here: int) -> None:
    """Add the durations of full micro-batches to the first rows, of the last one to the others."""
    if full:
        total[:full] += durations[0][s, :full]
    if full < here:
        total[full:] += durations[1][s, full:here]


class PricedPipelines(NamedTuple):
    """K priced pipelines of n stages: load (micro-batch size b, samples) [K, 2], kinds [K, n], cuts [K, n + 1],
    depths [K, n], recompute [K, n], when each stage's last backward ends [K, n] and when it has made the gradients of each
    layer and of those above it in its stage [K, L], since the longest optimizer of the pipeline began, and a lower bound on
    the step of any plan that holds it [K]."""

    load: Index
    kinds: Index
    cuts: Index
    depths: Index
    recompute: NDArray[np.bool_]
    ready: Array
    made: Array
    bound: Array

    @property
    def holder(self) -> Index:
        """The stage of each layer [K, L]."""
        found: Index = (self.cuts[:, 1:-1, None] <= np.arange(self.made.shape[1])).sum(axis=1)
        return found

    @property
    def number(self) -> int:
        """The number of pipelines, K."""
        return len(self.bound)

    def pick(self, rows: Index | NDArray[np.bool_] | slice) -> PricedPipelines:
        """The pipelines of some rows."""
        return PricedPipelines._make(column[rows] for column in self)
