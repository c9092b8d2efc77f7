"""Sums of gradients: what is summed by whom, in which order, and when, as `runtime.gradients` does it.

What has the same owners in all replicas is cut into buckets, from the last layer to the first. A bucket is summed as soon as the
last backward of every owner has come down through its first layer, and the sums before it are done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.seats import Owners
from hetpipe.predict.cost import Costs


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


def sync_segments(plan: Plan, costs: Costs) -> list[Segment]:
    """What is all-reduced, in launch order: buckets from the last layer to the first, tied groups last. Only groups of two or
    more devices are listed. Shards of a tensor-parallel stage are summed apart, each with its owners and its part of the bytes;
    they use links of their own. One process that drives several devices launches all after its last backward: for it there is
    nothing to be had from buckets, and segments are whole."""
    most = costs.bucket_bytes if plan.backend == "torch" else math.inf
    segments = list[Segment]()
    for owners in plan.owners() if len(plan.replicas) > 1 else ():
        stages = _stages(plan, owners)
        degrees = [len(stage.devices) for stage in stages]
        kinds = frozenset((costs.cluster.device(s.device).type if t > 1 else "", t) for s, t in zip(stages, degrees, strict=True))
        for first, end, size in costs.buckets(kinds, owners.lo, owners.hi, len(owners.pieces), most):
            segments += _of_pieces(owners, first, end, size, (first,) * len(stages))
    for name, members, trained_bytes in costs.profile.ties:
        owners = plan.owners_of_tied(name, members)
        within = [stage.layers for stage in _stages(plan, owners)]
        lowest = tuple(min(i for i in members if lo <= i < hi) for lo, hi in within)
        segments += _of_pieces(owners, owners.lo, owners.hi, trained_bytes / len(owners.pieces), lowest)
    return segments


def _stages(plan: Plan, owners: Owners) -> list[StagePlan]:
    return [plan.replicas[r].stages[s] for r, s in owners.holders]


def _of_pieces(owners: Owners, lo: int, hi: int, size: float, lowest: tuple[int, ...]) -> list[Segment]:
    """What is summed of layers [lo, hi) at once, piece by piece."""
    return [
        Segment(lo=lo, hi=hi, owners=piece, size_bytes=size, holders=owners.holders, lowest=lowest, tied=owners.tied)
        for piece in owners.pieces
        if len(set(piece)) > 1
    ]


def gradients_ahead(costs: Costs, replica: ReplicaPlan) -> list[float]:
    """Seconds before the end of its stage's last backward at which the gradients of each layer, and of all above it in the stage,
    are made [L]; 0 where sums wait for that end (`bucket_bytes`). A gradient that blocks both ends while it is sent
    (`overlap_transfers`) is sent after that."""
    if math.isinf(costs.bucket_bytes):
        return [0.0] * costs.layer_count
    size, found = replica.microbatch_sizes[-1], list[float]()
    for s, stage in enumerate(replica.stages):
        kind, degree = costs.cluster.device(stage.device).type, len(stage.devices)
        below = costs.backward_below(kind, *stage.layers, size, recompute=stage.recompute, offload=stage.offload, degree=degree)
        returns = s > 0 and costs.has_backward(stage.layers[0])
        found += (below + (_sent_back(costs, replica, s) if returns else 0.0)).tolist()
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
