"""The simulator: a schedule and its costs → Timeline. The pipeline time is the longest path of the schedule's graph:
an action waits for the one before it on its stage, a forward for its activation, a backward for its gradient. Transfers are
first-in first-out on the directed link between two neighbouring stages and overlap compute; contention of replicas on one
wire is not modelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hetpipe.predict.cost import Costs, Segment, sync_segments
from hetpipe.predict.timeline import LazySpans, Span, SpanKind, Timeline
from hetpipe.spec.cluster import Cluster, Link
from hetpipe.spec.plan import Plan, ReplicaPlan
from hetpipe.spec.profile import Profile
from hetpipe.spec.schedule import check_depths


class StageTimes(NamedTuple):
    """Finish times of one stage in one step: forward[i] and backward[i] of micro-batch i (starts are finish − duration)."""

    forward: list[float]
    backward: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCosts:
    """Durations of one pipeline: `forward` and `backward` [n][m] seconds; `occupied` [n − 1][m] seconds that a boundary's
    transfer holds its link (either direction) and `latency` [n − 1] seconds on top."""

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    occupied: Sequence[Sequence[float]]
    latency: Sequence[float]


def pipeline_times(costs: PipelineCosts, depths: Sequence[int]) -> list[StageTimes]:
    """Finish time of every action for warm-up `depths` [n], which must not rise along the pipeline. O(n·m).

    Nothing is searched: first every stage's warm-up forwards, stage by stage; then in round i the backwards of
    micro-batch i from the last stage to the first, and the forwards that these let in, i + depth(s), from the
    first stage to the last. Each stage's order is its schedule's, and every action stands behind those it waits
    for: forward j of stage s − 1 is let in by round j − depth(s − 1), no later than round j − depth(s).
    """
    n, m = len(costs.forward), len(costs.forward[0])
    depths = [min(depth, m) for depth in depths]
    check_depths(depths)
    none = [0.0] * m
    down, up = (
        [*costs.occupied, none],
        [none, *costs.occupied],
    )  # of the boundary behind and before each stage
    latency, latency_up = [*costs.latency, 0.0], [0.0, *costs.latency][::-1]
    stages, arrived = [], none
    for row, busy, delay, depth in zip(costs.forward, down, latency, depths, strict=True):
        stage = _warm_up(row, busy, delay, depth, arrived)
        stages.append(stage)
        arrived = stage.arrivals
    rows = list(zip(*reversed(costs.backward), strict=True))
    wires = list(zip(*reversed(up), strict=True))
    clock, links = [stage.now for stage in stages], [0.0] * n
    backward = []
    for i in range(m):
        ends, links = _backwards(clock, rows[i], links, wires[i], latency_up)
        backward.append(ends)
        clock = ends.copy()
        if i + depths[-1] < m:
            _forwards(clock, i, stages, m)
    columns = zip(*backward, strict=True)
    return [StageTimes(stage.ends, list(ends)) for stage, ends in zip(stages, columns, strict=True)]


@dataclass(slots=True)
class _Forwards:
    """The forwards of one stage so far: when each ended, `arrivals` at the next stage, and when its link is free.
    `now` is when the warm-up ended."""

    row: Sequence[float]
    busy: Sequence[float]
    delay: float
    depth: int
    arrived: Sequence[float]
    ends: list[float]
    arrivals: list[float]
    link: float
    now: float


def _warm_up(
    row: Sequence[float], busy: Sequence[float], delay: float, depth: int, arrived: Sequence[float]
) -> _Forwards:
    """A stage's first `depth` forwards. Comparisons instead of max(), which takes three times as long."""
    now = link = 0.0
    ends, arrivals = [], []
    for arrival, seconds, sending in zip(arrived, row[:depth], busy, strict=False):
        if arrival > now:
            now = arrival
        now += seconds
        ends.append(now)
        if now > link:
            link = now
        link += sending
        arrivals.append(link + delay)
    return _Forwards(row, busy, delay, depth, arrived, ends, arrivals, link, now)


def _backwards(
    clock: list[float],
    row: Sequence[float],
    links: list[float],
    busy: Sequence[float],
    delays: Sequence[float],
) -> tuple[list[float], list[float]]:
    """One micro-batch's backwards: when each stage's ends, and when each link is free then, last stage first
    (as are `row`, `links`, `busy` and `delays`; `clock` and the ends are first stage first)."""
    arrival = 0.0
    ends, free = [], []
    for now, seconds, link, sending, delay in zip(reversed(clock), row, links, busy, delays, strict=True):
        if arrival > now:
            now = arrival
        now += seconds
        ends.append(now)
        if now > link:
            link = now
        link += sending
        free.append(link)
        arrival = link + delay
    ends.reverse()
    return ends, free


