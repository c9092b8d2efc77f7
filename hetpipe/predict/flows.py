"""Tasks that wait for each other, and flows that share what they cross: the fluid model of the simulator, compiled.

A flow is a transfer, or a ring of gradient sums, on its way over network adapters. At any moment all flows that are on their way
share the adapters' bandwidth max-min fairly: nobody's rate can rise but at the cost of somebody who has no more (Bertsekas and
Gallager, Data Networks, 6.5.2). A flow is never faster than its link lets it be alone. Rates change only where a flow begins or
ends, so the model goes from one such event to the next: exact, no packets, no time steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int32]
Flags = NDArray[np.bool_]
FEW_TASKS = 50_000  # of a process, which Python is through with in the second that it takes to read what is compiled from disk
SAME_RATE = 1 + 1e-12  # rates within this are the same


class Tasks(NamedTuple):
    """N tasks, each with its `seconds` (of a flow: alone), the `latency` after which those behind it have what it brings, the
    time before which it does not `begin`, and its flow, or −1. Those that wait for task i are after[first[i]:first[i + 1]]:
    until its end, or (`arrival`) until the latency is over as well. Tasks of one flow wait for one another."""

    seconds: Array
    latency: Array
    begin: Array
    flow: Index
    first: Index  # [N + 1]
    after: Index  # [E]
    arrival: Flags  # [E]


class Flows(NamedTuple):
    """F flows: of how many transfers side by side each is a bundle, the bytes/s of one of these alone, and which adapters it
    crosses: those of flow f are crossed[reach[f]:reach[f + 1]]. Beside them the bytes/s of each adapter."""

    members: Array
    rate: Array
    reach: Index  # [F + 1]
    crossed: Index
    capacity: Array


_by_python = 0  # tasks so far


class _Way(NamedTuple):
    """The flows on their way: `on_way` has their numbers, `due` when each ends if its speed does not change, `part` those whose
    speeds may change, and `full` adapters of theirs. By flow its `place` in the first two, whether it is of this part, what its
    speed becomes, its task, the seconds alone that were left when its speed last changed, when that was, and the speed, as a part
    of that alone. By adapter what room is left in it, for how many transfers, and whether it may share them anew.

    What is on its way over an adapter is a list: it begins at crossing `head` of the adapter (−1: it is empty), and `after` and
    `before` are its neighbours by crossing, of which each is of one `flow`. So are those of each of the different `rates`,
    slowest first, of a part that no adapter has stopped: from `slow` on, and by flow the `next`; `kind` has each flow's."""

    on_way: Index
    due: Array
    place: Index
    part: Index
    full: Index
    hit: Flags
    fair: Array
    task: Index
    left: Array
    since: Array
    speed: Array
    room: Array
    demand: Array
    dirty: Flags
    head: Index
    after: Index
    before: Index
    flow: Index
    rates: Array
    slow: Index
    next: Index
    kind: Index


class EffortError(RuntimeError):
    """A simulation takes more effort than it is worth."""


def ends(tasks: Tasks, flows: Flows, effort: float) -> Array:
    """When each task ends [N], its latency left out; and in place of `begin`, when each could begin. Edges make no circle.
    EffortError where speeds have to be worked out so often: each time of all flows that share an adapter with one that
    begins or ends, or with one of these, and so on."""
    global _by_python
    if ready.cache_info().currsize or _by_python + len(tasks.seconds) > FEW_TASKS:
        found = ready()(tasks, flows, _way(flows), effort)
    else:
        _by_python += len(tasks.seconds)
        with np.errstate(all="ignore"):
            found = _run(tasks, flows, _way(flows), effort)
    if np.isnan(found).any():
        assert math.isfinite(effort)
        raise EffortError(f"more than {effort:.4g} speeds of flows")
    return found


def _way(flows: Flows) -> _Way:
    F, A, E = len(flows.members), len(flows.capacity), len(flows.crossed)
    rates, kind = np.unique(flows.rate, return_inverse=True)

    def empty(length: int) -> Index:
        return np.full(length, -1, dtype=np.int32)

    return _Way(
        on_way=empty(F),
        due=np.zeros(F),
        place=empty(F),
        part=empty(F),
        full=empty(A),
        hit=np.zeros(F, np.bool_),
        fair=np.zeros(F),
        task=empty(F),
        left=np.zeros(F),
        since=np.zeros(F),
        speed=np.zeros(F),
        room=np.zeros(A),
        demand=np.zeros(A),
        dirty=np.zeros(A, np.bool_),
        head=empty(A),
        after=empty(E),
        before=empty(E),
        flow=np.repeat(np.arange(F, dtype=np.int32), np.diff(flows.reach)),
        rates=rates,
        slow=empty(len(rates)),
        next=empty(F),
        kind=kind.astype(np.int32),
    )


