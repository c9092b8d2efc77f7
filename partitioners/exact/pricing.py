"""Complete pipelines simulated, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.exact.batch import Durations, Index, PricedPipelines, ready_times
from hetpipe.partitioners.stage_kinds.space import Array, Family, Load, Space, depth_of

EACH = 4  # numbers that each layer of a pipeline is worth
ROWS = 8192  # pipelines at a time


def simulated_pipelines(
    space: Space,
    family: Family,
    loads: Sequence[Load],
    kinds: Index,
    cuts: Index,
    recompute: NDArray[np.bool_],
    R: int,
) -> PricedPipelines:
    """Simulate pipelines of one depth family: kinds [K, n] and cuts [K, n + 1], first stage to last; `bound` holds
    for plans of R or more replicas."""
    order = np.argsort([-load.m for load in loads], kind="stable")
    loads, kinds, cuts, recompute = [loads[i] for i in order.tolist()], kinds[order], cuts[order], recompute[order]
    n, m = kinds.shape[1], np.array([load.m for load in loads])
    depths = np.array([[depth_of(family, n - s, int(x)) for s in range(n)] for x in np.unique(m)])
    b = np.array([load.b for load in loads])
    full = _durations(space, b, kinds, cuts, recompute)
    last = _durations(space, np.array([load.last for load in loads]), kinds, cuts, recompute)
    delay, sent = np.maximum(full[3], last[3]), np.zeros((n, len(m)))
    returns = space.returns[cuts[:, 1:-1].T]  # [n − 1, K]
    if not space.problem.cluster.runtime_overhead.overlap_transfers:
        sent[1:] = (last[2] + delay) * returns
        full, last = _blocking(full, delay, returns), _blocking(last, delay, returns)
        delay = np.zeros_like(delay)
    times = Durations((full[0], last[0]), (full[1], last[1]), (full[2], last[2]), delay)
    most = int(m[0])
    space.meter.count(len(m) * (n * most + EACH * space.L))
    begin = _of_stages(space.optimizer, kinds, cuts).max(axis=1)
    ready = begin[:, None] + _ready(times, tuple(depth_of(family, n - s, most) for s in range(n)), m, (~returns).sum(axis=0)).T
    samples = np.array([load.samples for load in loads])
    found = PricedPipelines(
        np.column_stack([b, samples]), kinds, cuts, depths[np.searchsorted(np.unique(m), m)], recompute, ready,
        np.zeros((len(m), space.L)), begin,
    )  # fmt: skip
    ahead = _ahead(space, np.array([load.last for load in loads]), found, sent)
    found = found._replace(made=np.take_along_axis(ready, found.holder, axis=1) - ahead)
    return found._replace(bound=bound(space, found, R))


def _ready(times: Durations, depths: tuple[int, ...], m: Index, frozen: Index) -> Array:
    """`ready_times` of pipelines of which the first stages, so many of each, run forwards only [K]."""
    found = np.zeros(times.forward[0].shape)
    for first in np.unique(frozen).tolist():
        at = frozen == first
        forward, backward, occupied = ((full[:, at], last[:, at]) for full, last in times[:3])
        found[:, at] = ready_times(Durations(forward, backward, occupied, times.latency[:, at]), depths, m[at], first)
    return found


def bound(space: Space, rows: PricedPipelines, R: int) -> Array:
    """Lower bounds on the step of any plan of R or more replicas that holds these pipelines, [K]: of the layers of a stage up to
    any of them no sum begins before backward has made that one's gradients."""
    space.meter.count(rows.number * space.L * EACH)
    parts = [_bound(space, rows.pick(slice(at, at + ROWS)), R) for at in range(0, rows.number, ROWS)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _bound(space: Space, rows: PricedPipelines, R: int) -> Array:
    """The bounds of `bound`, for so few pipelines that all are computed at once."""
    least: Array = rows.ready.max(axis=1)
    if R > 1:
        layers, holder, sums = np.arange(space.L), rows.holder, np.zeros(rows.made.shape)
        kinds, starts = (np.take_along_axis(x, holder, axis=1) for x in (rows.kinds, rows.cuts))
        for k in np.unique(rows.kinds).tolist():
            at = np.nonzero(kinds == k)
            sums[at] = space.sum_floor(k, R)[starts[at], layers[at[1]] + 1]
        least = np.maximum(least, (rows.made + sums).max(axis=1))
    return least


def _ahead(space: Space, size: Index, rows: PricedPipelines, sent: Array) -> Array:
    """How long before its stage's last backward ends each layer's gradients are made [K, L], as `sums.gradients_ahead` has it.
    The last micro-batch has size[i] samples, and its gradient's way to the stage before is `sent` [n, K] of each stage's last
    backward."""
    found = np.zeros(rows.made.shape)
    if not space.problem.sums_early:
        return found
    layers, holder = np.arange(space.L), rows.holder
    kinds, starts, again = (np.take_along_axis(x, holder, axis=1) for x in (rows.kinds, rows.cuts, rows.recompute))
    unique, index = np.unique(size, return_inverse=True)
    for k in np.unique(rows.kinds).tolist():
        at = np.nonzero(kinds == k)
        which, layer, lo = index[at[0]], layers[at[1]], starts[at]
        forward, backward = space.prefixes(k, unique.tolist())
        below = backward[which, layer] - backward[which, lo]
        more = space.costs.again(forward)
        found[at] = below + np.where(again[at], more[which, layer] - more[which, lo], 0.0)
    return found + np.take_along_axis(sent.T, holder, axis=1)


def _of_stages(table: Callable[[int], Array], kinds: Index, cuts: Index) -> Array:
    """table(k)[lo, hi] of every stage, [K, n]."""
    found = np.zeros(kinds.shape)
    for k in np.unique(kinds).tolist():
        at = kinds == k
        found[at] = table(k)[cuts[:, :-1][at], cuts[:, 1:][at]]
    return found


Parts = tuple[Array, Array, Array, Array]


def _durations(space: Space, size: Index, kinds: Index, cuts: Index, recompute: NDArray[np.bool_]) -> Parts:
    """Forward and backward [n, K], occupied links and latency [n − 1, K], for micro-batches of size[i] in pipeline
    i; summed in the order of `Costs.stage_seconds`: (backward + recomputed forward) + overhead."""
    unique, index = np.unique(size, return_inverse=True)
    lo, hi, kinds, again = cuts[:, :-1].T, cuts[:, 1:].T, kinds.T, recompute.T
    which = np.broadcast_to(index, kinds.shape)
    forward, backward = np.zeros(kinds.shape), np.zeros(kinds.shape)
    extra = space.problem.cluster.runtime_overhead.action_seconds
    for k in np.unique(kinds).tolist():
        at = kinds == k
        prefix_f, prefix_b = space.prefixes(k, unique.tolist())
        f, b, a = (x[which[at], hi[at]] - x[which[at], lo[at]] for x in (prefix_f, prefix_b, space.costs.again(prefix_f)))
        forward[at], backward[at] = f + extra, b + np.where(again[at], a, 0.0) + extra * space.returns[hi[at]]
    wires = [space.transfer(b) for b in unique.tolist()]
    ends = which[1:], kinds[:-1], kinds[1:], hi[:-1]
    return forward, backward, np.stack([w for w, _ in wires])[ends], np.stack([d for _, d in wires])[ends]


def _blocking(parts: Parts, delay: Array, returns: NDArray[np.bool_]) -> Parts:
    """Where transfers do not overlap compute, they are part of the actions at both ends, and gradients where any come back."""
    forward, backward, occupied, _ = parts
    taken, back = np.zeros_like(forward), np.zeros_like(forward)
    for s in range(len(forward) - 1):
        for total, some in ((taken, True), (back, returns[s])):
            total[s : s + 2] += occupied[s] * some
            total[s : s + 2] += delay[s] * some
    return forward + taken, backward + back, np.zeros_like(occupied), delay
