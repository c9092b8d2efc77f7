"""The simulator: a plan and its costs → Timeline. A step as it repeats, from the end of the gradient sums before it to the end of
its own: optimizers, pipelines (`pipeline`), gradient sums as the last backwards make them (`sums`); what crosses the same
network adapters at the same time shares them (`contention`). A replica begins when the longest of its own optimizers has ended:
it does not wait for those of others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hetpipe.documents.cluster import Cluster, Link
from hetpipe.documents.plan import Plan, ReplicaPlan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.files.units import in_bytes
from hetpipe.predict.contention import Array, Pipe, RingSum, share
from hetpipe.predict.cost import Costs, most_in_flight
from hetpipe.predict.pipeline import PipelineCosts, StageTimes, action_ends, forward_depths, stage_times
from hetpipe.predict.sums import Segment, gradients_ahead, sync_segments, sync_times
from hetpipe.predict.timeline import LazySpans, Span, SpanKind, Timeline


def replica_costs(costs: Costs, replica: ReplicaPlan) -> PipelineCosts:
    """The durations of one replica of a plan; of its different sizes of micro-batches the smallest first. Where transfers do not
    overlap compute (`runtime_overhead`) each is part of the action that sends it and of the one that receives it, and no wire is
    left to wait for; a pipeline's fill and drain then count it at both ends."""
    (sizes, which), stages = np.unique(replica.microbatch_sizes, return_inverse=True), replica.stages
    different = sizes.tolist()
    forward, backward, occupied, latency = [], [], [], []
    for s, stage in enumerate(stages):
        kind, degree = costs.cluster.device(stage.device).type, len(stage.devices)
        priced = [
            costs.stage_seconds(kind, *stage.layers, b, recompute=stage.recompute, offload=stage.offload, degree=degree)
            for b in different
        ]
        forward.append([f for f, _ in priced])
        backward.append([b for _, b in priced])
        if s + 1 < len(stages):
            after = stages[s + 1]
            degrees = (degree, len(after.devices))
            sent = [costs.transfer(stage.device, after.device, stage.layers[1], b, degrees) for b in different]
            occupied.append([seconds for seconds, _ in sent])
            latency.append(max(delay for _, delay in sent))
    frozen = sum(not costs.has_backward(stage.layers[1]) for stage in stages)
    found = PipelineCosts(
        forward=np.array(forward),
        backward=np.array(backward),
        occupied=np.array(occupied).reshape(-1, len(different)),
        latency=np.array(latency, dtype=np.float64),
        which=which,
        frozen=frozen,
    )
    return found if costs.cluster.runtime_overhead.overlap_transfers else _blocking(found)


def _blocking(costs: PipelineCosts) -> PipelineCosts:
    more = np.zeros((2, *costs.forward.shape))  # that forwards and backwards take
    for s, (busy, delay) in enumerate(zip(costs.occupied, costs.latency, strict=True)):
        for way in (0, 1) if s >= costs.frozen else (0,):
            more[way, s : s + 2] = more[way, s : s + 2] + busy + delay
    return replace(
        costs,
        forward=costs.forward + more[0],
        backward=costs.backward + more[1],
        occupied=np.zeros_like(costs.occupied),
        latency=np.zeros_like(costs.latency),
    )


def peak_bytes(plan: Plan, costs: Costs) -> dict[str, int]:
    """Greatest bytes on each device of the plan."""
    peaks: dict[str, int] = {}
    known: dict[object, list[int]] = {}
    for replica in plan.replicas:
        key = _kinds(costs, replica)
        if key not in known:
            known[key] = _stage_peaks(costs, replica, replica.depths(plan.schedule))
        for stage, peak in zip(replica.stages, known[key], strict=True):
            peaks.update(dict.fromkeys(stage.devices, peak))
    return peaks


def host_bytes(plan: Plan, costs: Costs) -> dict[str, int]:
    """Greatest bytes of host memory that stages offload to, of each node that has such stages."""
    found: dict[str, float] = {}
    for replica in plan.replicas:
        for stage, depth in zip(replica.stages, replica.depths(plan.schedule), strict=True):
            if stage.offload:
                device, window = costs.cluster.device(stage.device), most_in_flight(replica.microbatch_sizes, depth)
                own = costs.host_bytes_per_sample(device.type, *stage.layers, len(stage.devices)) * window
                found[device.node] = found.get(device.node, 0.0) + own
    return {node: round(size) for node, size in found.items()}


