"""The step of a draft (`drafts`) as the simulator has it, to the bit, without a plan or a loop over its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from hetpipe.documents.plan import ReplicaPlan
from hetpipe.documents.schedule import ScheduleName
from hetpipe.partitioners.step_times.appraisal import Appraiser, PipelineKind
from hetpipe.partitioners.step_times.drafts import Draft, Index, Work
from hetpipe.partitioners.step_times.traffic import Array, PipelineTraffic, SumTraffic, Traffic
from hetpipe.predict.cost import occupied_seconds, rate_alone, ring_seconds
from hetpipe.predict.flows import EffortError
from hetpipe.predict.pipeline import stage_ends
from hetpipe.predict.simulator import Run, optimizers_of, play, replica_costs
from hetpipe.predict.sums import gradients_ahead

Owner = tuple[int, int, int]  # kind of pipeline, stage, shard
ADAPTER_ROUNDING = 1 - 1e-9  # other sums than the simulator's
KNOWN = 300_000  # forwards of pipelines whose transfers share adapters: simulations of so many are kept


class AlikePipelines(NamedTuple):
    """The pipelines of one kind in a draft: the devices of each [pipelines, stages], when each stage has done all, how
    long before that each layer's gradients are made (`gradients_ahead`), when they begin (their longest optimizer comes first),
    and what goes over each boundary one way (`PipelineTraffic`)."""

    work: Work
    devices: Index
    ready: tuple[float, ...]
    ahead: list[float]
    begin: float
    carried: Array

    def holding(self, layer: int) -> int:
        """The stage that has this layer."""
        return next(s for s, (_, hi) in enumerate(self.work.stages) if layer < hi)


class Sum(NamedTuple):
    """One gradient sum: its devices, its bytes, who waits for it, and when all have made its gradients."""

    devices: Index
    size: float
    owners: set[Owner]
    made: float


class Steps:
    """The steps of drafts of one problem; what they share is simulated once."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser, self.costs = appraiser, appraiser.costs
        self._runs: dict[tuple[PipelineKind, ScheduleName], tuple[tuple[float, ...], list[float], float, Array]] = {}
        self.shared = self.costs.cluster.shares_adapters  # if not, `least` is the step
        self.traffic = Traffic(self.costs, appraiser.links)
        self._known: dict[object, Run] = {}

    def least(self, draft: Draft, below: float = math.inf) -> float:
        """Seconds if nothing shared an adapter with others: that never takes less; and not below what adapters carry. Where
        what comes without adapters is not `below` this, that."""
        found, rounded = list[AlikePipelines](), ADAPTER_ROUNDING if self.shared else 1.0
        for kind, rows in self.appraiser.pipelines(draft):
            devices = draft.rows[rows][:, kind.work.used]
            found.append(AlikePipelines(kind.work, devices, *self._run(kind, draft.schedule, devices[0])))
            if (ready := max(found[-1].ready) * rounded) >= below:
                return ready
        sums = list(self._sums(found))
        alone = self._synced(found, sums) * rounded
        return max(alone, self._carried(found, sums) * rounded) if self.shared and alone < below else alone

    def tasks(self, draft: Draft) -> int:
        """How many tasks (see `contention`) its pipelines are."""
        counts = np.bincount(draft.which, minlength=len(draft.works)).tolist()
        return sum(count * (4 * len(work.stages) - 2) * work.m for count, work in zip(counts, draft.works, strict=True))

    def played(self, draft: Draft, effort: float = math.inf) -> float:
        """Seconds, with all that shares adapters; infinite where that takes more effort (see `flows.ends`)."""
        if sum(len(run.pipe.depths) * len(run.pipe.costs.which) for run in self._known.values()) > KNOWN:
            self._known.clear()
        try:
            return play(draft.plan(self.appraiser.problem), self.costs, self._known, effort).step
        except EffortError:
            return math.inf

    def _run(
        self, kind: PipelineKind, schedule: ScheduleName, devices: Index
    ) -> tuple[tuple[float, ...], list[float], float, Array]:
        """When each stage of a pipeline of this kind is ready, the seconds by which each layer's gradients are made before that,
        when its stages begin, and the bytes that it sends."""
        if (kind, schedule) not in self._runs:
            row = [0] * (len(kind.work.ends) - 1)
            for s, device in zip(kind.work.used, devices.tolist(), strict=True):
                row[s] = device
            replica = kind.work.replica(row, self.appraiser.ids)
            begin = max(optimizers_of(self.costs, replica))
            ends = stage_ends(replica_costs(self.costs, replica), replica.depths(schedule))
            ready = tuple(begin + end for end in ends)
            self._runs[kind, schedule] = ready, gradients_ahead(self.costs, replica), begin, self._bytes(replica, kind.work)
        return self._runs[kind, schedule]

    def _bytes(self, replica: ReplicaPlan, work: Work) -> Array:
        """The bytes of a pipeline's transfers one way, as `contention` has them: where they are a part of actions they share
        nothing."""
        found = np.zeros(len(replica.stages) - 1)
        for s, (a, b) in enumerate(pairwise(replica.stages)):
            parts, link = min(len(a.devices), len(b.devices)), self.costs.link(a.device, b.device)
            for size, count in work.runs if self.costs.cluster.runtime_overhead.overlap_transfers else ():
                part = float(self.appraiser.problem.profile.output_bytes[a.layers[1] - 1]) * size / parts
                found[s] += count * parts * occupied_seconds(link, part) * rate_alone(link, part)
        return found

    def _sums(self, found: list[AlikePipelines]) -> Iterator[Sum]:
        """All gradient sums, in the order of `sums.sync_segments`. Pipelines of one kind wait alike."""
        alone = self.appraiser.problem.backend == "torch"  # else one process drives a pipeline
        for holders, buckets in self._segments(found):
            groups = [found[i].work.groups[s] for i, s in holders]
            pieces, each = lcm(*groups), list[tuple[Index, set[Owner]]]()
            for piece in range(pieces):
                shards = [piece * degree // pieces for degree in groups]
                devices = np.concatenate([found[i].devices[:, s] + shard for (i, s), shard in zip(holders, shards, strict=True)])
                owners = {(i, s, shard) if alone else (i, 0, 0) for (i, s), shard in zip(holders, shards, strict=True)}
                if len(devices) > 1:
                    each.append((devices, owners))
            for size, lowest in buckets:
                made = max(found[i].ready[s] - found[i].ahead[layer] for (i, s), layer in zip(holders, lowest, strict=True))
                for devices, owners in each:
                    yield Sum(devices, size, owners, made)

    def _synced(self, found: list[AlikePipelines], sums: list[Sum]) -> float:
        """When the last gradient sum ends, if nothing shared an adapter with others: that never takes less. See
        `sums.sync_times`."""
        ready = [max(x.ready) for x in found]
        end, free = max(ready), dict[Owner, float]()
        if self.appraiser.problem.backend != "torch":
            free = {(i, 0, 0): own for i, own in enumerate(ready)}
        for devices, size, owners, made in sums:
            done = max(made, *(free.get(x, 0.0) for x in owners)) + self._ring(devices, size)
            free.update(dict.fromkeys(owners, done))
            end = max(end, done)
        return end

    def _carried(self, found: list[AlikePipelines], sums: list[Sum]) -> float:
        """When the adapters can be done with all that crosses them at the earliest."""
        lanes = [
            PipelineTraffic(x.devices, x.carried, sum(not self.costs.has_backward(hi) for _, hi in x.work.stages)) for x in found
        ]
        rings, begin = dict[int, SumTraffic](), min(x.begin for x in found)
        for devices, size, _, made in sums:
            before = rings.get(id(devices), SumTraffic(devices, [], made - begin))
            rings[id(devices)] = SumTraffic(devices, [*before.sizes, size], min(made - begin, before.made))
        return begin + self.traffic.least(lanes, rings.values())

    def _segments(self, found: list[AlikePipelines]) -> list[tuple[list[tuple[int, int]], list[tuple[float, Sequence[int]]]]]:
        """Holders (kind of pipeline, stage), and of what they sum at once the bytes of each piece and down to which layer of each
        holder backward has to come, in the order of `sums.sync_segments`."""
        segments = list[tuple[list[tuple[int, int]], list[tuple[float, Sequence[int]]]]]()
        cuts = sorted({lo for x in found for lo, _ in x.work.stages} | {self.appraiser.L})
        most = self.costs.bucket_bytes if self.appraiser.problem.backend == "torch" else math.inf
        for lo, hi in reversed(list(pairwise(cuts))) if sum(len(x.devices) for x in found) > 1 else ():
            holders = [(i, x.holding(lo)) for i, x in enumerate(found)]
            pieces = lcm(*(found[i].work.groups[s] for i, s in holders))
            buckets = self.costs.buckets(self._kinds(found, holders), lo, hi, pieces, most)
            segments.append((holders, [(x.size_bytes, (x.lo,) * len(holders)) for x in buckets]))
        for _, members, trained_bytes in self.appraiser.problem.profile.ties:
            held = sorted({(i, x.holding(layer)) for i, x in enumerate(found) for layer in members})
            stages = [found[i].work.stages[s] for i, s in held]
            pieces = lcm(*(found[i].work.groups[s] for i, s in held))
            lowest = [min(layer for layer in members if lo <= layer < hi) for lo, hi in stages]
            segments.append((held, [(trained_bytes / pieces, lowest)]))
        return segments

    def _kinds(self, found: list[AlikePipelines], holders: list[tuple[int, int]]) -> frozenset[tuple[str, int]]:
        """(device type, degree) of those that hold the same layers, as `Costs.summed_bytes` has them."""
        kinds = set[tuple[str, int]]()
        for i, s in holders:
            degree = found[i].work.groups[s]
            types = self.appraiser.type_of[found[i].devices[:, s]].tolist() if degree > 1 else []
            kinds |= {(self.appraiser.types[kind], degree) for kind in types} if types else {("", 1)}
        return frozenset(kinds)

    def _ring(self, devices: Index, size: float) -> float:
        """The seconds of a gradient sum, as `Costs.all_reduce_seconds` has them."""
        return ring_seconds(self.appraiser.links.among(self.costs, devices), len(devices), size) if size > 0 else 0.0
