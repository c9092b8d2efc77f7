"""Drafts (`_drafts`) by what is different in them: a lower bound on the step, and what they lack in memory. Pipelines of the
same work on the same types, joined by the same links, are one sort; so the effort hardly depends on the number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hetpipe.cluster import Link
from hetpipe.cost import Costs, occupied_seconds
from hetpipe.partition import Problem
from hetpipe.partitioners._drafts import Draft, Index, Runs, Work
from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._links import Links
from hetpipe.partitioners._wires import link_floor
from hetpipe.schedule import ScheduleName, default_depths

ROUNDING = 1 - 1e-9  # bounds are sums in another order than the simulator's
Set = frozenset[int]


class Sort(NamedTuple):
    """Pipelines that do the same. Which types their stages are on, and which links are between them: sets of numbers, of one
    each where all are alike."""

    work: Work
    types: tuple[Set, ...]
    links: tuple[Set, ...]


class Sketch(NamedTuple):
    """What bounds and memory need to know of a draft, or of several that are alike: its sorts of pipelines; for each place in a
    row, whether the devices there, which sum their gradients, are on several nodes for sure; and of one draft the rows of each
    sort."""

    sorts: list[Sort]
    spread: tuple[bool, ...]
    rows: tuple[Index, ...] = ()


class Actions(NamedTuple):
    """Seconds of a micro-batch on a stage."""

    forward: float
    backward: float


class Stage(NamedTuple):
    """Seconds of a stage: all actions and the optimizer of the slowest type; the first micro-batch, and the last, of the
    fastest."""

    work: float
    optimizer: float
    first: Actions
    last: Actions


class Hop(NamedTuple):
    """Least seconds of a boundary's first and last transfer, and of all of one way, which hold the link in turn."""

    first: float
    last: float
    all: float


def most_in_flight(runs: Runs, depth: int) -> int:
    """Samples of the first so many micro-batches, which are the largest."""
    found = 0
    for size, count in runs:
        found += size * min(depth, count)
        depth -= min(depth, count)
    return found


@cache
def _single(number: int) -> Set:
    return frozenset([number])


@cache
def _weights(columns: int) -> Index:
    return np.random.default_rng(0).integers(1, 2**62, columns)


def unlike_rows(table: Index) -> tuple[Index, Index]:
    """The first of each sort of equal rows, and of which sort every row is. By a number for each row; rows of the same number
    are compared."""
    _, first, where = np.unique(table @ _weights(table.shape[1]), return_index=True, return_inverse=True)
    if not (table == table[first[where]]).all():
        _, first, where = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, where.reshape(-1)