def check_host_memory(found: Mapping[str, int], cluster: Cluster) -> None:
    """InputError if stages offload more to a node than its `host_memory`, where the cluster says that."""
    limits = {node.name: node.host_memory for node in cluster.nodes if node.host_memory is not None}
    over = [
        f"{in_bytes(size)} to the host of node {node!r}, whose host_memory is {in_bytes(limits[node])} in the cluster file"
        for node, size in found.items()
        if size > limits.get(node, size)
    ]
    if over:
        raise InputError(f"the plan offloads {', and '.join(over)}: recompute instead, or put fewer micro-batches in flight")


def _stage_peaks(costs: Costs, replica: ReplicaPlan, depths: Sequence[int]) -> list[int]:
    found = []
    for stage, depth in zip(replica.stages, depths, strict=True):
        kind, degree = costs.cluster.device(stage.device).type, len(stage.devices)
        memory = costs.stage_memory(
            kind, *stage.layers, samples=replica.samples, recompute=stage.recompute, offload=stage.offload, degree=degree
        )
        found.append(memory.peak(replica.microbatch_sizes, depth))
    return found


def _kinds(costs: Costs, replica: ReplicaPlan) -> tuple[object, ...]:
    """What decides a replica's bytes: alike for replicas that differ only in which devices of the same types they have."""
    device = costs.cluster.device
    return replica.microbatch_sizes, tuple(
        (stage.layers, stage.recompute, stage.offload, stage.warmup, len(stage.devices), device(stage.device).type)
        for stage in replica.stages
    )