def _changed(way: _Way, c: int, adapters: Index, touched: int) -> int:
    """An adapter is among the `touched` first of these."""
    if way.dirty[c]:
        return touched
    way.dirty[c], adapters[touched] = True, c
    return touched + 1


def _begin(flows: Flows, way: _Way, f: int, adapters: Index, touched: int) -> int:
    """A flow is on its way: at the head of the lists of what it crosses, which has changed."""
    for e in range(flows.reach[f], flows.reach[f + 1]):
        c = flows.crossed[e]
        way.after[e], way.before[e] = way.head[c], -1
        if way.head[c] >= 0:
            way.before[way.head[c]] = e
        way.head[c] = e
        touched = _changed(way, c, adapters, touched)
    return touched


def _leave(flows: Flows, way: _Way, f: int, adapters: Index, touched: int) -> int:
    """A flow has ended: what it crossed has changed."""
    for e in range(flows.reach[f], flows.reach[f + 1]):
        c = flows.crossed[e]
        touched = _changed(way, c, adapters, touched)
        if way.before[e] >= 0:
            way.after[way.before[e]] = way.after[e]
        else:
            way.head[c] = way.after[e]
        if way.after[e] >= 0:
            way.before[way.after[e]] = way.before[e]
    return touched


def _reached(flows: Flows, way: _Way, adapters: Index, count: int) -> tuple[int, int]:
    """Gathers in `part` what crosses the `count` first of these adapters, or shares one with another of this part, and behind
    them the others of these; how many of both."""
    gathered, seen = 0, 0
    while seen < count:
        e = way.head[adapters[seen]]
        seen += 1
        while e >= 0:
            f = way.flow[e]
            e = way.after[e]
            if way.hit[f]:
                continue
            way.hit[f], way.part[gathered] = True, f
            gathered += 1
            for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
                count = _changed(way, c, adapters, count)
    for a in range(gathered):
        way.hit[way.part[a]] = False
    for a in range(count):
        way.dirty[adapters[a]] = False
    return gathered, count


def _stop(flows: Flows, way: _Way, f: int, fair: float) -> None:
    """A flow gets its speed: what is left is for the others."""
    way.fair[f] = fair
    for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
        way.demand[c] -= flows.members[f]
        way.room[c] = max(0.0, way.room[c] - flows.members[f] * fair * flows.rate[f])


def _slowest(way: _Way, k: int) -> int:
    """The first of the different rates, from the k-th on, of which a flow still rises."""
    while k < len(way.slow):
        while way.slow[k] >= 0 and way.fair[way.slow[k]] >= 0:
            way.slow[k] = way.next[way.slow[k]]
        if way.slow[k] >= 0:
            break
        k += 1
    return k


def _fill(way: _Way, adapters: Index, count: int, rate: float) -> tuple[float, int]:
    """The rate up to which all can rise together, at most this one; and how many adapters are full then: they are in `full`."""
    level, full = rate, 0
    for a in range(count):
        if way.demand[adapters[a]] > 0:
            level = min(level, way.room[adapters[a]] / way.demand[adapters[a]])
    for a in range(count):
        c = adapters[a]
        if way.demand[c] > 0 and way.room[c] <= level * SAME_RATE * way.demand[c]:
            way.full[full] = c
            full += 1
    return level, full


def _rise(flows: Flows, way: _Way, gathered: int, adapters: Index, count: int) -> None:
    """All flows of the part still rise, and nothing is taken of their adapters."""
    way.slow[:] = -1
    for a in range(count):
        way.room[adapters[a]], way.demand[adapters[a]] = flows.capacity[adapters[a]], 0.0
    for a in range(gathered):
        f = way.part[a]
        way.fair[f], way.next[f], way.slow[way.kind[f]] = -1.0, way.slow[way.kind[f]], f
        for c in flows.crossed[flows.reach[f] : flows.reach[f + 1]]:
            way.demand[c] += flows.members[f]


