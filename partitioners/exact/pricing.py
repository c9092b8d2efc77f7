"""Complete pipelines as the simulator has them, to the bit: compiled loops over many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.compositions.stage_times import action_seconds, beside_copies
from hetpipe.partitioners.exact.listing import Rows
from hetpipe.partitioners.stage_kinds.plan_class import FORWARDS, Family, Load, depth
from hetpipe.partitioners.stage_kinds.space import Array, Index, Loaded, Space
from hetpipe.predict import pipeline
from hetpipe.predict.compiled import compiled, inlined, twin

EACH = 2.5  # numbers that a micro-batch of a stage is worth


class PricedPipelines(NamedTuple):
    """K pipelines of n stages: load (micro-batch size b, samples, forwards that a stage does more than the next, 0: all) [K, 3],
    kinds [K, n], cuts [K, n + 1], recompute [K, n], when each stage's last backward ends [K, n] and when it has made the
    gradients of each layer and of those above it in its stage [K, L], since the longest optimizer of the pipeline began, and a
    lower bound on the step of any plan that holds it [K]."""

    load: Index
    kinds: Index
    cuts: Index
    recompute: Index
    ready: Array
    made: Array
    bound: Array

    @property
    def number(self) -> int:
        """The number of pipelines, K."""
        return len(self.bound)

    @property
    def samples(self) -> Index:
        """Samples of each [K]."""
        return self.load[:, 1]

    def pick(self, rows: Index | NDArray[np.bool_] | slice) -> PricedPipelines:
        """The pipelines of some rows."""
        return PricedPipelines._make(column[rows] for column in self)


def priced(space: Space, rows: Rows, family: Family, load: Load, R: int) -> PricedPipelines:
    """Simulate these pipelines; `bound` holds for plans of R or more replicas."""
    (N, n), forwards = rows.kinds.shape, FORWARDS.get(family, 0)
    ready, made = np.zeros((N, n)), np.zeros((N, space.L))
    _simulate(space.loaded(load), forwards, rows.kinds, rows.cuts, rows.recompute, ready, made)
    space.meter.count(N * (EACH * n * load.m + space.L))
    given = np.tile([load.b, load.samples, forwards], (N, 1))
    bounds = _bounds(rows.kinds, rows.cuts, ready, made, space.sum_floors(R))
    return PricedPipelines(given, rows.kinds, rows.cuts, rows.recompute, ready, made, bounds)


def concatenated(parts: Sequence[PricedPipelines]) -> PricedPipelines:
    """All pipelines of these lists, at least one, one list after the other."""
    return PricedPipelines(*map(np.concatenate, zip(*parts, strict=True)))


_depth, _run = inlined(depth), twin(pipeline.run, pipeline.PARTS)


@compiled
def _simulate(x: Loaded, forwards: int, kinds: Index, cuts: Index, recompute: Index, ready: Array, made: Array) -> None:
    """Fill in `ready` and `made` of each row."""
    n, which = kinds.shape[1], np.zeros(x.m, np.int64)
    which[-1] = 1
    state, arrivals, none = np.zeros((3, n)), np.zeros((n, x.m)), np.zeros((2, n, 0))
    forward, backward, depths = np.zeros((n, 2)), np.zeros((n, 2)), np.zeros(n, np.int64)
    occupied, latency, sent = np.zeros((n - 1, 2)), np.zeros(n - 1), np.zeros(n)
    for i in range(len(kinds)):
        begin, frozen = 0.0, 0
        for s in range(n):
            v, lo, hi = x.at[kinds[i, s]], cuts[i, s], cuts[i, s + 1]
            begin = max(begin, x.optimizer[v, lo, hi])
            depths[s] = _depth(forwards if x.returns[hi] else 0, n - s, x.m)
            frozen += not x.returns[hi]
            for j in range(2):
                forward[s, j], backward[s, j] = action_seconds(x, v, lo, hi, j, recompute[i, s])
        for s in range(n - 1):
            k, after, hi = kinds[i, s], kinds[i, s + 1], cuts[i, s + 1]
            latency[s] = x.latency[k, after, hi]
            for j in range(2):
                occupied[s, j] = x.occupied[j, k, after, hi]
        if x.blocking:
            _block(forward, backward, occupied, latency, sent, frozen)
        state[:] = 0.0
        _run(state, arrivals, none, forward, backward, occupied, latency, which, depths, frozen)
        for s in range(n):
            ready[i, s] = begin + state[0, s]
            v, lo, hi = x.at[kinds[i, s]], cuts[i, s], cuts[i, s + 1]
            for layer in range(lo, hi):
                ahead = beside_copies(x, v, lo, layer, 1, x.times[v, 1, 1, layer] - x.times[v, 1, 1, lo])
                if recompute[i, s]:
                    ahead += x.times[v, 1, 2, layer] - x.times[v, 1, 2, lo]
                made[i, layer] = ready[i, s] - (ahead + sent[s] if x.early else 0.0)


@inlined
def _block(forward: Array, backward: Array, occupied: Array, latency: Array, sent: Array, frozen: int) -> None:
    """Make transfers a part of the actions at both ends, and gradients where any come back (see `simulator.replica_costs`);
    `sent` is when of a last backward the gradient is."""
    n = len(forward)
    for j in range(2):
        taken, back = np.zeros(n), np.zeros(n)
        for s in range(n - 1):
            for stage in range(s, s + 2):
                taken[stage] = taken[stage] + occupied[s, j] + latency[s]
                if s >= frozen:
                    back[stage] = back[stage] + occupied[s, j] + latency[s]
        for s in range(n):  # whole columns would take numba a second more to compile
            forward[s, j] += taken[s]
            backward[s, j] += back[s]
    for s in range(n - 1):
        sent[s + 1] = occupied[s, 1] + latency[s] if s >= frozen else 0.0
    occupied[:] = 0.0
    latency[:] = 0.0


@compiled
def _bounds(kinds: Index, cuts: Index, ready: Array, made: Array, floors: Array) -> Array:
    """Lower bounds on the step of plans that hold these pipelines, [K], by what sums take at least: of the layers of a stage up
    to any of them none begins before backward has made that one's gradients."""
    found = np.zeros(len(kinds))
    for i in range(len(kinds)):
        for s in range(kinds.shape[1]):
            found[i] = max(found[i], ready[i, s])
            for layer in range(cuts[i, s], cuts[i, s + 1]):
                found[i] = max(found[i], made[i, layer] + floors[kinds[i, s], cuts[i, s], layer + 1])
    return found
