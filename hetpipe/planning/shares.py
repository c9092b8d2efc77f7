"""Unequal data parallelism in whole numbers: who gets how many micro-batches, or samples."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError


def fastest_shares(times: Sequence[Sequence[float]], m: int) -> list[int]:
    """Shares of `m` micro-batches with the least maximum time, where replica r takes times[r][c] for c
    micro-batches.

    Greedy: each next micro-batch goes to the replica that would end first with it (the first of equals). O(m
    log R). Each row must be nondecreasing; infinity marks counts that a replica cannot hold, and a row may
    end early.

    *Exact.* Let T be the greedy maximum, reached when replica r took its c-th micro-batch, and let other
    shares have a maximum below T. They give r at most c − 1 < c, so some replica p gets more there than it had
    at that moment: at least h_p + 1. But the greedy preferred r, so times[p][h_p + 1] ≥ times[r][c] = T, and
    by monotony p takes at least T. ∎

    >>> fastest_shares([[0, 1, 2, 3, 4], [0, 3, 6, 9, 12]], 4)
    [3, 1]
    """
    for r, row in enumerate(times):
        if any(b < a for a, b in pairwise(row)):
            raise ValueError(f"the times of replica {r} fall with more micro-batches: {list(row)}")
    shares = [0] * len(times)
    heap = [(row[1], r) for r, row in enumerate(times) if len(row) > 1]
    heapq.heapify(heap)
    for i in range(m):
        if not heap or math.isinf(heap[0][0]):
            raise ValueError(f"the replicas can take {i} micro-batches, {m} are to be shared out")
        _, r = heapq.heappop(heap)
        shares[r] += 1
        if shares[r] + 1 < len(times[r]):
            heapq.heappush(heap, (times[r][shares[r] + 1], r))
    return shares


def proportional_shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` in whole parts proportional to `weights`, by largest remainder (Hamilton's method): each part
    is its exact quota rounded down or up, the sum is exact, and equal remainders go to the first.

    >>> proportional_shares([3.0, 2.0, 1.0], 10)
    [5, 3, 2]
    """
    whole = math.fsum(weights)
    if total < 0 or any(w < 0 or not math.isfinite(w) for w in weights) or whole <= 0:
        raise ValueError(
            f"cannot share {total} by the weights {list(weights)}: they must be finite, not negative, and not all zero"
        )
    quotas = [total * w / whole for w in weights]
    parts = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(parts)), key=lambda r: (parts[r] - quotas[r], r))
    for r in order[: total - sum(parts)]:
        parts[r] += 1
    return parts


def shares_for(plan: Plan, batch: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batch sizes of each replica for a batch of `batch` ≤ global_batch samples, such as the last one
    of an epoch.

    Each replica takes whole micro-batches of the plan, in the plan's order, up to its proportional part of
    the batch; what is left goes, a micro-batch at a time, to the replica that is furthest below its part; the
    last samples, fewer than any next micro-batch, are one smaller micro-batch. So no replica holds more
    samples, more micro-batches or a larger micro-batch than its memory was planned for. A replica may get
    none: (). The sum is exact."""
    if not 1 <= batch <= plan.global_batch:
        raise InputError(
            f"a batch of {batch} samples is too large for a plan of {plan.global_batch}. "
            f"Give 1 to {plan.global_batch} samples, or make a plan for a larger global batch"
        )
    sizes = [replica.microbatch_sizes for replica in plan.replicas]
    taken = [_whole(own, batch, plan.global_batch) for own in sizes]
    given = [sum(own[:count]) for own, count in zip(sizes, taken, strict=True)]
    left, extra = batch - sum(given), [0] * len(sizes)
    parts = [batch * sum(own) for own in sizes]
    able = [(given[r] * plan.global_batch - parts[r], r) for r, own in enumerate(sizes) if taken[r] < len(own)]
    heapq.heapify(able)  # who is furthest below its part comes first
    too_large = list[tuple[int, int]]()  # whose next micro-batch is more than what is left, now and later
    while left and able:
        above, r = heapq.heappop(able)
        size = sizes[r][taken[r]]
        if size > left:
            too_large.append((above, r))
            continue
        given[r], left, taken[r] = given[r] + size, left - size, taken[r] + 1
        if taken[r] < len(sizes[r]):
            heapq.heappush(able, (given[r] * plan.global_batch - parts[r], r))
    if left:
        extra[min(too_large)[1]] = left
    return tuple(own[:count] + ((more,) if more else ()) for own, count, more in zip(sizes, taken, extra, strict=True))


def _whole(sizes: Sequence[int], batch: int, global_batch: int) -> int:
    """How many leading micro-batches are within the replica's part of the batch, batch · samples / global
    batch."""
    part, count, so_far = batch * sum(sizes), 0, 0
    for size in sizes:
        if (so_far + size) * global_batch > part:
            break
        so_far, count = so_far + size, count + 1
    return count
