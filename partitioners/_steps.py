"""The step of a draft (`_drafts`) as the simulator has it, to the bit, without a plan or a loop over its devices."""

from __future__ import annotations

import math
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners._appraisal import Appraiser, Sketch, Sort
from hetpipe.partitioners._drafts import Draft, Index, Work
from hetpipe.partitioners._ends import replica_ends
from hetpipe.predict.cost import ring_seconds
from hetpipe.predict.simulator import Run, play
from hetpipe.spec.schedule import ScheduleName

Owner = tuple[int, int, int]  # sort, stage, shard
KNOWN = 500  # pipelines of plans whose transfers share adapters that are kept


class Pipelines(NamedTuple):
    """Those of one sort in a draft: the devices of each [pipelines, stages], when each stage's last backward ends, and the
    longest optimizer."""

    work: Work
    devices: Index
    ready: tuple[float, ...]
    optimizer: float

    def holding(self, layer: int) -> int:
        """The stage that has this layer."""
        return next(s for s, (_, hi) in enumerate(self.work.stages) if layer < hi)


class Steps:
    """Of drafts of one problem; what they share is simulated once."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser, self.costs = appraiser, appraiser.costs
        self._runs: dict[tuple[Sort, ScheduleName], tuple[tuple[float, ...], float]] = {}
        self._known: dict[object, Run] = {}
        self.tied: dict[str, list[int]] = {}
        for l, layer in enumerate(appraiser.problem.profile.layers):  # noqa: E741
            if layer.tied is not None:
                self.tied.setdefault(layer.tied, []).append(l)

    def step(self, draft: Draft, sketch: Sketch, below: float = math.inf) -> float:
        """Seconds; where adapters are shared perhaps a lower bound, if that is not `below` this. InputError where a link is not
        known."""
        alone = self._alone(draft, sketch)
        if alone >= below or not self.costs.cluster.shares_adapters:
            return alone
        if len(self._known) > KNOWN:
            self._known.clear()
        return play(draft.plan(self.appraiser.problem), self.costs, self._known).step

    def _alone(self, draft: Draft, sketch: Sketch) -> float:
        """Seconds, if nothing shared an adapter with others: that never takes less."""
        found = []
        for sort, rows in zip(sketch.sorts, sketch.rows, strict=True):
            devices = draft.rows[rows][:, sort.work.used]
            found.append(Pipelines(sort.work, devices, *self._run(sort, draft.schedule, devices[0])))
        end = max(max(x.ready) for x in found)
        return self._synced(found, end) + max(x.optimizer for x in found)

    def _run(self, sort: Sort, schedule: ScheduleName, devices: Index) -> tuple[tuple[float, ...], float]:
        """Of one of a sort's pipelines."""
        if (sort, schedule) not in self._runs:
            row = [0] * (len(sort.work.ends) - 1)
            for s, device in zip(sort.work.used, devices.tolist(), strict=True):
                row[s] = device
            replica = sort.work.replica(row, self.appraiser.ids)
            kinds = [self.costs.cluster.device(stage.device).type for stage in replica.stages]
            optimizers = [self.costs.optimizer_seconds(kind, *stage.layers, len(stage.devices))
                          for kind, stage in zip(kinds, replica.stages, strict=True)]  # fmt: skip
            self._runs[sort, schedule] = tuple(replica_ends(self.costs, replica, schedule)), max(optimizers)
        return self._runs[sort, schedule]

    def _synced(self, found: list[Pipelines], end: float) -> float:
        """When the last gradient sum ends, at least `end`: see `simulator.sync_times`. Pipelines of one sort wait alike."""
        alone = self.appraiser.problem.backend == "torch"  # else one process drives a pipeline

        def owner(i: int, s: int, shard: int = 0) -> Owner:
            return (i, s, shard) if alone else (i, 0, 0)

        free: dict[Owner, float] = {}
        for i, x in enumerate(found):
            for s, (ready, degree) in enumerate(zip(x.ready, x.work.groups, strict=True)):
                free |= {owner(i, s, shard): ready if alone else max(x.ready) for shard in range(degree)}
        for size, holders in self._segments(found):
            groups = [found[i].work.groups[s] for i, s in holders]
            pieces = lcm(*groups)
            for piece in range(pieces if size > 0 else 0):
                shards = [piece * degree // pieces for degree in groups]
                devices = np.concatenate(
                    [found[i].devices[:, s] + shard for (i, s), shard in zip(holders, shards, strict=True)]
                )
                if len(devices) < 2:
                    continue
                owners = {owner(i, s, shard) for (i, s), shard in zip(holders, shards, strict=True)}
                done = max(free[x] for x in owners) + self._ring(devices, size / pieces)
                free.update(dict.fromkeys(owners, done))
                end = max(end, done)
        return end

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
