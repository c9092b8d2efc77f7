"""Pipelines and gradient sums whose transfers share network adapters, as tasks and flows (`flows`).

An adapter is crowded if all that may cross it one way would, at its fastest, be more than it carries. Only what crosses a
crowded one is a flow; everything else takes as long as alone. A pipeline none of whose transfers is a flow is not
looked at again: its stages are ready when they are ready alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.pipeline import PipelineCosts

Array = NDArray[np.float64]
Index = NDArray[np.int32]
Flags = NDArray[np.bool_]
Ready = Callable[[int], Sequence[float]]  # when each stage's last backward ends, of a pipeline alone
CROWDED = 1 + 1e-9  # times what an adapter carries; less is rounding


class Pipe(NamedTuple):
    """A pipeline of n stages and m micro-batches of K sizes: its durations, alone; warm-up depths and nodes of the stages [n];
    bytes/s of a transfer alone [n − 1, K] and how many go side by side [n − 1]; and when it begins. Of the first stages that run
    forwards only, of depth m, backwards and what would bring them gradients take no time."""

    costs: PipelineCosts
    depths: tuple[int, ...]
    nodes: tuple[int, ...]
    rate: Array
    members: Array
    begin: float

    def back(self, seconds: Array) -> Array:
        """Of what each boundary's transfers take, that of gradients: nothing where none go."""
        return np.concatenate([np.zeros_like(seconds[: self.costs.frozen]), seconds[self.costs.frozen :]])


class RingSum(NamedTuple):
    """One gradient sum: who waits for it (the processes that its owners are driven by); for which (pipeline, stage) it waits,
    until so many seconds before the end of its last backward; the nodes that its ring joins (none: it stays on one), its seconds
    alone without latency, the latency of all its rounds, and its bytes/s alone."""

    processes: tuple[Hashable, ...]
    made: tuple[tuple[int, int, float], ...]
    nodes: tuple[int, ...]
    seconds: float
    latency: float
    rate: float


class Shared(NamedTuple):
    """Of the pipelines that share, when forwards and backwards end [2, n, m], and when the links are free again after the
    transfers of activations and of gradients [2, n − 1, m]; and (start, end) of each sum."""

    pipes: dict[int, tuple[Array, Array]]
    sums: list[tuple[float, float]]


def crowded(pipes: Sequence[Pipe], rings: Sequence[RingSum], capacity: Array) -> Flags:
    """Which adapters are: those of node i carry capacity[2·i] bytes/s out and capacity[2·i + 1] in."""
    load = np.zeros(len(capacity))
    for pipe in pipes:
        for s, (a, b) in enumerate(zip(pipe.nodes, pipe.nodes[1:], strict=False)):
            if a != b:
                load[_crossed(pipe, s, a, b)] += pipe.members[s] * pipe.rate[s].max()
    fastest = dict[tuple[object, tuple[int, ...]], float]()  # of the same processes one after the other
    for ring in rings:
        key = ring.processes, ring.nodes
        fastest[key] = max(ring.rate, fastest.get(key, 0.0))
    for (_, nodes), rate in fastest.items():
        load[[2 * node + way for node in nodes for way in (0, 1)]] += rate
    return load > capacity * CROWDED


def _crossed(pipe: Pipe, s: int, a: int, b: int) -> list[int]:
    """The adapters that what goes from stage s on node a to the next on node b takes, and gradients back."""
    return [2 * a, 2 * b + 1, 2 * b, 2 * a + 1][: 2 if s < pipe.costs.frozen else 4]


