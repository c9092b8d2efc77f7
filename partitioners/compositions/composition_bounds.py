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
  − 1)B); the first gap ends before the second begins. With w = m they are one gap, and the larger counts. If
  all stages have depth m (gpipe), the first backward anywhere comes after the last forward has reached the
  end, so the stage waits for u.
- All that stage s + 1 does happens between its first activation and its last gradient.
- The forward link carries all m activations, then the last micro-batch goes down to the end and back (u',
  from stage s + 1). The backward link alike, mirrored.

A stage that only runs forward (`Costs.has_backward`) waits for nothing that comes back, and no gradient goes over the
boundary behind it. For it g_s is the time from its first forward to the last backward of the first stage that has one:
after its last forward that micro-batch is still away, so it waits for u, whatever its depth; the other two hold with one
way of the transfer.

Where transfers do not overlap compute (`runtime_overhead`), they lengthen the actions at both ends instead,
and the step is no shorter: the bound holds.

g and u of a suffix of stages depend only on that suffix, since 1F1B's depths are counted from the end. The
table keeps, for each (counts used, kind of the suffix's first stage, first layer), the least g and the least
u apart: a relaxation, because one suffix need not reach both. With the gradient sums and the optimizer of
stage 0, which end the step, it bounds the step. Family "any" bounds all families at once: the least memory
and the least wait of those allowed.

O(Π(n_k + 1) · K · G · L²) in numpy, for G loads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.compositions.symmetry import Symmetry
from hetpipe.partitioners.stage_kinds.space import FORWARDS, Array, Counts, Family, Load, Space, StageTables
from hetpipe.partitioners.stage_kinds.wires import exposed

MOST = 10_000  # compositions, exchanged nodes and all
RANKS = 5  # replica counts told apart: 1, 2, 3, 4, and 5 or more


class Hops(NamedTuple):
    """What links add at every boundary, per load [G, K, K, L + 1]. `each`: both ways of one micro-batch, 2(occupied + latency);
    `all`: Σ occupied + latency + occupied + latency, all transfers one way plus one. Where no gradient comes back there is the
    one way only. Infinite where no link joins the two kinds."""

    each: Array
    all: Array


def hops(space: Space, loads: Sequence[Load]) -> Hops:
    """The seconds that links add to these loads, at every boundary."""
    missing = np.where(space.link_ids >= 0, 0.0, np.inf)[:, :, None]
    sizes = sorted({(load.b, load.q) for load in loads})
    index = np.array([sizes.index((load.b, load.q)) for load in loads])
    full, rest, one, delay = [], [], [], []
    for b, q in sizes:
        (long, latency), (short, other) = space.transfer(b), space.transfer(q or b)
        delay.append(np.maximum(latency, other))
        full.append(long)
        rest.append(short if q else np.zeros_like(short))
        one.append(np.minimum(long, short) + delay[-1] + missing)
    number = np.array([load.full for load in loads], dtype=np.float64)[:, None, None, None]
    queue = [np.stack(rest), np.stack(delay) + missing, np.where(space.returns, np.stack(one), 0.0)]
    return Hops(
        (np.stack(one) + queue[2])[index], number * np.stack(full)[index] + (queue[0] + queue[1] + queue[2])[index]
    )


def wait(u: Array, forward: Array, backward: Array, depth: Array | int, m: Array | int) -> Array:
    """Idle seconds of a stage while its first and its last micro-batch are downstream for u seconds."""
    first = np.maximum(u - (depth - 1) * forward, 0.0)
    last = np.maximum(u - (depth - 1) * backward, 0.0)
    return np.where(depth < m, first + last, np.maximum(first, last))


def idle(
    space: Space, family: Family, u: Array, tables: StageTables, place: int, m: Array, returns: NDArray[np.bool_]
) -> Array:
    """`wait` of a stage that is `place` stages from the end, in a pipeline of this family; u where no gradient `returns`."""
    if family == "gpipe":
        return u
    families = space.families if family == "any" else (family,)
    deepest = [f for f in families if f != "gpipe"][-1:]  # which waits no longer than others
    found = [wait(u, tables.forward, tables.backward, np.minimum(FORWARDS[f] * (place - 1) + 1, m), m) for f in deepest]
    found += [u for f in families if f == "gpipe"]
    return np.where(returns, reduce(np.minimum, found), u)


def compositions(
    symmetry: Symmetry, most: int
) -> tuple[list[Counts], bool]:
    """Counts of stages of each kind in one pipeline at a micro-batch size that all its kinds have, smallest first: all (True), or
    if these are more than `most` but for exchanges of nodes, all up to some number of stages (False), so that parts of a
    composition are in the list too."""
    space, number = symmetry.space, 0
    nodes = [kind.node for kind in space.kinds]
    found: list[Counts] = []
    level: set[Counts] = {(0,) * space.K}
    for _ in range(min(space.L, sum(space.counts))):
        grown = {(*c[:k], c[k] + 1, *c[k + 1 :]) for c in level for k in range(space.K) if c[k] < space.counts[k]}
        level = {
            c
            for c in grown
            if space.room(c)
            and not (space.one_node and len({nodes[k] for k, used in enumerate(c) if used}) > 1)
            and composition_sizes(space, c)
        }
        number += sum(symmetry.turned(c).comp == c for c in level)
        if found and (number > most or len(found) + len(level) > MOST):
            return found, False
        found += sorted(level)
    return found, True


def composition_sizes(space: Space, c: Counts) -> set[int]:
    """Micro-batch sizes at which all kinds of a composition were measured."""
    return set.intersection(*(set(space.sizes_of(k)) for k, used in enumerate(c) if used))


def without(c: Counts, k: int) -> Counts:
    """Counts with one device of kind k less."""
    return (*c[:k], c[k] - 1, *c[k + 1 :])


class Suffixes(NamedTuple):
    """Least g and u of one composition's suffixes that begin with one kind, [G, L + 1] by first layer."""

    g: Array
    u: Array


def composition_bounds(
    symmetry: Symmetry, comps: list[Counts], family: Family, loads: tuple[Load, ...]
) -> dict[Counts, NDArray[np.float64]]:
    """Lower bounds [RANKS, G] on the step of any plan with 1, 2, … replicas, one of which has this
    composition and load; of each composition that exchanges of nodes make the same only the first."""
    space = symmetry.space
    links = hops(space, loads)
    table: dict[tuple[Counts, int], Suffixes] = {}
    result, sums = {}, dict[tuple[int, int], list[Array]]()
    sizes, which = np.unique([load.last for load in loads], return_inverse=True)
    for c in comps:
        if symmetry.turned(c).comp != c:
            continue
        best = np.full((RANKS, len(loads)), np.inf)
        for k in np.flatnonzero(c):
            rest = without(c, int(k))
            first_of, kinds = symmetry.turned(rest)
            after = {int(j): table[first_of, kinds[j]] for j in np.flatnonzero(rest)}
            row, first = _extend(space, after, links, sum(rest) + 1, int(k), family, loads)
            table[c, int(k)] = row
            ends = first + space.optimizer(int(k))[0]
            recompute = space.stage(int(k), sum(c), family, loads).recompute[:, 0]
            for R in range(1, RANKS + 1):
                if (int(k), R) not in sums:
                    sums[int(k), R] = [
                        np.stack([first_sums(space, int(k), R, size, again) for size in sizes.tolist()])[which]
                        for again in (False, True)
                    ]
                plain, again = sums[int(k), R]
                late = np.where(recompute, again, plain) if recompute.any() else plain
                best[R - 1] = np.minimum(best[R - 1], (ends + late).min(axis=1))
        result[c] = best
    return result


def first_sums(space: Space, k: int, R: int, size: int, again: bool) -> Array:
    """Lower bound [hi] on the seconds from the last backward of a first stage of layers [0, hi) on kind k, of so many samples,
    with or without recompute, to the end of its gradient sums beside R − 1 other replicas."""
    below = np.zeros((1, space.L + 1))
    if space.problem.sums_early:
        forward, backward = space.prefixes(k, [size])
        below = backward + space.costs.again(forward) if again else backward
    found: Array = exposed(space.sum_floor(k, R)[:1], below)[0]
    return found


def _extend(
    space: Space,
    suffixes: dict[int, Suffixes],
    links: Hops,
    place: int,
    k: int,
    family: Family,
    loads: tuple[Load, ...],
) -> tuple[Suffixes, Array]:
    """The suffixes that begin with a stage on kind k and go on with those, by the kind they begin with; and g of stage 0 by
    its last layer, [G, L + 1]."""
    stage = space.stage(k, place, family, loads)
    L = space.L
    space.meter.count(len(loads) * L * L)
    if place == 1:
        g, u = stage.work[:, :, L], stage.through[:, :, L]
        first = np.full((len(loads), L + 1), np.inf)
        first[:, L] = g[:, 0]
        return Suffixes(g, u), first
    after = [(links.each[:, k, j], links.all[:, k, j], suffix) for j, suffix in suffixes.items()]
    onward = np.minimum.reduce([np.maximum(both + s.g, queue + s.u) for both, queue, s in after])  # [G, hi]
    away = np.minimum.reduce([both + s.u for both, _, s in after])  # [G, hi]
    m = np.array([load.m for load in loads], dtype=np.float64)[:, None, None]
    waited = idle(space, family, away[:, None, :], stage, place, m, space.returns)
    g = np.maximum(stage.work + waited, stage.through + onward[:, None, :])
    u = stage.through + away[:, None, :]
    return Suffixes(g.min(axis=2), u.min(axis=2)), g[:, 0, :]
