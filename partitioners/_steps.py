"""The step of a draft (`_drafts`) as the simulator has it, to the bit, without a plan or a loop over its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._appraisal import Appraiser, Sketch, Sort
from hetpipe.partitioners._drafts import Draft, Index, Work
from hetpipe.partitioners._ends import replica_ends
from hetpipe.partitioners._traffic import Array, Lane, Ring, Traffic
from hetpipe.predict.cost import occupied_seconds, rate_alone, ring_seconds
from hetpipe.predict.simulator import Run, play
from hetpipe.spec.plan import ReplicaPlan
from hetpipe.spec.schedule import ScheduleName

Owner = tuple[int, int, int]  # sort, stage, shard
ROUNDED = 1 - 1e-9  # other sums than the simulator's
KNOWN = 500  # pipelines of plans whose transfers share adapters that are kept


class Pipelines(NamedTuple):
    """Those of one sort in a draft: the devices of each [pipelines, stages], when each stage's last backward ends, the longest
    optimizer, and what goes over each boundary one way (`Lane`)."""

    work: Work
    devices: Index
    ready: tuple[float, ...]
    optimizer: float
    carried: Array

    def holding(self, layer: int) -> int:
        """The stage that has this layer."""
        return next(s for s, (_, hi) in enumerate(self.work.stages) if layer < hi)


class Sum(NamedTuple):
    """One gradient sum: its devices, its bytes and who waits for it."""

    devices: Index
    size: float
    owners: set[Owner]


class Steps:
    """Of drafts of one problem; what they share is simulated once."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser, self.costs = appraiser, appraiser.costs
        self._runs: dict[tuple[Sort, ScheduleName], tuple[tuple[float, ...], float, Array]] = {}
        self.shared = self.costs.cluster.shares_adapters  # if not, `least` is the step
        self.traffic = Traffic(self.costs, appraiser.links)
        self._known: dict[object, Run] = {}
        self.tied: dict[str, list[int]] = {}
        for l, layer in enumerate(appraiser.problem.profile.layers):  # noqa: E741
            if layer.tied is not None:
                self.tied.setdefault(layer.tied, []).append(l)

    def step(self, draft: Draft, sketch: Sketch, below: float = math.inf) -> float:
        """Seconds; where adapters are shared perhaps a lower bound, if that is not `below` this. InputError where a link is not
        known."""
        least = self.least(draft, sketch)
        return self.played(draft) if least < below and self.shared else least

    def least(self, draft: Draft, sketch: Sketch) -> float:
        """Seconds if nothing shared an adapter with others: that never takes less; and not below what adapters carry."""
        found = self._pipelines(draft, sketch)
        optimizer, sums = max(x.optimizer for x in found), list(self._sums(found))
        alone = self._synced(found, sums)
        return (max(alone, self._carried(found, sums)) * ROUNDED if self.shared else alone) + optimizer

    def tasks(self, draft: Draft) -> int:
        """How many tasks (see `contention`) its pipelines are."""
        counts = np.bincount(draft.which, minlength=len(draft.works)).tolist()
        return sum(count * (4 * len(work.stages) - 2) * work.m for count, work in zip(counts, draft.works, strict=True))

    def played(self, draft: Draft) -> float:
        """Seconds, with all that shares adapters."""
        if len(self._known) > KNOWN:
            self._known.clear()
        return play(draft.plan(self.appraiser.problem), self.costs, self._known).step

    def _pipelines(self, draft: Draft, sketch: Sketch) -> list[Pipelines]:
        """Those of each sort."""
        found = []
        for sort, rows in zip(sketch.sorts, sketch.rows, strict=True):
            devices = draft.rows[rows][:, sort.work.used]
            found.append(Pipelines(sort.work, devices, *self._run(sort, draft.schedule, devices[0])))
        return found

    def _run(self, sort: Sort, schedule: ScheduleName, devices: Index) -> tuple[tuple[float, ...], float, Array]:
        """Of one of a sort's pipelines."""
        if (sort, schedule) not in self._runs:
            row = [0] * (len(sort.work.ends) - 1)
            for s, device in zip(sort.work.used, devices.tolist(), strict=True):
                row[s] = device
            replica = sort.work.replica(row, self.appraiser.ids)
            kinds = [self.costs.cluster.device(stage.device).type for stage in replica.stages]
            optimizers = [self.costs.optimizer_seconds(kind, *stage.layers, len(stage.devices))
                          for kind, stage in zip(kinds, replica.stages, strict=True)]  # fmt: skip
            ready = tuple(replica_ends(self.costs, replica, schedule))
            self._runs[sort, schedule] = ready, max(optimizers), self._bytes(replica, sort.work)
        return self._runs[sort, schedule]

    def _bytes(self, replica: ReplicaPlan, work: Work) -> Array:
        """Of a pipeline's transfers one way, as `contention` has it: where they are a part of actions they share nothing."""
        found = np.zeros(len(replica.stages) - 1)
        for s, (a, b) in enumerate(pairwise(replica.stages)):
            parts, link = min(len(a.devices), len(b.devices)), self.costs.link(a.device, b.device)
            for size, count in work.runs if self.costs.cluster.runtime_overhead.overlap_transfers else ():
                part = float(self.appraiser.problem.profile.output_bytes[a.layers[1] - 1]) * size / parts
                found[s] += count * parts * occupied_seconds(link, part) * rate_alone(link, part)
        return found

    def _sums(self, found: list[Pipelines]) -> Iterator[Sum]:
        """In the order of `cost.sync_segments`. Pipelines of one sort wait alike."""
        alone = self.appraiser.problem.backend == "torch"  # else one process drives a pipeline
        for size, holders in self._segments(found):
            groups = [found[i].work.groups[s] for i, s in holders]
            pieces = lcm(*groups)
            for piece in range(pieces if size > 0 else 0):
                shards = [piece * degree // pieces for degree in groups]
                devices = np.concatenate(
                    [found[i].devices[:, s] + shard for (i, s), shard in zip(holders, shards, strict=True)]
                )
                owners = {
                    (i, s, shard) if alone else (i, 0, 0) for (i, s), shard in zip(holders, shards, strict=True)
                }
                if len(devices) > 1:
                    yield Sum(devices, size / pieces, owners)

    def _synced(self, found: list[Pipelines], sums: list[Sum]) -> float:
        """When the last gradient sum ends, if nothing shared an adapter with others: that never takes less. See
        `simulator.sync_times`."""
        free = self._ready(found)
        end = max(free.values())
        for devices, size, owners in sums:
            done = max(free[x] for x in owners) + self._ring(devices, size)
            free.update(dict.fromkeys(owners, done))
            end = max(end, done)
        return end

    def _ready(self, found: list[Pipelines]) -> dict[Owner, float]:
        """When each owner of gradients has ended its last backward."""
        free: dict[Owner, float] = {}
        for i, x in enumerate(found):
            if self.appraiser.problem.backend != "torch":
                free[i, 0, 0] = max(x.ready)
                continue
            for s, (ready, degree) in enumerate(zip(x.ready, x.work.groups, strict=True)):
                free |= {(i, s, shard): ready for shard in range(degree)}
        return free

    def _carried(self, found: list[Pipelines], sums: list[Sum]) -> float:
        """When the adapters can be done with all that crosses them at the earliest."""
        free = self._ready(found)
        lanes = [Lane(x.devices, x.carried) for x in found]
        return self.traffic.least(lanes, [Ring(d, size, max(free[x] for x in owners)) for d, size, owners in sums])

    def _segments(self, found: list[Pipelines]) -> list[tuple[float, list[tuple[int, int]]]]:
        """Bytes and holders (sort, stage) of each sum in the order of `cost.sync_segments`."""
        cuts = sorted({lo for x in found for lo, _ in x.work.stages} | {self.appraiser.L})
        segments = []
        for lo, hi in reversed(list(pairwise(cuts))):
            holders = [(i, x.holding(lo)) for i, x in enumerate(found)]
            segments.append((self._untied(found, holders, lo, hi), holders))
        layers = self.appraiser.problem.profile.layers
        for _, members in sorted(self.tied.items()):
            held = {(i, x.holding(layer)) for i, x in enumerate(found) for layer in members}
            segments.append((float(layers[members[0]].tied_parameter_bytes), sorted(held)))
        return segments

    def _untied(self, found: list[Pipelines], holders: list[tuple[int, int]], lo: int, hi: int) -> float:
        """Parameter bytes of layers whose gradients are summed with their segment, in all shards: the most of its holders."""
        tied = sum(layer.tied_parameter_bytes for layer in self.appraiser.problem.profile.layers[lo:hi] if layer.tied)
        kinds = {("", 1)}
        for i, s in holders:
            if (degree := found[i].work.groups[s]) > 1:
                types = {self.appraiser.types[kind] for kind in self.appraiser.type_of[found[i].devices[:, s]].tolist()}
                kinds |= {(kind, degree) for kind in types}
        if all(found[i].work.groups[s] > 1 for i, s in holders):
            kinds.discard(("", 1))
        return max(degree * self.costs.shard_bytes(kind, lo, hi, degree) for kind, degree in kinds) - tied

    def _ring(self, devices: Index, size: float) -> float:
        """As `Costs.all_reduce_seconds`."""
        return ring_seconds(self.appraiser.links.among(self.costs, devices), len(devices), size)