@lru_cache(maxsize=8)
def _waits(depths: tuple[int, ...], m: int) -> tuple[Index, Index, Flags]:
    """How many tasks of a pipeline wait for each; which, for those of the first, then those of the second, and so on [E]; and
    whether for what arrives [E]. Tasks are forwards [n, m], then backwards [n, m], then the transfers of activations and those of
    gradients [n − 1, m]. A link serves its transfers in order."""
    n, i = len(depths), np.arange(m, dtype=np.int32)
    awaited, waiting, arriving = list[Index](), list[Index](), list[Flags]()

    def wait(before: Index, after: Index, arrival: bool = False) -> None:
        awaited.append(before)
        waiting.append(after)
        arriving.append(np.full(len(before), arrival))

    for s, depth in enumerate(min(depth, m) for depth in depths):
        forward, backward = s * m + i, (n + s) * m + i
        wait(forward[: depth - 1], forward[1:depth])  # the warm-up
        wait(forward[depth - 1 :], backward[: m - depth + 1])
        wait(backward[: m - depth], forward[depth:])
        wait(backward[m - depth : -1], backward[m - depth + 1 :])
        if s + 1 < n:
            down, up = (2 * n + s) * m + i, (3 * n - 1 + s) * m + i
            for wire in (down, up):
                wait(wire[:-1], wire[1:])
            wait(forward, down)
            wait(down, forward + m, arrival=True)
            wait(backward + m, up)
            wait(up, backward, arrival=True)
    before = np.concatenate(awaited)
    order = np.argsort(before, kind="stable")
    counts = np.bincount(before, minlength=(4 * n - 2) * m).astype(np.int32)
    return counts, np.concatenate(waiting)[order], np.concatenate(arriving)[order]


def _edges(n: int, m: int) -> int:
    """How many pairs `_waits` has."""
    return n * (2 * m - 1) + (n - 1) * (6 * m - 2)


class _Rows(NamedTuple):
    """G rows of m tasks, each of one of K sizes, `which` [m]. By size their seconds and flows [G, K]; of all in a row the latency
    and the time before which they do not begin [G]. `waits` is as `_waits` has it."""

    seconds: Array
    latency: Array
    begin: Array
    flow: Index
    which: NDArray[np.int64]
    waits: tuple[Index, Index, Flags] | None = None


class _Build:
    """Tasks and flows, as they are added: those of pipelines, then single ones. `edges` are pairs of a task and one that waits
    for it, beside those inside of pipelines."""

    def __init__(self, full: Flags) -> None:
        self.full, self.flows = full, 0
        self.count: int = 0  # of tasks
        self.pipes: list[tuple[Pipe, Index]] = []
        self.single = [(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int32))]
        self.edges: list[tuple[Index, Flags]] = []
        self.members: list[Array] = []
        self.rates: list[Array] = []
        self.crossings: list[Index] = []  # how many adapters each flow crosses
        self.crossed: list[Index] = []

    def add(self, seconds: Array, latency: Array, begin: Array, flow: Index) -> int:
        """Single tasks; the number of the first."""
        self.single.append((seconds, latency, begin, flow))
        self.count += len(seconds)
        return self.count - len(seconds)

    def flow(self, carried: Flags, members: Array, rate: Array, adapters: Index) -> Index:
        """The flow of each of X kinds of transfers [X], or −1: where something is `carried` [X] over a crowded one of the
        `adapters` [X, some] (−1: none)."""
        over = np.where((adapters >= 0) & self.full[adapters], adapters, -1)
        there = carried & (over >= 0).any(axis=1)
        found = np.where(there, self.flows + np.cumsum(there, dtype=np.int32) - 1, np.int32(-1))
        over = over[there]
        self.flows += len(over)
        self.members.append(members[there])
        self.rates.append(rate[there])
        self.crossings.append((over >= 0).sum(axis=1))
        self.crossed.append(over[over >= 0])
        return found

    def ends(self, capacity: Array, effort: float) -> Array:
        """When each task ends; EffortError where that takes more."""
        from hetpipe.predict.flows import Flows, Tasks, ends  # and with them numba, which few ranks of a training need

        reach = np.append(0, np.cumsum(np.concatenate(self.crossings))).astype(np.int32)
        crossed = np.concatenate(self.crossed, dtype=np.int32)
        flows = Flows(np.concatenate(self.members), np.concatenate(self.rates), reach, crossed, capacity)
        return ends(Tasks(*self._tasks()), flows, effort)

    def _tasks(self) -> tuple[Array, Array, Array, Index, Index, Index, Flags]:
        """All tasks as `Tasks` has them, each array made once: of 1,024 devices there are millions."""
        edges, arriving = (np.concatenate(column) for column in zip(*self.edges, strict=True))
        order = np.argsort(edges[:, 0], kind="stable")
        (before, behind), arriving = edges[order].T, arriving[order]
        E = len(edges) + sum(_edges(len(pipe.depths), len(pipe.costs.which)) for pipe, _ in self.pipes)
        seconds, latency, begin = np.empty(self.count), np.empty(self.count), np.empty(self.count)
        flow, first = np.empty(self.count, np.int32), np.zeros(self.count + 1, np.int32)
        after, arrival, task, edge = np.empty(E, np.int32), np.empty(E, np.bool_), 0, 0
        for rows in self._rows():
            here = slice(task, task + len(rows.latency) * len(rows.which))
            seconds[here], flow[here] = rows.seconds[:, rows.which].ravel(), rows.flow[:, rows.which].ravel()
            latency[here], begin[here] = rows.latency.repeat(len(rows.which)), rows.begin.repeat(len(rows.which))
            counts, within, arrives = rows.waits or (np.zeros(len(rows.latency), np.int32), flow[:0], arrival[:0])
            some = slice(*np.searchsorted(before, (here.start, here.stop)))
            at, own = np.cumsum(counts)[before[some] - task], np.bincount(before[some] - task, minlength=len(counts))
            first[task + 1 : here.stop + 1] = edge + np.cumsum(counts + own)
            there = slice(edge, edge + len(within) + len(at))
            after[there], arrival[there] = np.insert(within + task, at, behind[some]), np.insert(arrives, at, arriving[some])
            task, edge = here.stop, there.stop
        return seconds, latency, begin, flow, first, after, arrival

    def _rows(self) -> Iterator[_Rows]:
        for pipe, flow in self.pipes:
            costs, (n, sizes), m = pipe.costs, pipe.costs.forward.shape, len(pipe.costs.which)
            yield _Rows(
                np.concatenate([costs.forward, costs.backward, costs.occupied, pipe.back(costs.occupied)]),
                np.concatenate([np.zeros(2 * n), costs.latency, pipe.back(costs.latency)]),
                np.full(4 * n - 2, pipe.begin),
                np.concatenate([np.full((2 * n, sizes), -1, np.int32), flow]),
                costs.which,
                _waits(pipe.depths, m),
            )
        seconds, latency, begin, flow = (np.concatenate(column) for column in zip(*self.single, strict=True))
        yield _Rows(seconds[:, None], latency, begin, flow[:, None], np.zeros(1, np.int64))