class Appraiser:
    """Of drafts of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cluster = cluster = problem.cluster.with_links(problem.profile.links)
        self.costs, self.links = Costs(problem.profile, cluster), Links(cluster)
        self.L = len(problem.profile.layers)
        self.ids = [device.id for device in cluster.devices]
        self.types = list(dict.fromkeys(device.type for device in cluster.devices))
        self.type_of = np.array([self.types.index(device.type) for device in cluster.devices])
        self.limits = [cluster.device_types[kind].memory * (1 - problem.memory_reserve) for kind in self.types]
        self.largest_node = max(sum(node.devices.values()) for node in cluster.nodes)

    def _sorts(self, draft: Draft) -> Iterator[tuple[Sort, Index]]:
        """The sorts of a draft's pipelines, and the rows of each."""
        for i in np.unique(draft.which).tolist():
            work, rows = draft.works[i], np.nonzero(draft.which == i)[0]
            devices = draft.rows[rows][:, work.used]
            n = len(work.used)
            table = np.hstack([self.type_of[devices], self.links.numbers(devices[:, :-1], devices[:, 1:])])
            first, where = unlike_rows(table)
            for j, row in enumerate(table[first].tolist()):
                sets = tuple(map(_single, row))
                yield Sort(work, sets[:n], sets[n:]), rows[where == j]

    def sketch(self, draft: Draft) -> Sketch:
        """That of one draft."""
        nodes = self.links.node[draft.rows]
        if len({work.ends for work in draft.works}) == 1:
            spread = (nodes != nodes[0]).any(axis=0).tolist()
        else:
            spread = [len(nodes) > self.largest_node] * nodes.shape[1]
        sorts, rows = zip(*self._sorts(draft), strict=True)
        return Sketch(list(sorts), tuple(spread), rows)

    # -- a lower bound --------------------------------------------------------------------------------------

    def bound(self, sketch: Sketch, replicas: int, schedule: ScheduleName) -> float:
        """No plan of so many pipelines, with such ones among them, has a shorter step."""
        ends = [self._end(sort, sketch.spread, replicas, schedule) for sort in sketch.sorts]
        return (max(end for end, _ in ends) + max(optimizer for _, optimizer in ends)) * ROUNDING

    @kept
    def _end(self, sort: Sort, spread: tuple[bool, ...], replicas: int, schedule: ScheduleName) -> tuple[float, float]:
        """When backward and gradient sums can have ended, and the longest optimizer.

        A stage of depth w begins after the first forwards of those before it; then does all its work, which does not end before
        all its inputs came over their link, nor before every w-th micro-batch went to the end and came back, one after the
        other, and what is left of them after that; nor before the last backward of the next stage. Then come its sums."""
        work, parts = sort.work, sort.work.stages
        n, m = len(parts), work.m
        stages = [self._stage(types, *part, work.runs, work.recompute)
                  for types, part in zip(sort.types, parts, strict=True)]  # fmt: skip
        hops = [self._hop(links, hi, work.runs) for links, (_, hi) in zip(sort.links, parts[:-1], strict=True)]
        steps = (stage.first.forward + hop.first for stage, hop in zip(stages, hops, strict=False))
        before = list(accumulate(steps, initial=0.0))
        end = ready = first = last = 0.0
        depths = default_depths(schedule, n, m)
        for s in range(n - 1, -1, -1):
            stage, (times, turns) = stages[s], divmod(m - 1, depths[s])
            if s + 1 < n:
                hop = hops[s]
                first, last, ready = first + 2 * hop.first, last + 2 * hop.last, ready + hop.last + stage.last.backward
            first, last = first + sum(stage.first), last + sum(stage.last)  # there and back
            longer = min(times, -(-work.runs[0][1] // depths[s]))  # those that begin with one of the first
            trips = longer * first + (times - longer + 1) * last
            own = max(stage.work, trips + (turns * sum(stage.last) if times else 0.0))
            if s:
                own = max(own, hops[s - 1].all - hops[s - 1].first + last)
            ready = max(ready, before[s] + own)
            end = max(end, ready + self._sums(*parts[s], replicas, spread[work.used[s]]))
        return end, max(stage.optimizer for stage in stages)

    @kept
    def _stage(self, types: Set, lo: int, hi: int, runs: Runs, recompute: bool) -> Stage:
        found = []
        for kind in types:
            each = [self._actions(kind, lo, hi, size, recompute) for size, _ in runs]
            work = sum(count * (f + b) for (f, b), (_, count) in zip(each, runs, strict=True))
            optimizer = self.costs.optimizer_seconds(self.types[kind], lo, hi)
            found.append((work, optimizer, each[0][0], each[-1][0], each[0][1], each[-1][1]))
        columns = list(zip(*found, strict=True))
        least = [min(column) for column in columns[2:]]
        return Stage(max(columns[0]), max(columns[1]), Actions(least[0], least[2]), Actions(least[1], least[3]))

    @kept
    def _actions(self, kind: int, lo: int, hi: int, size: int, recompute: bool) -> tuple[float, float]:
        return self.costs.stage_seconds(self.types[kind], lo, hi, size, recompute=recompute)

    @kept
    def _hop(self, links: Set, boundary: int, runs: Runs) -> Hop:
        if not self.cluster.runtime_overhead.overlap_transfers or -1 in links:
            return Hop(0.0, 0.0, 0.0)  # a part of the actions; or not known
        found = []
        for link in links:
            each = [self.transfer(link, boundary, size) for size, _ in runs]
            held = sum(count * occupied for (occupied, _), (_, count) in zip(each, runs, strict=True))
            found.append((sum(each[0]), sum(each[-1]), held + each[0][1]))
        return Hop(*map(min, zip(*found, strict=True)))

    @kept
    def transfer(self, link: int, boundary: int, size: int) -> tuple[float, float]:
        """As `Costs.transfer`, over a link."""
        if link < 0:
            self.links.refuse()
        used = self.links.all[link]
        size_bytes = float(self.problem.profile.output_bytes[boundary - 1]) * size
        return occupied_seconds(used, size_bytes), used.seconds(0)

    @kept
    def _sums(self, lo: int, hi: int, replicas: int, spread: bool) -> float:
        """Least seconds of the gradient sums of a stage, over the fastest link that its ring can have."""
        size = self.untied(lo, hi)
        links = self.links.between if spread else {*self.links.between, *self.links.inside.tolist()}
        if replicas < 2 or size <= 0 or -1 in links or not links:
            return 0.0
        return min(_ring_floor(self.links.all[link], replicas, size) for link in links)

    @kept
    def untied(self, lo: int, hi: int) -> float:
        """Parameter bytes of layers whose gradients are summed with their segment."""
        layers = self.problem.profile.layers[lo:hi]
        return self.costs.shard_bytes("", lo, hi) - sum(layer.tied_parameter_bytes for layer in layers if layer.tied)

    # -- memory ---------------------------------------------------------------------------------------------

    def missing(self, sketch: Sketch, schedule: ScheduleName) -> dict[int, float]:
        """The most bytes that are missing on a device of each type, where any are."""
        found: dict[int, float] = {}
        for sort in sketch.sorts:
            depths = default_depths(schedule, len(sort.types), sort.work.m)
            for types, part, depth in zip(sort.types, sort.work.stages, depths, strict=True):
                for kind in types:
                    missing = self.peak(kind, *part, sort.work, depth) - self.limits[kind]
                    if missing > 0:
                        found[kind] = max(found.get(kind, 0.0), missing)
        return found

    def peak(self, kind: int, lo: int, hi: int, work: Work, depth: int) -> int:
        """Greatest bytes of a stage."""
        return self._peak(kind, lo, hi, work.samples, most_in_flight(work.runs, depth), work.runs[0][0], work.recompute)

    @kept
    def _peak(self, kind: int, lo: int, hi: int, samples: int, window: int, largest: int, recompute: bool) -> int:
        memory = self.costs.stage_memory(self.types[kind], lo, hi, samples=samples, recompute=recompute)
        return memory.peak_of(window, largest)


def _ring_floor(link: Link, k: int, size: float) -> float:
    return 2 * (k - 1) * float(link_floor(link, np.array(size / k)))
