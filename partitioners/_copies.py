"""A quarter of a cluster, and four times a plan of it: for many devices that can be better than what is found for all of them, as
of few devices more plans are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._drafts import Draft, Index, in_runs
from hetpipe.planning.partition import Problem
from hetpipe.spec.catalogue import alike
from hetpipe.spec.cluster import Node

TIMES = 4


class Part(NamedTuple):
    """Some devices with their share of the batch, rounded up; and which of all devices each of them is in each copy [TIMES,
    devices]."""

    problem: Problem
    places: Index


def part(problem: Problem) -> Part | None:
    """One of every `TIMES` nodes with the same devices, of those that are alike first; of each node that is left over as many
    devices. None where that is nothing."""
    cluster, begin, at = problem.cluster, dict[str, int](), 0
    for node in cluster.nodes:
        begin[node.name], at = at, at + sum(node.devices.values())
    same, nodes, places = dict[object, list[Node]](), dict[str, Node](), list[tuple[int, ...]]()
    for node in (node for group in alike(cluster) for node in group):
        same.setdefault(tuple(node.devices.items()), []).append(node)
    for node, copies in _parts(list(same.values()), begin):
        nodes[node.name] = node
        places += copies
    if not nodes:
        return None
    price = None if problem.max_price_per_hour is None else problem.max_price_per_hour / TIMES
    told = problem.progress
    return Part(
        replace(
            problem,
            cluster=cluster.with_nodes(nodes[name] for name in begin if name in nodes),
            global_batch=-(-problem.global_batch // TIMES),
            max_price_per_hour=price,
            progress=None if told is None else lambda text: told(f"on a quarter of the devices: {text}"),
        ),
        np.array(sorted(places)).T,
    )


def _parts(groups: list[list[Node]], begin: dict[str, int]) -> Iterator[tuple[Node, list[tuple[int, ...]]]]:
    """The nodes of the part, and of each of their devices all copies' places. `begin`: where each node's devices begin."""
    for group in groups:
        rest = len(group) % TIMES
        for i in range(rest, len(group), TIMES):
            firsts = [begin[node.name] for node in group[i : i + TIMES]]
            yield group[i], [tuple(first + d for first in firsts) for d in range(sum(group[i].devices.values()))]
        for node in group[:rest]:
            some = {name: count // TIMES for name, count in node.devices.items() if count >= TIMES}
            copies, first = list[tuple[int, ...]](), begin[node.name]
            for name, count in node.devices.items():
                n = some.get(name, 0)
                copies += [tuple(first + copy * n + d for copy in range(TIMES)) for d in range(n)]
                first += count
            if some:
                yield node.model_copy(update={"devices": some}), copies


def repeated(some: Part, draft: Draft, batch: int) -> Draft | None:
    """The plan of the part, as often; what that is more than the batch the replicas with most samples do not do. None where they
    would have none left."""
    which, works = np.tile(draft.which, TIMES), list(draft.works)
    for _ in range(TIMES * some.problem.global_batch - batch):
        r = max(range(len(which)), key=lambda r: works[which[r]].samples)
        work = works[which[r]]
        if work.samples == 1:
            return None
        works.append(work._replace(runs=in_runs(work.samples - 1, work.runs[0][0])))
        which[r] = len(works) - 1
    return draft._replace(rows=some.places[:, draft.rows].reshape(len(which), -1), works=tuple(works), which=which)