def share(pipes: Sequence[Pipe], rings: Sequence[RingSum], capacity: Array, ready: Ready, effort: float) -> Shared | None:
    """What comes of all of them together; None if no adapter is crowded. The sums of a process come one after the other, in the
    order of `rings`. A pipeline that does not share is `ready` as it is alone. EffortError where it takes more `effort` (see
    `flows.ends`)."""
    full = crowded(pipes, rings, capacity)
    if not full.any():
        return None
    build = _Build(full)
    first = {r: _add_pipe(build, pipe) for r, pipe in enumerate(pipes) if _shares(pipe, full)}
    sums, begins = _add_rings(build, rings, pipes, first, ready)
    ends = build.ends(capacity, effort)
    found = {}
    for r, at in first.items():
        n, m = len(pipes[r].depths), len(pipes[r].costs.which)
        actions, wires = np.split(ends[at : at + (4 * n - 2) * m], [2 * n * m])
        found[r] = actions.reshape(2, n, m), wires.reshape(2, n - 1, m)
    free, spans = dict[Hashable, float](), []
    for ring, task, (begin, before) in zip(rings, sums, begins, strict=True):
        start = max([begin, *ends[before].tolist(), *(free.get(process, 0.0) for process in ring.processes)])
        end = float(ends[task]) + ring.latency
        free.update(dict.fromkeys(ring.processes, end))
        spans.append((start, end))
    return Shared(found, spans)


def _shares(pipe: Pipe, full: Flags) -> bool:
    pairs = zip(pipe.nodes, pipe.nodes[1:], strict=False)
    return any(
        a != b and bool(full[_crossed(pipe, s, a, b)].any()) and float(pipe.rate[s].max()) > 0 for s, (a, b) in enumerate(pairs)
    )


