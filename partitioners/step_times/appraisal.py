"""Drafts (`drafts`) by what is different in them: their kinds of pipeline, a bound on the step, and what they lack in memory.
Pipelines of the same work on the same types, joined by the same links, are one kind; so the effort hardly depends on the number
of devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.step_times.drafts import Draft, Index, Runs, Work
from hetpipe.partitioners.step_times.links import Links
from hetpipe.planning.partition import Problem
from hetpipe.predict.cost import Costs

Array = NDArray[np.float64]
BOUND_ROUNDING = 1 - 1e-9  # bounds are sums in another order than the simulator's


class PipelineKind(NamedTuple):
    """Pipelines that do the same: their work, the type of each stage, and the link behind each but the last, by their numbers."""

    work: Work
    types: tuple[int, ...]
    links: tuple[int, ...]


def samples_in_flight(runs: Runs, depth: int) -> int:
    """Samples of the first so many micro-batches, which are the largest."""
    found = 0
    for size, count in runs:
        found += size * min(depth, count)
        depth -= min(depth, count)
    return found


class Appraiser:
    """What the drafts of one problem take at least, and what they lack in memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cluster = problem.profile.joined(problem.cluster)
        self.costs, self.links = Costs(problem.profile, cluster), Links(cluster)
        self.L = len(problem.profile.layers)
        self.ids = [device.id for device in cluster.devices]
        self.types = list(dict.fromkeys(device.type for device in cluster.devices))
        self.type_of = np.array([self.types.index(device.type) for device in cluster.devices])
        self.limits = [cluster.device_types[kind].memory * (1 - problem.memory_reserve) for kind in self.types]
        self.hosts = np.array([node.host_memory or 0 for node in cluster.nodes])
        lent = {kind for node in cluster.nodes if node.host_memory is not None for kind in node.devices}
        self.able = np.array([problem.allow_offload and x in lent and self.costs.copies(x) is not None for x in self.types])
        self.largest_node = max(sum(node.devices.values()) for node in cluster.nodes)

    def pipelines(self, draft: Draft) -> Iterator[tuple[PipelineKind, Index]]:
        """The kinds of a draft's pipelines, and the rows of each."""
        for i in np.unique(draft.which).tolist():
            work, rows = draft.works[i], np.nonzero(draft.which == i)[0]
            devices = draft.rows[rows][:, work.used]
            n = len(work.used)
            table = np.hstack([self.type_of[devices], self.links.numbers(devices[:, :-1], devices[:, 1:])])
            first, where = unlike_rows(table)
            for j, row in enumerate(table[first].tolist()):
                yield PipelineKind(work, tuple(row[:n]), tuple(row[n:])), rows[where == j]

    def there(self, draft: Draft) -> list[NDArray[np.bool_]]:
        """Of each work, which types each of its stages is on in some row [K, n]."""
        found = [np.zeros((len(self.types), len(work.used)), dtype=bool) for work in draft.works]
        for i, work in enumerate(draft.works):
            kinds = self.type_of[draft.rows[draft.which == i][:, work.used]]
            found[i][kinds, np.arange(len(work.used))] = True
        return found

    def least(self, draft: Draft) -> float:
        """No plan of this draft has a shorter step: a stage does all its work after the first micro-batch has gone forward
        through the stages before it, and before the last one goes back through them. Where a stage is on several types, it works
        as long as on the slowest, and takes as long to go through as on the fastest. Transfers, sums and optimizers are left
        out."""
        found = 0.0
        for work, there in zip(draft.works, self.there(draft), strict=True):
            busy, through = self._seconds(work.runs, work.ends, work.recomputes)
            before = np.cumsum(np.where(there, through, np.inf).min(axis=0))
            before = np.append(0.0, before[:-1])
            found = max(found, float((before + np.where(there, busy, 0.0).max(axis=0)).max()))
        return found * BOUND_ROUNDING

    @memoized
    def _seconds(self, runs: Runs, ends: tuple[int, ...], recomputes: tuple[bool, ...]) -> tuple[Array, Array]:
        """Seconds of all micro-batches on each type, in each stage that has layers [K, n], and the least of one."""
        lo, hi = np.array([(lo, hi) for lo, hi in pairwise(ends) if hi > lo]).T
        busy, again = np.zeros((len(self.types), len(lo))), np.array(recomputes)
        through = np.full_like(busy, np.inf)
        for k, kind in enumerate(self.types):
            for size, count in runs:
                times = self.costs.time_prefix(kind, size)
                f, b, more = (prefix[hi] - prefix[lo] for prefix in (*times, self.costs.again(times[0])))
                one = f + again * more + b
                busy[k], through[k] = busy[k] + count * one, np.minimum(through[k], one)
        return busy, through

    def missing(self, draft: Draft) -> dict[int, float]:
        """The most bytes that are missing on a device of each type, where any are."""
        found: dict[int, float] = {}
        for work, there in zip(draft.works, self.there(draft), strict=True):
            depths = work.in_flight(draft.schedule)
            for kind, s in np.argwhere(there).tolist():
                missing = self.peak(kind, s, work, depths[s]) - self.limits[kind]
                if missing > 0:
                    found[kind] = max(found.get(kind, 0.0), missing)
        return found

    def peak(self, kind: int, s: int, work: Work, depth: int) -> int:
        """Greatest bytes of stage s."""
        part, way, degree = work.stages[s], (work.recomputes[s], work.offloads[s]), work.groups[s]
        return self._peak(kind, *part, work.samples, samples_in_flight(work.runs, depth), work.runs[0][0], *way, degree)

    def offloading(self, draft: Draft) -> Draft | None:
        """The draft whose stages all offload where the devices can; None where none can."""
        works = list[Work]()
        for work, there in zip(draft.works, self.there(draft), strict=True):
            away = tuple(bool(self.able[on].all()) for on in there.T)
            again = tuple(own and not x for own, x in zip(work.recomputes, away, strict=True))
            works.append(work._replace(recompute=again, offload=away if any(away) else ()))
        return draft._replace(works=tuple(works)) if any(work.offload for work in works) else None

    def hosts_hold(self, draft: Draft) -> bool:
        """Whether hosts have the memory for all that a draft offloads to them."""
        if not any(work.offload for work in draft.works):
            return True
        found = np.zeros(len(self.hosts))
        for i, work in enumerate(draft.works):
            depths = work.in_flight(draft.schedule)
            for s, at in enumerate(work.used):
                devices = draft.rows[draft.which == i, at] if work.offloads[s] else ()
                for node, kind in zip(self.links.node[devices], self.type_of[devices], strict=True) if len(devices) else ():
                    each = self.costs.host_bytes_per_sample(self.types[kind], *work.stages[s], work.groups[s])
                    found[node] += each * samples_in_flight(work.runs, depths[s])
        return bool((np.rint(found) <= self.hosts).all())

    @memoized
    def _peak(
        self, kind: int, lo: int, hi: int, samples: int, window: int, largest: int, recompute: bool, offload: bool, degree: int
    ) -> int:
        way = {"recompute": recompute, "offload": offload}
        memory = self.costs.stage_memory(self.types[kind], lo, hi, samples=samples, degree=degree, **way)
        return memory.peak_of(window, largest)


def unlike_rows(table: Index) -> tuple[Index, Index]:
    """The first of each kind of equal rows, and of which kind every row is. By a number for each row; rows of the same number
    are compared."""
    weights = np.random.default_rng(0).integers(1, 2**62, table.shape[1])
    _, first, where = np.unique(table @ weights, return_index=True, return_inverse=True)
    if not (table == table[first[where]]).all():
        _, first, where = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, where.reshape(-1)
