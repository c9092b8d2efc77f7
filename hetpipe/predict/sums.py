"""Sums of gradients: what is summed by whom, in which order, and when, as `runtime.gradients` does it.

What has the same owners in all replicas is cut into buckets, from the last layer to the first. A bucket is summed as soon as the
last backward of every owner has come down through its first layer, and the sums before it are done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpipe.predict.cost import Costs
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Gradients that are one message: of layers [lo, hi), which have the same owners in all replicas; for a tied group `tied`
    names it, and the range is its hull. `holders` are the (replica, stage) of its owners, and `lowest` the layer there down to
    which backward has to come."""

    lo: int
    hi: int
    owners: tuple[str, ...]
    size_bytes: float
    holders: tuple[tuple[int, int], ...]
    lowest: tuple[int, ...]
    tied: str | None = None


def owner_segments(replicas: Sequence[ReplicaPlan]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Runs of consecutive layers with the same owners (one device per replica: the first of a group), ascending: at most
    1 + Σ(n_r − 1)."""
    return [(lo, hi, tuple(replicas[r].stages[s].device for r, s in _at(replicas, lo))) for lo, hi in _runs(replicas)]


def shard_owners(stages: Sequence[StagePlan]) -> list[tuple[str, ...]]:
    """Who holds each piece of what these stages all hold: a stage of degree t holds t equal shards, so in T pieces, T the
    least common multiple of all degrees, piece j lies on device ⌊j·t / T⌋ of each stage. [T pieces][stages]

    >>> one, two = StagePlan(layers=(0, 1), devices=("a/0",)), StagePlan(layers=(0, 1), devices=("b/0", "b/1"))
    >>> shard_owners([one, two])
    [('a/0', 'b/0'), ('a/0', 'b/1')]
    """
    degrees = [len(stage.devices) for stage in stages]
    pieces = math.lcm(*degrees)
    return [
        tuple(stage.devices[j * t // pieces] for stage, t in zip(stages, degrees, strict=True))
        for j in range(pieces)
    ]


def sync_segments(plan: Plan, costs: Costs) -> list[Segment]:
    """What is all-reduced, in launch order: buckets from the last layer to the first, tied groups last. Only groups of two or
    more devices are listed. Shards of a tensor-parallel stage are summed apart, each with its owners and its part of the bytes;
    they use links of their own. One process that drives several devices launches all after its last backward: for it there is
    nothing to be had from buckets, and segments are whole."""
    replicas = plan.replicas
    most = costs.bucket_bytes if plan.backend == "torch" else math.inf
    segments = list[Segment]()
    for lo, hi in reversed(_runs(replicas)) if len(replicas) > 1 else ():
        holders = _at(replicas, lo)
        stages = [replicas[r].stages[s] for r, s in holders]
        pieces = shard_owners(stages)
        degrees = [len(stage.devices) for stage in stages]
        kinds = frozenset((costs.cluster.device(s.device).type if t > 1 else "", t) for s, t in zip(stages, degrees, strict=True))
        for first, end, size in costs.buckets(kinds, lo, hi, len(pieces), most):
            lowest = (first,) * len(holders)
            segments += [
                Segment(lo=first, hi=end, owners=owners, size_bytes=size, holders=holders, lowest=lowest)
                for owners in pieces
                if len(set(owners)) > 1
            ]
    for name, members, trained_bytes in costs.profile.ties:
        holders = _holding(replicas, members)
        stages = [replicas[r].stages[s] for r, s in holders]
        lowest = tuple(min(i for i in members if stage.layers[0] <= i < stage.layers[1]) for stage in stages)
        pieces = shard_owners(stages)
        size = trained_bytes / len(pieces)
        segments += [
            Segment(lo=members[0], hi=members[-1] + 1, owners=owners, size_bytes=size, holders=holders, lowest=lowest, tied=name)
            for owners in pieces
            if len(set(owners)) > 1
        ]
    return segments


def _runs(replicas: Sequence[ReplicaPlan]) -> list[tuple[int, int]]:
    return list(pairwise(sorted({end for replica in replicas for stage in replica.stages for end in stage.layers})))


def _at(replicas: Sequence[ReplicaPlan], layer: int) -> tuple[tuple[int, int], ...]:
    """The stage of each replica that holds this layer."""
    return tuple((r, next(s for s, x in enumerate(one.stages) if layer < x.layers[1])) for r, one in enumerate(replicas))


def _holding(replicas: Sequence[ReplicaPlan], layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The stages, replica by replica, that hold any of these layers."""
    return tuple(
        (r, s)
        for r, replica in enumerate(replicas)
        for s, stage in enumerate(replica.stages)
        if any(stage.layers[0] <= layer < stage.layers[1] for layer in layers)
    )


def gradients_ahead(costs: Costs, replica: ReplicaPlan) -> list[float]:
    """Seconds before the end of its stage's last backward at which the gradients of each layer, and of all above it in the stage,
    are made [L]; 0 where sums wait for that end (`bucket_bytes`). A gradient that blocks both ends while it is sent
    (`overlap_transfers`) is sent after that."""
    if math.isinf(costs.bucket_bytes):
        return [0.0] * costs.layer_count
    size, found = replica.microbatch_sizes[-1], list[float]()
    for s, stage in enumerate(replica.stages):
        kind, degree = costs.cluster.device(stage.device).type, len(stage.devices)
        below = costs.backward_below(kind, *stage.layers, size, recompute=stage.recompute, degree=degree)
        found += (below + (0.0 if s == 0 else _sent_back(costs, replica, s))).tolist()
    return found


def _sent_back(costs: Costs, replica: ReplicaPlan, s: int) -> float:
    """Seconds of the last gradient's way from stage s to the one before, if that is a part of the backward."""
    if costs.cluster.runtime_overhead.overlap_transfers:
        return 0.0
    before, stage = replica.stages[s - 1 : s + 1]
    degrees = len(before.devices), len(stage.devices)
    sent = {b: costs.transfer(before.device, stage.device, stage.layers[0], b, degrees) for b in set(replica.microbatch_sizes)}
    return sent[replica.microbatch_sizes[-1]][0] + max(latency for _, latency in sent.values())


def sync_times(
    plan: Plan, costs: Costs, ends: Sequence[Sequence[float]], ahead: Sequence[Sequence[float]]
) -> list[tuple[Segment, float, float]]:
    """(segment, start, end) of each gradient sum, if nothing shares an adapter: it starts when all its owners have made its
    gradients and the sums before it are done, and overlaps backward. Of each replica `ends` has when the last backward of each
    stage ends, and `ahead` how long before that gradients are made (`gradients_ahead`; of alike replicas the same list).

    Devices that one process drives (see `Plan.process_of`) are one owner: its sums begin after the backward of its last stage,
    one at a time, as these libraries give no place to start them earlier."""
    process, free, done = plan.process_of, dict[str, float](), list[tuple[Segment, float, float]]()
    if plan.backend != "torch":
        free = {replica.stages[0].device: max(own) for replica, own in zip(plan.replicas, ends, strict=True)}
    holders, unlike = tuple[tuple[int, int], ...](), list[tuple[int, int, int]]()
    for segment in sync_segments(plan, costs):
        if segment.holders is not holders:
            holders = segment.holders
            alike = {(id(ahead[r]), s, ends[r][s]): (i, r, s) for i, (r, s) in enumerate(holders)}
            unlike = list(alike.values())
        made = max(ends[r][s] - ahead[r][segment.lowest[i]] for i, r, s in unlike)
        owners = {process[d] for d in segment.owners}
        start = max(made, *(free.get(p, 0.0) for p in owners))
        end = start + costs.all_reduce_seconds(segment.owners, segment.size_bytes)
        free.update(dict.fromkeys(owners, end))
        done.append((segment, start, end))
    return done
