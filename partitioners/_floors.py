"""Lower bounds on the time of every pipeline of a composition (how many devices of each kind), for all its
orders and cuts.

**The bound.** Take a pipeline of n stages; stage s does `work` (all its forwards and backwards), its first
forward and last backward take at least `through`, a boundary's transfer `occupied` + `latency` each way. Let
u be the time of one micro-batch from the end of its forward on s, down to the last stage and back to s. Then
the time from the first forward of s to its last backward is at least g_s, where

    g_s = max( work_s + wait_s,
               through_s + 2(occupied + latency) + g_{s+1},
               through_s + Σ occupied + latency + u' + latency + occupied )

- The stage does its own work, and waits: with depth w < m, at most w − 1 forwards can be done while the first
  micro-batch is away (idle ≥ u − (w − 1)F), and at most w − 1 backwards while the last one is (idle ≥ u − (w
  − 1)B); the first gap ends before the second begins. With w = m they are one gap, and the larger counts.
- All that stage s + 1 does happens between its first activation and its last gradient.
- The forward link carries all m activations, then the last micro-batch goes down to the end and back (u',
  from stage s + 1). The backward link alike, mirrored.

Where transfers do not overlap compute (`runtime_overhead`), they lengthen the actions at both ends instead,
and the step is no shorter: the bound holds.

g and u of a suffix of stages depend only on that suffix, since 1F1B's depths are counted from the end. The
table keeps, for each (counts used, kind of the suffix's first stage, first layer), the least g and the least
u apart: a relaxation, because one suffix need not reach both. With the gradient sums and the optimizer of
stage 0, which end the step, it bounds the step.

O(Π(n_k + 1) · K · G · L²) in numpy, for G loads at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._space import Array, Counts, Family, Load, Space, depth_of

RANKS = 5  # replica counts told apart: 1, 2, 3, 4, and 5 or more


class Hops(NamedTuple):
    """Of every boundary: both ways of one micro-batch [K, K, L + 1], and (all transfers one way, plus that)
    per load [G, K, K, L + 1]."""

    both: Array
    all: Array


def hops(space: Space, loads: tuple[Load, ...]) -> Hops:
    """What links add. `both`: 2(occupied + latency); `all`: Σ occupied + latency + occupied + latency.
    Infinite: no such pair."""
    b, q = loads[0].b, loads[0].q or loads[0].b
    (full, latency), (rest, _) = space.transfer(b), space.transfer(q)
    one = np.minimum(full, rest) + latency[:, :, None]
    missing = np.where(space.link_ids >= 0, 0.0, np.inf)[:, :, None]
    queue = [
        (load.m - (load.q > 0)) * full + (rest if load.q else 0.0) + latency[:, :, None] + one + missing
        for load in loads
    ]
    return Hops(2 * one + missing, np.stack(queue))


def wait(u: Array, forward: Array, backward: Array, depth: Array | int, m: Array | int) -> Array:
    """Idle seconds of a stage while its first and its last micro-batch are downstream for u seconds."""
    first = np.maximum(u - (depth - 1) * forward, 0.0)
    last = np.maximum(u - (depth - 1) * backward, 0.0)
    return np.where(depth < m, first + last, np.maximum(first, last))


def compositions(space: Space, b: int, most: int = 10_000) -> tuple[list[Counts], bool]:
    """Counts of devices that one pipeline may use at micro-batch size b, smallest first: all of them (True),
    or if these are more than `most`, all up to some number of devices (False), so that parts of a composition
    are in the list too."""
    usable = [k for k in range(space.K) if space.measured(k, b)]
    nodes = [kind.node for kind in space.kinds]
    found: list[Counts] = []
    level: set[Counts] = {(0,) * space.K}
    for _ in range(min(space.L, sum(space.counts))):
        level = {
            (*c[:k], c[k] + 1, *c[k + 1 :])
            for c in level
            for k in usable
            if c[k] < space.counts[k]
            and not (space.one_node and any(used and nodes[j] != nodes[k] for j, used in enumerate(c)))
        }
        if found and len(found) + len(level) > most:
            return found, False
        found += sorted(level)
    return found, True


def without(c: Counts, k: int) -> Counts:
    """Counts with one device of kind k less."""
    return (*c[:k], c[k] - 1, *c[k + 1 :])


class Suffixes(NamedTuple):
    """Least g and u of one composition's suffixes that begin with one kind, [G, L + 1] by first layer."""

    g: Array
    u: Array


def floors(
    space: Space, comps: list[Counts], family: Family, loads: tuple[Load, ...]
) -> dict[Counts, NDArray[np.float64]]:
    """Lower bounds [RANKS, G] on the step of any plan with 1, 2, … replicas, one of which has this
    composition and load."""
    links = hops(space, loads)
    table: dict[tuple[Counts, int], Suffixes] = {}
    result = {}
    for c in comps:
        best = np.full((RANKS, len(loads)), np.inf)
        for k in np.flatnonzero(c):
            rest = without(c, int(k))
            row, first = _extend(space, table, links, rest, int(k), family, loads)
            table[c, int(k)] = row
            ends = first + space.optimizer(int(k))[0]
            for R in range(1, RANKS + 1):
                best[R - 1] = np.minimum(best[R - 1], (ends + space.sum_floor(int(k), R)[0]).min(axis=1))
        result[c] = best
    return result


def _extend(
    space: Space,
    table: dict[tuple[Counts, int], Suffixes],
    links: Hops,
    rest: Counts,
    k: int,
    family: Family,
    loads: tuple[Load, ...],
) -> tuple[Suffixes, Array]:
    """The suffixes that begin with a stage on kind k and go on with `rest`; and g of stage 0 by its last
    layer, [G, L + 1]."""
    place = sum(rest) + 1
    stage = space.stage(k, place, family, loads)
    L = space.L
    if place == 1:
        g, u = stage.work[:, :, L], stage.through[:, :, L]
        first = np.full((len(loads), L + 1), np.inf)
        first[:, L] = g[:, 0]
        return Suffixes(g, u), first
    after = [(links.both[k, j], links.all[:, k, j], table[rest, int(j)]) for j in np.flatnonzero(rest)]
    onward = np.minimum.reduce([np.maximum(both + s.g, queue + s.u) for both, queue, s in after])  # [G, hi]
    away = np.minimum.reduce([both + s.u for both, _, s in after])  # [G, hi]
    m = np.array([load.m for load in loads], dtype=np.float64)[:, None, None]
    depth = np.array([depth_of(family, place, load.m) for load in loads], dtype=np.float64)[:, None, None]
    idle = wait(away[:, None, :], stage.forward, stage.backward, depth, m)
    g = np.maximum(stage.work + idle, stage.through + onward[:, None, :])
    u = stage.through + away[:, None, :]
    return Suffixes(g.min(axis=2), u.min(axis=2)), g[:, 0, :]