def _add_pipe(build: _Build, pipe: Pipe) -> int:
    """Add a pipeline's tasks, in the order of `_waits`; the number of the first."""
    (n, sizes), m, occupied = pipe.costs.forward.shape, len(pipe.costs.which), pipe.costs.occupied
    a, b = np.array(pipe.nodes[:-1]), np.array(pipe.nodes[1:])
    adapters = np.stack([[2 * a, 2 * b + 1], [2 * b, 2 * a + 1]]).transpose(0, 2, 1)  # [ways, n − 1, out and in]
    each = np.where((a != b)[:, None], adapters, -1).reshape(-1, 2).repeat(sizes, axis=0)
    carried = np.concatenate([(seconds > 0) & (pipe.rate > 0) for seconds in (occupied, pipe.back(occupied))]).ravel()
    flow = build.flow(carried, np.tile(pipe.members.repeat(sizes), 2), np.tile(pipe.rate.ravel(), 2), each)
    build.pipes.append((pipe, flow.reshape(-1, sizes)))
    first = build.count
    build.count += (4 * n - 2) * m
    return first


def _add_rings(
    build: _Build, rings: Sequence[RingSum], pipes: Sequence[Pipe], first: Mapping[int, int], ready: Ready
) -> tuple[list[int], list[tuple[float, list[int]]]]:
    """A task for each sum; and of each the time, and tasks of backwards, before which it does not begin."""
    last: dict[Hashable, int] = {}
    parts = _add_parts(build, rings, pipes, first)
    edges, arrival, tasks = list[tuple[int, int]](), list[bool](), list[int]()
    begins = list[tuple[float, list[int]]]()
    for ring in rings:
        adapters = np.array([[adapter for node in ring.nodes for adapter in (2 * node, 2 * node + 1)] or [-1]])
        seconds, rate = np.array([ring.seconds]), np.array([ring.rate])
        flow = build.flow((seconds > 0) & (rate > 0), np.ones(1), rate, adapters)
        begin, before = 0.0, list[int]()
        for r, s, ahead in dict.fromkeys(ring.made):
            if r in first:
                before.append(parts[r, s, ahead])
            else:
                begin = max(begin, ready(r)[s] - ahead)
        task = build.add(seconds, np.array([ring.latency]), np.array([begin]), flow)
        edges += [(other, task) for other in before]
        arrival += [False] * len(before)
        sums = dict.fromkeys(last[process] for process in ring.processes if process in last)
        edges += [(other, task) for other in sums]
        arrival += [True] * len(sums)
        last.update(dict.fromkeys(ring.processes, task))
        tasks.append(task)
        begins.append((begin, before))
    build.edges.append((np.array(edges, dtype=np.int32).reshape(-1, 2), np.array(arrival, dtype=np.bool_)))
    return tasks, begins


def _add_parts(
    build: _Build, rings: Sequence[RingSum], pipes: Sequence[Pipe], first: Mapping[int, int]
) -> dict[tuple[int, int, float], int]:
    """The task of each last backward for which a sum waits, or, of all but its last seconds, one that waits for the same."""
    needed, found = dict[tuple[int, int], dict[float, None]](), dict[tuple[int, int, float], int]()
    for r, s, ahead in dict.fromkeys(made for ring in rings for made in ring.made if made[0] in first):
        needed.setdefault((r, s), {})[ahead] = None
    for (r, s), some in needed.items():
        costs, n, number = pipes[r].costs, len(pipes[r].depths), len(some)
        m = len(costs.which)
        last = (n + s + 1) * m - 1
        before, arrival = _before_last(pipes[r].depths, m, s)
        seconds = np.maximum(0.0, costs.backward[s, costs.which[-1]] - np.array(list(some)))
        part = build.add(seconds, np.zeros(number), np.full(number, pipes[r].begin), np.full(number, -1, np.int32))
        after = np.repeat(np.arange(part, part + number, dtype=np.int32), len(before))
        build.edges.append((np.stack([np.tile(before + first[r], number), after], axis=1), np.tile(arrival, number)))
        found |= {(r, s, ahead): first[r] + last if ahead == 0 else part + i for i, ahead in enumerate(some)}
    return found


def _before_last(depths: tuple[int, ...], m: int, s: int) -> tuple[Index, Flags]:
    """What the last backward of stage s waits for (see `_waits`)."""
    n = len(depths)
    own = s * m + m - 1 if min(depths[s], m) == 1 else (n + s) * m + m - 2
    up = [(3 * n - 1 + s) * m + m - 1] if s + 1 < n else []
    return np.array([own, *up], dtype=np.int32), np.array([False, *[True] * len(up)])