def _links(costs: Costs, replica: ReplicaPlan) -> tuple[Link, ...]:
    """The links between a replica's stages, and within its tensor-parallel groups."""
    first = [stage.device for stage in replica.stages]
    groups = [stage.device for stage in replica.stages if len(stage.devices) > 1]
    return tuple(costs.link(a, b) for a, b in (*pairwise(first), *zip(groups, groups, strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One pipeline as simulated: the optimizer of each stage; how long before the end of its stage's last backward each layer's
    gradients are made (`gradients_ahead`); and its durations with what else `contention` has to know of it, but on which nodes it
    is. `shared`, where it shares adapters: when forwards and backwards end [2, n, m], and when each boundary's link is free again
    after transfers of activations, and of gradients [2, n − 1, m]."""

    optimizers: list[float]
    ahead: list[float]
    pipe: Pipe
    shared: tuple[Array, Array] | None = None

    @cached_property
    def times(self) -> list[StageTimes]:
        """Finish times since the step began with the optimizers."""
        costs, depths, begin = self.pipe.costs, self.pipe.depths, self.pipe.begin
        return stage_times(begin + action_ends(costs, depths) if self.shared is None else self.shared[0], costs.frozen)

    @cached_property
    def ready(self) -> list[float]:
        """When each stage's last backward ends, or, where it has none, its last forward."""
        return [stage.end for stage in self.times]


def optimizers_of(costs: Costs, replica: ReplicaPlan) -> list[float]:
    """Seconds of each stage's optimizer; the pipeline begins when the longest has ended."""
    return [costs.optimizer_seconds(costs.cluster.device(s.device).type, *s.layers, len(s.devices)) for s in replica.stages]


def computing_seconds(plan: Plan, profile: Profile, cluster: Cluster) -> dict[str, float]:
    """Seconds of all forwards and backwards of a step on each device, without the optimizer's, and without transfers, whether
    they overlap or not."""
    costs = Costs(profile.at(plan.precision), profile.joined(cluster))
    found: dict[str, float] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            kind, how = costs.cluster.device(stage.device).type, {"recompute": stage.recompute, "offload": stage.offload}
            each = Counter(replica.microbatch_sizes).items()
            seconds = sum(
                count * sum(costs.stage_seconds(kind, *stage.layers, size, **how, degree=len(stage.devices)))
                for size, count in each
            )
            found |= dict.fromkeys(stage.devices, seconds)
    return found


def _run(costs: Costs, replica: ReplicaPlan, depths: Sequence[int]) -> Run:
    own, optimizers = replica_costs(costs, replica), optimizers_of(costs, replica)
    rate, members = np.zeros_like(own.occupied), np.ones(len(own.occupied))
    different = sorted(set(replica.microbatch_sizes))
    for s, (a, b) in enumerate(pairwise(replica.stages)):
        if costs.cluster.runtime_overhead.overlap_transfers:  # else they are part of actions, and share nothing
            parts = min(len(a.devices), len(b.devices))
            rate[s] = [costs.transfer_rate(a.device, b.device, a.layers[1], size, parts) for size in different]
            members[s] = parts
    depths = tuple(forward_depths(depths, own.frozen, len(own.which)))
    pipe = Pipe(costs=own, depths=depths, nodes=(), rate=rate, members=members, begin=max(optimizers))
    return Run(optimizers=optimizers, ahead=gradients_ahead(costs, replica), pipe=pipe)


Sums = list[tuple[Segment, float, float]]  # each with its start and end


class Played(NamedTuple):
    """A plan's pipelines and gradient sums, and when all of it ends."""

    runs: list[Run]
    sums: Sums
    step: float


def play(plan: Plan, costs: Costs, known: dict[object, Run] | None = None, effort: float = math.inf) -> Played:
    """Pipelines and gradient sums. Replicas that are alike, also those `known` from other plans with the same
    costs, are computed once: alone, and again with all others where they share adapters. EffortError where that
    takes more `effort` (see `flows.ends`)."""
    known = {} if known is None else known
    runs = list[Run]()
    for replica in plan.replicas:
        key = plan.schedule, _kinds(costs, replica), _links(costs, replica)
        if key not in known:
            known[key] = _run(costs, replica, replica.depths(plan.schedule))
        runs.append(known[key])
    found = _shared(plan, costs, runs, effort)
    runs, sums = found or (runs, sync_times(plan, costs, [run.ready for run in runs], [run.ahead for run in runs]))
    return Played(runs, sums, max([*(max(run.ready) for run in runs), *(end for _, _, end in sums)]))


def _shared(plan: Plan, costs: Costs, runs: Sequence[Run], effort: float) -> tuple[list[Run], Sums] | None:
    """Pipelines and sums that share adapters; None where none do."""
    if not costs.cluster.shares_adapters:
        return None
    number = {node.name: i for i, node in enumerate(costs.cluster.nodes)}
    node_of = {device.id: number[device.node] for device in costs.cluster.devices}
    pipes = [
        run.pipe._replace(nodes=tuple(node_of[stage.device] for stage in replica.stages))
        for run, replica in zip(runs, plan.replicas, strict=True)
    ]
    process, segments = plan.process_of, sync_segments(plan, costs)
    rings = [
        RingSum(
            tuple(dict.fromkeys(process[d] for d in x.owners)), _made(plan, runs, x), *costs.ring(x.owners, x.size_bytes, number)
        )
        for x in segments
    ]
    capacity = np.array([rate for node in costs.cluster.nodes for rate in costs.cluster.adapter_rates[node.name]])
    found = share(pipes, rings, capacity, lambda r: runs[r].ready, effort)
    if found is None:
        return None
    again = list(runs)
    for r, shared in found.pipes.items():
        again[r] = replace(runs[r], shared=shared)
    return again, [(segment, *span) for segment, span in zip(segments, found.sums, strict=True)]


def _made(plan: Plan, runs: Sequence[Run], segment: Segment) -> tuple[tuple[int, int, float], ...]:
    """(replica, stage, seconds before the end of its last backward) at which a sum may begin; a process that drives several
    devices waits for the end of all."""
    if plan.backend == "torch":
        return tuple((r, s, runs[r].ahead[l]) for (r, s), l in zip(segment.holders, segment.lowest, strict=True))  # noqa: E741
    found = sorted({r for r, _ in segment.holders})
    return tuple((r, s, 0.0) for r in found for s in range(len(plan.replicas[r].stages)))


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """One step of `plan` as it repeats: optimizers (after the one global norm, so after all sums of the step before), pipelines,
    and gradient sums per owner group, which begin in the last backwards. The profile's measured links override the cluster's.
    InputError if the three do not belong together, or the plan offloads more than a node's host memory."""
    cluster, profile = profile.joined(cluster), profile.at(plan.precision)
    plan.check(cluster=cluster, profile=profile)
    costs = Costs(profile, cluster)
    check_host_memory(offloaded := host_bytes(plan, costs), cluster)
    played = play(plan, costs)
    last = max(played.runs, key=lambda run: max(run.ready))
    end, optimizer = max(last.ready), max(last.optimizers)
    return Timeline(
        spans=LazySpans(lambda: _spans(plan.replicas, played.runs, played.sums)),
        step_seconds=played.step,
        optimizer_seconds=optimizer,
        pipeline_seconds=end - optimizer,
        sync_seconds=played.step - end,
        peak_bytes=peak_bytes(plan, costs),
        host_bytes=offloaded,
        warnings=_extrapolations(plan, profile, cluster),
    )


def _spans(replicas: Sequence[ReplicaPlan], runs: Sequence[Run], sums: Sequence[tuple[Segment, float, float]]) -> list[Span]:
    """All spans: forwards and backwards, then transfers, sums and optimizers."""
    where = {d: (r, s) for r, replica in enumerate(replicas) for s, stage in enumerate(replica.stages) for d in stage.devices}
    spans = []
    for device, (r, s) in where.items():
        costs, times = runs[r].pipe.costs, runs[r].times[s]
        forward, backward = (by_size[s, costs.which].tolist() for by_size in (costs.forward, costs.backward))
        actions: list[tuple[SpanKind, int, float, float]] = [
            *(("F", i, *x) for i, x in enumerate(zip(times.forward, forward, strict=True))),
            *(("B", i, *x) for i, x in enumerate(zip(times.backward, backward, strict=False))),
        ]
        before = 0.0
        for kind, i, end, seconds in sorted(actions, key=itemgetter(2)):
            start = max(before, end - seconds)  # which rounding may put a little before what ended then
            spans.append(Span(device=device, replica=r, stage=s, kind=kind, microbatch=i, start=start, end=end))
            before = end
    for r, (replica, run) in enumerate(zip(replicas, runs, strict=True)):
        spans += _sends(r, replica, run)
    for segment, start, end in sums:
        spans += [_span(d, where[d], "sync", start, end) for d in segment.owners]
    return spans + [_span(d, (r, s), "optimizer", 0.0, runs[r].optimizers[s]) for d, (r, s) in where.items()]


def _sends(r: int, replica: ReplicaPlan, run: Run) -> list[Span]:
    """The transfers of one pipeline, on the device that sends: an output to the next stage, a gradient to the one before, each
    from when its link is free to its arrival."""
    spans, wires, costs = [], None if run.shared is None else run.shared[1].tolist(), run.pipe.costs
    held = costs.occupied[:, costs.which].tolist()
    for s, (occupied, latency) in enumerate(zip(held, costs.latency.tolist(), strict=True)):
        for way, (stage, ends) in enumerate(((s, run.times[s].forward), (s + 1, run.times[s + 1].backward))):
            if way == 1 and s < costs.frozen:
                continue
            free = 0.0
            for i, (ready, seconds) in enumerate(zip(ends, occupied, strict=True)):
                start = max(free, ready)
                free = start + seconds if wires is None else wires[way][s][i]
                if free + latency > start:
                    spans.append(
                        Span(
                            device=replica.stages[stage].device,
                            replica=r,
                            stage=stage,
                            kind="send",
                            start=start,
                            end=free + latency,
                            microbatch=i,
                        )
                    )
    return spans


def _span(device: str, at: tuple[int, int], kind: SpanKind, start: float, end: float) -> Span:
    return Span(device=device, replica=at[0], stage=at[1], kind=kind, start=start, end=end)


def _extrapolations(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    used: dict[tuple[str, int], int] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            key = (cluster.device(stage.device).type, len(stage.devices))
            used[key] = max(used.get(key, 0), *replica.microbatch_sizes)
    warnings = []
    for (kind, degree), size in sorted(used.items()):
        largest = profile.measurement(kind, degree).microbatch_sizes[-1]
        if size > largest:
            warnings.append(
                f"micro-batches of {size} samples on {kind!r} are above the largest measured, {largest}: times are extrapolated"
            )
    return tuple(warnings)
