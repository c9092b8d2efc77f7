"""Lower bounds on the time of every pipeline of a composition (how many stages of each kind of a node), for all its orders and
cuts. docs/planner.md says why they hold ("The bound of a composition"). O(Π(n_k + 1) · K² · L²) for each load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.compositions.stage_times import Warmup, fits, idle, joined, stage_seconds
from hetpipe.partitioners.compositions.symmetry import Symmetry
from hetpipe.partitioners.stage_kinds.plan_class import Load
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Index, Loaded, Space
from hetpipe.predict.compiled import compiled

MOST_COMPOSITIONS = 10_000  # compositions, exchanged nodes and all
QUICK = 3  # stages that are looked at in the time of a number


def compositions(symmetry: Symmetry, most: int) -> tuple[list[Counts], bool]:
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
        if found and (number > most or len(found) + len(level) > MOST_COMPOSITIONS):
            return found, False
        found += sorted(level)
    return found, True


def composition_sizes(space: Space, c: Counts) -> set[int]:
    """Micro-batch sizes at which all kinds of a composition were measured."""
    return set.intersection(*(set(space.sizes_of(k)) for k, used in enumerate(c) if used))


class Parts(NamedTuple):
    """Compositions, parts before the whole: stages of each kind `counts` [C, K]; which composition is left without a stage of
    each kind, but for exchanges of nodes, `rest` [C, K]; and there the kind in the place of each, `turned` [C, K, K]."""

    counts: Index
    rest: Index
    turned: Index


def parts_of(symmetry: Symmetry, comps: list[Counts]) -> Parts:
    """These compositions, each the first of those that exchanges of nodes make of it."""
    number, K = {c: i for i, c in enumerate(comps)}, symmetry.space.K
    rest, turned = np.full((len(comps), K), -1), np.zeros((len(comps), K, K), dtype=np.int64)
    for i, c in enumerate(comps):
        for k in np.flatnonzero(c).tolist() if sum(c) > 1 else ():
            first, kinds = symmetry.turned((*c[:k], c[k] - 1, *c[k + 1 :]))
            rest[i, k], turned[i, k] = number[first], kinds
    return Parts(np.array(comps, dtype=np.int64).reshape(-1, K), rest, turned)


def composition_bounds(space: Space, parts: Parts, which: Sequence[int], load: Load) -> Array:
    """Lower bounds [which] on the step of any plan of which one replica has this load and one of these compositions: all that
    have its micro-batch size, so that their parts are among them."""
    comps = np.array(which, dtype=np.int64)
    bounds, numbers = _bounds(space.loaded(load), Warmup.of(*space.families), *parts, comps)
    space.meter.count(numbers / QUICK)
    return bounds


@compiled
def _bounds(x: Loaded, warmup: Warmup, counts: Index, rest: Index, turned: Index, which: Index) -> tuple[Array, int]:
    """The bounds of `composition_bounds` [which], and how many stages were looked at. For each composition, kind k of its
    first stage and first layer are kept the least g and the least u, apart."""
    C, K, L = len(counts), len(x.at), len(x.returns) - 1
    g, u = np.full((C, K, L + 1), np.inf), np.full((C, K, L + 1), np.inf)
    found, numbers, places = np.full(len(which), np.inf), 0, 0
    for c in which:
        places = max(places, counts[c].sum())
    how = _all_fits(x, warmup, places)
    for row, c in enumerate(which):
        place = counts[c].sum()
        for k in range(K):
            if counts[c, k] == 0:
                continue
            numbers += L * L // 2
            v, r = x.at[k], rest[c, k]
            for hi in range(1, L + 1):
                onward = away = 0.0 if place == 1 and hi == L else np.inf
                for j in range(K if hi < L else 0):
                    if counts[c, j] > (j == k):
                        both, queue = joined(x, k, j, hi)
                        after, round_trip = g[r, turned[c, k, j], hi], u[r, turned[c, k, j], hi]
                        onward, away = min(onward, max(both + after, queue + round_trip)), min(away, both + round_trip)
                for lo in range(hi if onward < np.inf else 0):
                    fit = how[v, place - 1, lo, hi]
                    if fit < 0:
                        continue
                    own, through, f, b = stage_seconds(x, v, lo, hi, fit)
                    if place > 1:
                        own += idle(x, away, f, b, hi, place, warmup)
                    own = max(own, through + onward)
                    g[c, k, lo], u[c, k, lo] = min(g[c, k, lo], own), min(u[c, k, lo], through + away)
                    if lo == 0:
                        found[row] = min(found[row], own + x.optimizer[v, 0, hi])
    return found, numbers


@compiled
def _all_fits(x: Loaded, warmup: Warmup, places: int) -> NDArray[np.int8]:
    """How all stages fit, by kind of `types` and place from the end [V, places, lo, hi]."""
    V, L = len(x.limits), len(x.returns) - 1
    found = np.full((V, places, L + 1, L + 1), -1, dtype=np.int8)
    for v in range(V):
        for place in range(places):
            for lo in range(L):
                for hi in range(lo + 1, L + 1):
                    found[v, place, lo, hi] = fits(x, v, lo, hi, place + 1, warmup.held)
    return found
