"""Tasks that wait for each other, and flows that share what they cross: the fluid model of the simulator, compiled.

A flow is a transfer, or a ring of gradient sums, on its way over network adapters. At any moment all flows that are on their way
share the adapters' bandwidth max-min fairly: nobody's rate can rise but at the cost of somebody who has no more (Bertsekas and
Gallager, Data Networks, 6.5.2). A flow is never faster than its link lets it be alone. Rates change only where a flow begins or
ends, so the model goes from one such event to the next: exact, no packets, no time steps."""

from __future__ import annotations

from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.compiled import compiled, get_ready, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]
ROUNDING = 1 + 1e-12  # rates within this are the same


class Tasks(NamedTuple):
    """N tasks, each with its `seconds` (of a flow: alone), the `latency` after which those behind it have what it brings, the
    time before which it does not `begin`, and its flow, or −1. Edges are pairs of a task and one that waits for it:
    until its end, or (`arrival`) until the latency is over as well."""

    seconds: Array
    latency: Array
    begin: Array
    flow: Index
    edges: Index  # [E, 2]
    arrival: Flags  # [E]


class Flows(NamedTuple):
    """F flows: of how many transfers side by side each is a bundle, the bytes/s of one of these alone, and which adapters it
    crosses: those of flow f are crossed[reach[f]:reach[f + 1]]. Beside them the bytes/s of each adapter."""

    members: Array
    rate: Array
    reach: Index  # [F + 1]
    crossed: Index
    capacity: Array


class _Graph(NamedTuple):
    """Tasks as `_run` takes them: how many each waits for, and those that wait for task i, after[first[i]:first[i + 1]]."""

    seconds: Array
    latency: Array
    begin: Array
    flow: Index
    waits: Index
    first: Index
    after: Index
    arrival: Flags


class _Way(NamedTuple):
    """The flows on their way: `on_way` has their numbers, `part` those whose speeds may change, and `fair` what these become; by
    flow whether it is of this part, its task, the seconds alone that were left when its speed last changed, when that was, and
    the speed, as a part of that alone; by adapter what room is left in it, for how many transfers, and whether any of those that
    cross it may change."""

    on_way: Index
    part: Index
    fair: Array
    hit: Flags
    task: Index
    left: Array
    since: Array
    speed: Array
    room: Array
    demand: Array
    dirty: Flags


def ends(tasks: Tasks, flows: Flows) -> Array:
    """When each task ends [N], its latency left out. Edges make no circle."""
    ready()
    found: Array = _run(_graph(tasks), flows, _way(flows))
    assert not np.isnan(found).any()
    return found


def _graph(tasks: Tasks) -> _Graph:
    count, (before, after) = len(tasks.seconds), tasks.edges.T
    order = np.argsort(before, kind="stable")
    first = np.searchsorted(before[order], np.arange(count + 1))
    waits = np.bincount(after, minlength=count)
    return _Graph(tasks.seconds, tasks.latency, tasks.begin.copy(), tasks.flow, waits, first, after[order], tasks.arrival[order])


def _way(flows: Flows) -> _Way:
    none, adapters = np.zeros(len(flows.members)), np.zeros(len(flows.capacity))
    whole, flags = none.astype(np.int64), none.astype(np.bool_)
    return _Way(whole, whole.copy(), none, flags, whole.copy(), none.copy(), none.copy(), none.copy(),
                adapters, adapters.copy(), adapters.astype(np.bool_))  # fmt: skip


@cache
def ready() -> None:
    """Compile it, or read it from disk: outside of any time limit."""
    one, none = np.ones(1), np.zeros(0, dtype=np.int64)
    tasks = Tasks(one, one, one, np.array([-1]), none.reshape(0, 2), none.astype(np.bool_))
    flows = Flows(none.astype(np.float64), none.astype(np.float64), np.zeros(1, np.int64), none, one)
    get_ready(lambda: _run(_graph(tasks), flows, _way(flows)))


@inlined
def _level(flows: Flows, way: _Way, count: int) -> float:
    """The rate up to which those of negative speed can rise together."""
    level = np.inf
    for a in range(count):
        if way.fair[a] < 0:
            f = way.part[a]
            level = min(level, flows.rate[f])
            for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                level = min(level, way.room[c] / way.demand[c])
    return level


@inlined
def _stop(flows: Flows, way: _Way, count: int, level: float) -> int:
    """Those that rise no further get their speeds: they are as fast as alone, or cross a full adapter. How many they are."""
    stopped = 0
    for a in range(count):
        if way.fair[a] < 0:
            f = way.part[a]
            if flows.rate[f] <= level * ROUNDING:
                way.fair[a], stopped = 1.0, stopped + 1
                continue
            for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                if way.room[c] <= level * ROUNDING * way.demand[c]:
                    way.fair[a], stopped = level / flows.rate[f], stopped + 1
                    break
    return stopped