def _forwards(clock: list[float], i: int, stages: Sequence[_Forwards], m: int) -> None:
    """The forwards that micro-batch i's backwards let in; `clock` moves on."""
    for s, stage in enumerate(stages):
        f = i + stage.depth
        if f >= m:
            continue
        now, arrival = clock[s], stage.arrived[f]
        if arrival > now:
            now = arrival
        now += stage.row[f]
        stage.ends.append(now)
        clock[s] = now
        link = stage.link
        if now > link:
            link = now
        link += stage.busy[f]
        stage.link = link
        stage.arrivals.append(link + stage.delay)


def replica_costs(costs: Costs, replica: ReplicaPlan) -> PipelineCosts:
    """The durations of one replica of a plan (see `costs_by_size`)."""
    found = costs_by_size(costs, replica)
    place = {size: i for i, size in enumerate(sorted(set(replica.microbatch_sizes)))}
    which = [place[size] for size in replica.microbatch_sizes]

    def each(rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """One value for each micro-batch."""
        return [[row[0]] * len(which) if len(place) == 1 else [row[i] for i in which] for row in rows]

    return PipelineCosts(
        forward=each(found.forward), backward=each(found.backward), occupied=each(found.occupied), latency=found.latency
    )


def costs_by_size(costs: Costs, replica: ReplicaPlan) -> PipelineCosts:
    """The durations of one micro-batch of each different size, the smallest first. Where transfers do not overlap compute
    (`runtime_overhead`) each is part of the action that sends it and of the one that receives it, and no wire is left to wait
    for; a pipeline's fill and drain then count it at both ends."""
    different, stages = sorted(set(replica.microbatch_sizes)), replica.stages
    forward, backward, occupied, latency = [], [], [], []
    for s, stage in enumerate(stages):
        kind, degree = costs.cluster.device(stage.device).type, len(stage.devices)
        priced = [
            costs.stage_seconds(kind, *stage.layers, b, recompute=stage.recompute, degree=degree)
            for b in different
        ]
        forward.append([f for f, _ in priced])
        backward.append([b for _, b in priced])
        if s + 1 < len(stages):
            after = stages[s + 1]
            degrees = (degree, len(after.devices))
            sent = [
                costs.transfer(stage.device, after.device, stage.layers[1], b, degrees) for b in different
            ]
            occupied.append([seconds for seconds, _ in sent])
            latency.append(max(delay for _, delay in sent))
    found = PipelineCosts(forward=forward, backward=backward, occupied=occupied, latency=latency)
    return found if costs.cluster.runtime_overhead.overlap_transfers else _blocking(found)


def _blocking(costs: PipelineCosts) -> PipelineCosts:
    n, m = len(costs.forward), len(costs.forward[0])
    taken = [[0.0] * m for _ in range(n)]
    for s, (busy, delay) in enumerate(zip(costs.occupied, costs.latency, strict=True)):
        for stage in (s, s + 1):
            taken[stage] = [
                total + seconds + delay for total, seconds in zip(taken[stage], busy, strict=True)
            ]

    def longer(rows: Sequence[Sequence[float]]) -> list[list[float]]:
        return [
            [a + b for a, b in zip(row, more, strict=True)] for row, more in zip(rows, taken, strict=True)
        ]

    return PipelineCosts(
        forward=longer(costs.forward), backward=longer(costs.backward),
        occupied=[[0.0] * m] * (n - 1), latency=[0.0] * (n - 1),
    )  # fmt: skip


def sync_times(
    segments: Sequence[Segment],
    ready: dict[str, float],
    costs: Costs,
    process_of: Mapping[str, str] | None = None,
) -> list[tuple[Segment, float, float]]:
    """(segment, start, end) of each gradient sum: it starts when all its owners have ended their backward and the sums
    before it are done, and overlaps the backward of devices that are not its owners. Devices that one process drives
    (`process_of`, see `Plan.process_of`) are one owner: its sums begin after the backward of its last stage, one at a time, as
    these libraries give no place to start them earlier."""
    process = process_of or {device: device for device in ready}
    free: dict[str, float] = {}
    for device, end in ready.items():
        free[process[device]] = max(end, free.get(process[device], 0.0))
    done = []
    for segment in segments:
        owners = {process[d] for d in segment.owners}
        start = max(free[p] for p in owners)
        end = start + costs.all_reduce_seconds(segment.owners, segment.size_bytes)
        free.update(dict.fromkeys(owners, end))
        done.append((segment, start, end))
    return done


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


def _stage_peaks(costs: Costs, replica: ReplicaPlan, depths: Sequence[int]) -> list[int]:
    found = []
    for stage, depth in zip(replica.stages, depths, strict=True):
        kind, degree = costs.cluster.device(stage.device).type, len(stage.devices)
        memory = costs.stage_memory(
            kind, *stage.layers, samples=replica.samples, recompute=stage.recompute, degree=degree
        )
        found.append(memory.peak(replica.microbatch_sizes, depth))
    return found


def _kinds(costs: Costs, replica: ReplicaPlan) -> tuple[object, ...]:
    """What decides a replica's bytes: alike for replicas that differ only in which devices of the same types they have."""
    device = costs.cluster.device
    return replica.microbatch_sizes, tuple(
        (stage.layers, stage.recompute, stage.warmup, len(stage.devices), device(stage.device).type)
        for stage in replica.stages
    )


def _links(costs: Costs, replica: ReplicaPlan) -> tuple[Link, ...]:
    """The links between a replica's stages, and within its tensor-parallel groups."""
    first = [stage.device for stage in replica.stages]
    groups = [stage.device for stage in replica.stages if len(stage.devices) > 1]
    return tuple(costs.link(a, b) for a, b in (*pairwise(first), *zip(groups, groups, strict=True)))


class _Run(NamedTuple):
    """One pipeline as simulated: its durations, its finish times, and the optimizer of each stage."""

    costs: PipelineCosts
    times: list[StageTimes]
    optimizers: list[float]


def _run(costs: Costs, replica: ReplicaPlan, depths: Sequence[int]) -> _Run:
    priced = replica_costs(costs, replica)
    optimizers = [
        costs.optimizer_seconds(costs.cluster.device(s.device).type, *s.layers, len(s.devices))
        for s in replica.stages
    ]
    return _Run(priced, pipeline_times(priced, depths), optimizers)


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """One step of `plan`: pipelines, then gradient sums per owner group, then (after the one global norm, so after all sums)
    the optimizers. The profile's measured links override the cluster's. Replicas that are alike are computed once.
    InputError if the three do not belong together."""
    cluster = cluster.with_links(profile.links)
    plan.check(cluster=cluster, profile=profile)
    costs = Costs(profile, cluster)
    known: dict[object, _Run] = {}
    runs, ready = [], {}
    for replica in plan.replicas:
        key = _kinds(costs, replica), _links(costs, replica)
        if key not in known:
            known[key] = _run(costs, replica, replica.depths(plan.schedule))
        runs.append(known[key])
        for stage, finish in zip(replica.stages, runs[-1].times, strict=True):
            ready.update(dict.fromkeys(stage.devices, finish.backward[-1]))
    pipeline = max(ready.values())
    sums = sync_times(sync_segments(plan, costs), ready, costs, plan.process_of)
    synced = max([pipeline, *(end for _, _, end in sums)])
    optimizer = max(max(run.optimizers) for run in known.values())
    return Timeline(
        spans=LazySpans(lambda: _spans(plan.replicas, runs, sums, synced)),
        step_seconds=synced + optimizer, pipeline_seconds=pipeline, sync_seconds=synced - pipeline, optimizer_seconds=optimizer,
        peak_bytes=peak_bytes(plan, costs), warnings=_extrapolations(plan, profile, cluster),
    )  # fmt: skip


def _spans(
    replicas: Sequence[ReplicaPlan],
    runs: Sequence[_Run],
    sums: Sequence[tuple[Segment, float, float]],
    synced: float,
) -> list[Span]:
    """All spans: forwards and backwards, then transfers, sums and optimizers."""
    where = {
        d: (r, s)
        for r, replica in enumerate(replicas)
        for s, stage in enumerate(replica.stages)
        for d in stage.devices
    }
    spans = []
    for device, (r, s) in where.items():
        priced, times, _ = runs[r]
        forwards = zip(times[s].forward, priced.forward[s], strict=True)
        backwards = zip(times[s].backward, priced.backward[s], strict=True)
        for i, ((f, f_seconds), (b, b_seconds)) in enumerate(zip(forwards, backwards, strict=True)):
            spans.append(
                Span(device=device, replica=r, stage=s, kind="F", microbatch=i, start=f - f_seconds, end=f)
            )
            spans.append(
                Span(device=device, replica=r, stage=s, kind="B", microbatch=i, start=b - b_seconds, end=b)
            )
    for r, (replica, run) in enumerate(zip(replicas, runs, strict=True)):
        spans += _sends(r, replica, run)
    for segment, start, end in sums:
        spans += [_span(d, where[d], "sync", start, end) for d in segment.owners]
    return spans + [
        _span(d, (r, s), "optimizer", synced, synced + runs[r].optimizers[s]) for d, (r, s) in where.items()
    ]


def _sends(r: int, replica: ReplicaPlan, run: _Run) -> list[Span]:
    """The transfers of one pipeline, on the device that sends: an output to the next stage, a gradient to the one before, each
    from when its link is free to its arrival."""
    spans = []
    for s, (occupied, latency) in enumerate(zip(run.costs.occupied, run.costs.latency, strict=True)):
        for stage, ends in ((s, run.times[s].forward), (s + 1, run.times[s + 1].backward)):
            free = 0.0
            for i, (ready, seconds) in enumerate(zip(ends, occupied, strict=True)):
                start = max(free, ready)
                free = start + seconds
                if free + latency > start:
                    spans.append(Span(device=replica.stages[stage].device, replica=r, stage=stage, kind="send",
                                      start=start, end=free + latency, microbatch=i))  # fmt: skip
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
