"""Search for plans faster than T, for a T that rises to the step in hand: with shortlists, which are short where T is small."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from hetpipe.partitioners._shortlist import Shortlist, Shortlists

if TYPE_CHECKING:
    from hetpipe.partitioners._search import Item, Search

EXACT, NEAR = (0.95, 1.0), (0.95, 0.98, 1.0)  # of the step that is looked for: to find the best, or one near it
FEW = 200_000  # partial pipelines by which the plan in hand is tried to be shown near enough, before anything else
LESS, LEAST = 0.85, 0.2  # times that, where this takes too long and nothing is proven yet; and when to give up
MUCH = 0.985  # of T: a step that is looked for below this makes it worth to start over
ENOUGH = 1.05  # times what is proven: near enough for a search that takes long


def rounds(search: Search, shortlists: Shortlists) -> bool:
    """Until no plan is faster than the one in hand by more than `search.near`, or it is late; what is proven is
    `search.proven`. False where listing takes too long, however small T is."""
    every = NEAR if search.near > 1 else EXACT
    if search.near > 1 and shortlists.below(search.best_step / search.near, search.late, FEW) == {}:
        search.proven = search.best_step / search.near
        return True
    parts = list(every)
    while parts and not search.late():
        T = search.best_step / search.near * parts[0]
        if search.proven >= T:
            parts.pop(0)
            continue
        listed = shortlists.below(T, search.late)
        if listed is None:
            if search.near > 1 and search.best_step <= search.proven * ENOUGH:
                break
            if search.proven > 0:  # nearer to what is proven, and with more patience
                parts.insert(0, parts[0] * math.sqrt(search.proven / T))
                shortlists.candidates = 2 * max(1000, shortlists.candidates)
            elif parts[0] > LEAST:
                parts.insert(0, parts[0] * LESS)
            else:
                return False
            continue
        search.open_bound = T
        if listed:
            items = search.prepared(Shortlist(search.space, shortlists.kinds, listed), T)
            if search.best_step / search.near < T * MUCH and not search.late():
                parts = list(every)
                continue
            search.explore_all(items)
        search.proven = max(search.proven, min(search.open_bound, T))
        if search.best_step <= search.proven * search.near:
            break
        parts.pop(0)
    return True


def various(items: list[Item], most: int) -> list[Item]:
    """Some of the first: so many of replicas that are alike, and as many of each number of replicas."""
    number: Counter[object] = Counter()
    found = []
    for item in items:
        kind = "alike" if len(set(item.grouping)) == 1 else len(item.grouping)
        number[kind] += 1
        if number[kind] <= most:
            found.append(item)
    return found