@inlined
def _share(flows: Flows, way: _Way, count: int) -> None:
    """Max-min fair speeds of `count` flows: all rates rise together, until some stop; then those of the others."""
    for a in range(count):
        way.fair[a] = -1.0
        for c in flows.crossed[flows.reach[way.part[a]] : flows.reach[way.part[a] + 1]]:
            way.room[c], way.demand[c] = flows.capacity[c], 0.0
    for a in range(count):
        for c in flows.crossed[flows.reach[way.part[a]] : flows.reach[way.part[a] + 1]]:
            way.demand[c] += flows.members[way.part[a]]
    rising = count
    while rising > 0:
        rising -= _stop(flows, way, count, _level(flows, way, count))
        for a in range(count if rising > 0 else 0):
            f = way.part[a]
            for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                way.room[c], way.demand[c] = flows.capacity[c], 0.0
        for a in range(count if rising > 0 else 0):
            f = way.part[a]
            for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                if way.fair[a] < 0:
                    way.demand[c] += flows.members[f]
                else:
                    way.room[c] = max(0.0, way.room[c] - flows.members[f] * way.fair[a] * flows.rate[f])


@inlined
def _reached(flows: Flows, way: _Way, count: int) -> int:
    """Gathers in `part` what shares an adapter with what has changed, or with another of this part; how many these are."""
    gathered, before = 0, -1
    while gathered > before:
        before = gathered
        for a in range(count):
            f = way.on_way[a]
            for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                if way.dirty[c] and not way.hit[f]:
                    way.hit[f], way.part[gathered] = True, f
                    gathered += 1
            if way.hit[f]:
                for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                    way.dirty[c] = True
    for a in range(gathered):
        way.hit[way.part[a]] = False
        for c in flows.crossed[flows.reach[way.part[a]] : flows.reach[way.part[a] + 1]]:
            way.dirty[c] = False
    return gathered


@inlined
def _changed(flows: Flows, way: _Way, f: int) -> None:
    """A flow has begun or ended."""
    for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
        way.dirty[c] = True


@inlined
def _settle(graph: _Graph, end: Array, todo: Index, known: int, starts: list[tuple[float, int]]) -> None:
    """Ends of all tasks that follow from the `known` first of `todo` without a further event; flows among them go to `starts`."""
    while known > 0:
        known -= 1
        i = todo[known]
        if np.isnan(end[i]):
            if graph.flow[i] >= 0:
                heappush(starts, (graph.begin[i], i))
                continue
            end[i] = graph.begin[i] + graph.seconds[i]
        for e in range(graph.first[i], graph.first[i + 1]):
            j = graph.after[e]
            graph.begin[j] = max(graph.begin[j], end[i] + graph.latency[i] if graph.arrival[e] else end[i])
            graph.waits[j] -= 1
            if graph.waits[j] == 0:
                todo[known] = j
                known += 1


@inlined
def _end(way: _Way, f: int) -> float:
    """When a flow ends, if its speed does not change."""
    end: float = way.since[f] + way.left[f] / way.speed[f]
    return end


@compiled
def _run(graph: _Graph, flows: Flows, way: _Way) -> Array:
    end = np.full(len(graph.flow), np.nan)
    todo = np.empty(len(graph.flow), dtype=np.int64)  # tasks that are over, or whose beginning is known
    known, count = 0, 0
    for i in range(len(graph.flow)):
        if graph.waits[i] == 0:
            todo[known] = i
            known += 1
    starts = [(0.0, todo[0])]  # of flows to come
    starts.pop()
    while True:
        _settle(graph, end, todo, known, starts)
        now = starts[0][0] if len(starts) > 0 else np.inf
        for a in range(count):
            now = min(now, _end(way, way.on_way[a]))
        if now == np.inf:
            return end
        known, before, count = 0, count, 0
        for a in range(before):
            f = way.on_way[a]
            if _end(way, f) <= now:
                end[way.task[f]], todo[known] = now, way.task[f]
                known += 1
                _changed(flows, way, f)
            else:
                way.on_way[count] = f
                count += 1
        while len(starts) > 0 and starts[0][0] <= now:
            i = heappop(starts)[1]
            f = graph.flow[i]
            way.on_way[count], way.task[f], way.left[f], way.since[f], way.speed[f] = f, i, graph.seconds[i], now, 1.0
            count += 1
            _changed(flows, way, f)
        gathered = _reached(flows, way, count)
        _share(flows, way, gathered)
        for a in range(gathered):
            f = way.part[a]
            if way.fair[a] != way.speed[f]:
                way.left[f] -= (now - way.since[f]) * way.speed[f]
                way.since[f], way.speed[f] = now, way.fair[a]