def _share(flows: Flows, way: _Way, gathered: int, adapters: Index, count: int) -> None:
    """Max-min fair speeds of the part: all rates rise together, until some are as fast as alone, or cross a full adapter; then
    those of the others."""
    _rise(flows, way, gathered, adapters, count)
    k = _slowest(way, 0)
    while k < len(way.slow):
        level, full = _fill(way, adapters, count, way.rates[k])
        while k < len(way.slow) and way.rates[k] <= level * SAME_RATE:
            while way.slow[k] >= 0:
                f = way.slow[k]
                way.slow[k] = way.next[f]
                if way.fair[f] < 0:
                    _stop(flows, way, f, 1.0)
            k += 1
        for a in range(full):
            e = way.head[way.full[a]]
            while e >= 0:
                if way.fair[way.flow[e]] < 0:
                    _stop(flows, way, way.flow[e], level / flows.rate[way.flow[e]])
                e = way.after[e]
        k = _slowest(way, k)


def _settle(tasks: Tasks, waits: Index, end: Array, todo: Index, known: int, starts: list[tuple[float, int]]) -> None:
    """Ends of all tasks that follow from the `known` first of `todo` without a further event; flows among them go to `starts`."""
    while known > 0:
        known -= 1
        i = todo[known]
        if np.isnan(end[i]):
            if tasks.flow[i] >= 0:
                heappush(starts, (tasks.begin[i], i))
                continue
            end[i] = tasks.begin[i] + tasks.seconds[i]
        for e in range(tasks.first[i], tasks.first[i + 1]):
            j = tasks.after[e]
            tasks.begin[j] = max(tasks.begin[j], end[i] + tasks.latency[i] if tasks.arrival[e] else end[i])
            waits[j] -= 1
            if waits[j] == 0:
                todo[known] = j
                known += 1


def _run(tasks: Tasks, flows: Flows, way: _Way, effort: float) -> Array:
    end = np.full(len(tasks.flow), np.nan)
    waits = np.zeros(len(tasks.flow), dtype=np.int32)  # for how many tasks each still has to
    for e in range(len(tasks.after)):
        waits[tasks.after[e]] += 1
    todo = np.empty(len(tasks.flow), dtype=np.int32)  # tasks that are over, or whose beginning is known
    adapters = np.empty(len(flows.capacity), dtype=np.int32)
    known, count = 0, 0
    for i in range(len(tasks.flow)):
        if waits[i] == 0:
            todo[known] = i
            known += 1
    starts = [(0.0, todo[0])]  # of flows to come
    starts.pop()
    while True:
        _settle(tasks, waits, end, todo, known, starts)
        now = starts[0][0] if len(starts) > 0 else np.inf
        for a in range(count):
            now = min(now, way.due[a])
        if now == np.inf or effort < 0:
            return end
        known, touched, a = 0, 0, 0
        while a < count:
            if way.due[a] > now:
                a += 1
                continue
            f = way.on_way[a]
            end[way.task[f]], todo[known] = now, way.task[f]
            known, count = known + 1, count - 1
            way.on_way[a], way.due[a] = way.on_way[count], way.due[count]
            way.place[way.on_way[a]] = a
            touched = _leave(flows, way, f, adapters, touched)
        while len(starts) > 0 and starts[0][0] <= now:
            i = heappop(starts)[1]
            f = tasks.flow[i]
            way.on_way[count], way.due[count], way.place[f] = f, now + tasks.seconds[i], count
            way.task[f], way.left[f], way.since[f], way.speed[f] = i, tasks.seconds[i], now, 1.0
            count += 1
            touched = _begin(flows, way, f, adapters, touched)
        gathered, touched = _reached(flows, way, adapters, touched)
        _share(flows, way, gathered, adapters, touched)
        effort -= gathered
        for a in range(gathered):
            f = way.part[a]
            if way.fair[f] != way.speed[f]:
                way.left[f] -= (now - way.since[f]) * way.speed[f]
                way.since[f], way.speed[f] = now, way.fair[f]
                way.due[way.place[f]] = now + way.left[f] / way.speed[f]


@cache
def ready() -> Callable[[Tasks, Flows, _Way, float], Array]:
    """`_run`, compiled, or read from disk: outside of any time limit."""
    from hetpipe.predict.compiled import get_ready, twin  # and with them numba, which few tasks do without

    run = twin(_run, (_changed, _begin, _leave, _reached, _stop, _slowest, _fill, _rise, _share, _settle))
    one, none = np.ones(1), np.zeros(0, dtype=np.int32)
    tasks = Tasks(one, one, one, np.array([-1], np.int32), np.zeros(2, np.int32), none, none.astype(np.bool_))
    flows = Flows(none.astype(np.float64), none.astype(np.float64), np.zeros(1, np.int32), none, one)
    get_ready(lambda: run(tasks, flows, _way(flows), 1.0))
    return run
