"""Pipelines side by side: every choice of one for each replica that does the batch, with gradient sums and optimizers as in
`hetpipe.predict.simulator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.cluster import Link
from hetpipe.partitioners.exact.pricing import PricedPipelines
from hetpipe.partitioners.stage_kinds.space import Array, Index, Space
from hetpipe.predict.compiled import compiled

FAR = 1e15  # bytes


class Summing(NamedTuple):
    """What sums of gradients take. Of each kind of a node: its `degree` and the bytes of all layers before each, in all shards
    together, `held` [K, L + 1]; of these, `tied` [L + 1]. Which `link` joins two kinds [K, K], and points (bytes, seconds) of
    each link [links, points] twice. Which layers are members of each tied parameter [ties, L], and its bytes. The most bytes of a
    bucket, and whether one process drives a pipeline. The bytes that hosts have for stages that offload, of each `lent`."""

    degree: Index
    held: Array
    tied: Array
    link: Index
    sizes: Array
    seconds: Array
    members: NDArray[np.bool_]
    member_bytes: Array
    most: float
    one_process: bool
    lent: Array


def summing(space: Space) -> Summing:
    """What sums of gradients take in this problem."""
    profile, one_process = space.problem.profile, space.problem.backend != "torch"
    points = [_points(link) for link in space.links]
    width = max((len(row) for row in points), default=1)
    table = np.array([row + row[-1:] * (width - len(row)) for row in points], dtype=np.float64).reshape(-1, width, 2)
    members = np.zeros((len(profile.ties), space.L), np.bool_)
    for row, (_, layers, _) in zip(members, profile.ties, strict=True):
        row[list(layers)] = True
    held, tied = (np.cumsum(x, axis=-1) for x in (space.shards, profile.tied_trained_bytes))
    return Summing(
        np.array([kind.degree for kind in space.kinds], dtype=np.int64),
        np.pad(held, ((0, 0), (1, 0))),
        np.pad(tied * 1.0, (1, 0)),
        space.link_ids,
        table[:, :, 0].copy(),
        table[:, :, 1].copy(),
        members,
        np.array([size for _, _, size in profile.ties], dtype=np.float64),
        np.inf if one_process else float(space.costs.bucket_bytes),
        one_process,
        np.array(list(space.hosts.values()), dtype=np.float64),
    )


def _points(link: Link) -> list[tuple[float, float]]:
    """Points between which a link's seconds are linear."""
    first = [(0.0, link.latency)] if link.points is None else list(link.points)
    return [*first, (FAR, link.seconds(FAR))]


class Side(NamedTuple):
    """The pipelines to choose from, in order of samples: by row the `samples`, the `bound`, the `kinds` of stages [P, n], and
    when they are `ready` [P, n]; the stage that holds each layer, and when its gradients are `made` [P, L];
    and the bytes that they have on each host [P, hosts]. Rows of replica r
    with n samples are those from first[r, n] to first[r, n + 1] [R, B + 2]; `same` where a replica chooses from those of the one
    before, so that its row is no lower."""

    samples: Index
    bound: Array
    kinds: Index
    ready: Array
    holder: Index
    made: Array
    offloaded: Array
    first: Index
    same: NDArray[np.bool_]


def beside(space: Space, pools: Sequence[PricedPipelines], same: Sequence[bool], B: int) -> Side:
    """What each replica can choose from for a batch of B samples, in order of samples: its pool, or the `same` as the one
    before."""
    width, some, first, start = max(pool.kinds.shape[1] for pool in pools), list[PricedPipelines](), list[Index](), 0
    for pool, again in zip(pools, same, strict=True):
        if again:
            first.append(first[-1])
            continue
        first.append(start + np.searchsorted(pool.samples, np.arange(B + 2)))
        start += pool.number
        some.append(pool)

    def padded(rows: Sequence[Array | Index]) -> Any:
        return np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in rows])

    layers = np.arange(pools[0].made.shape[1])
    return Side(
        np.concatenate([pool.samples for pool in some]),
        np.concatenate([pool.bound for pool in some]),
        padded([pool.kinds for pool in some]),
        padded([pool.ready for pool in some]),
        np.concatenate([(pool.cuts[:, 1:-1, None] <= layers).sum(axis=1) for pool in some]),
        np.concatenate([pool.made for pool in some]),
        np.concatenate([_offloaded(space, pool) for pool in some]),
        np.stack(first),
        np.array(same),
    )


def _offloaded(space: Space, pool: PricedPipelines) -> Array:
    """The bytes that each pipeline has on each host [P, hosts]."""
    found, hosts = np.zeros((pool.number, len(space.hosts))), list(space.hosts)
    (b, samples, forwards), n = pool.load.T, pool.kinds.shape[1]
    for k, kind in enumerate(space.kinds):
        if not space.types.kinds[kind.at].offload:
            continue
        saved = np.array([space.costs.host_bytes_per_sample(kind.type, 0, hi, kind.degree) for hi in range(1, space.L + 1)])
        saved = np.append(0.0, saved)
        for s in range(n):
            depth = np.where(forwards > 0, np.maximum(forwards * (n - s - 1) + 1, 1), samples)
            each = (saved[pool.cuts[:, s + 1]] - saved[pool.cuts[:, s]]) * np.minimum(samples, depth * b)
            found[:, hosts.index(kind.node)] += np.where(pool.kinds[:, s] == k, each, 0.0)
    return found


@compiled
def plans_below(
    x: Summing, side: Side, rows: Index, state: Index, limit: float, falling: bool, found: Index, steps: Array
) -> int:
    """Go on to choose a row for each replica: fill in plans with a step below the limit, [plans, R] rows, and the steps; if it is
    `falling`, below those before. How many there are. `state` is the replica whose turn it is, −1 when all was looked at; where
    to end in rows of the last replica; and how much was done, of which it stops at about as much as there is room for."""
    R, B = len(side.first), side.first.shape[1] - 2
    number, began = 0, state[2]
    low, high, left = np.zeros(R + 1, np.int64), np.zeros(R + 1, np.int64), np.zeros(R + 1, np.int64)
    for r in range(R - 1, -1, -1):  # that those from r on can do
        low[r] = low[r + 1] + side.samples[side.first[r, 0]]
        high[r] = high[r + 1] + side.samples[side.first[r, -1] - 1]
    left[0] = B
    for r in range(R):
        left[r + 1] = left[r] - side.samples[min(rows[r], len(side.samples) - 1)] if r < state[0] else 0
    n = side.kinds.shape[1]
    free, owners = np.zeros((R, n, x.degree.max())), np.zeros((R * n, 3), np.int64)
    r = state[0]
    while r >= 0 and number < len(steps) and state[2] - began < 250 * len(steps):
        rows[r] += 1
        state[2] += 1
        if rows[r] >= (side.first[r, -1] if r < R - 1 else state[1]):
            r -= 1
            continue
        row = rows[r]
        if side.bound[row] >= limit:
            continue
        left[r + 1] = left[r] - side.samples[row]
        if r < R - 1:
            if low[r + 1] <= left[r + 1] <= high[r + 1]:
                r += 1
                least = rows[r - 1] if side.same[r] else side.first[r, 0]
                if r == R - 1:
                    state[1] = side.first[r, left[r] + 1]
                    least = max(least, side.first[r, left[r]])
                rows[r] = least - 1
            continue
        if left[R] != 0:
            continue
        if not _hosts_hold(x, side, rows):
            continue
        state[2] += R * len(x.tied)
        step = _step(x, side, rows, free, owners)
        if step < limit:
            found[number], steps[number] = rows, step
            number += 1
            limit = step if falling else limit
    state[0] = r
    return number


@compiled
def _hosts_hold(x: Summing, side: Side, rows: Index) -> bool:
    """Whether hosts have the memory for all that these pipelines offload."""
    for host in range(len(x.lent)):
        size = 0.0
        for row in rows:
            size += side.offloaded[row, host]
        if np.rint(size) > x.lent[host]:
            return False
    return True


@compiled
def _step(x: Summing, side: Side, rows: Index, free: Array, owners: Index) -> float:
    """The step of a plan where nothing shares an adapter: else a lower bound. `free` is when each device has done the sums
    before, by replica, stage and shard; those of one process begin all at once, after the last backward of them all. Layers with
    the same owners are summed from the last to the first, in buckets."""
    R, L, end = len(rows), len(x.tied) - 1, 0.0
    free[:] = 0.0
    for r in range(R):
        own = 0.0
        for s in range(side.ready.shape[1]):
            own = max(own, side.ready[rows[r], s])
        end = max(end, own)
        if x.one_process:
            free[r] = own
    top = low = 0  # of the bucket that is open; none where top is 0
    for lo in range(L - 1 if R > 1 else -2, -2, -1):
        cut, size = lo < 0, 0.0
        for r in range(R if -1 < lo < L - 1 else 0):
            cut |= side.holder[rows[r], lo] != side.holder[rows[r], lo + 1]
        if lo >= 0:
            size = _held(x, side, rows, lo, lo + 1)
        if top > 0 and (cut or (size > 0 and _held(x, side, rows, lo, top) > x.most)):
            end = max(end, _sum(x, side, rows, low, top, -1, free, owners))
            top = 0
        if size > 0:
            low, top = lo, lo + 1 if top == 0 else top
    for tie in range(len(x.members)):
        end = max(end, _sum(x, side, rows, 0, L, tie, free, owners))
    return end


@compiled
def _held(x: Summing, side: Side, rows: Index, lo: int, hi: int) -> float:
    """The bytes of layers [lo, hi) that their stages sum at once, as `Costs.summed_bytes` has them."""
    most, pieces = 0.0, 1
    for r in range(len(rows)):
        k = side.kinds[rows[r], side.holder[rows[r], lo]]
        most = max(most, x.held[k, hi] - x.held[k, lo])
        pieces = _lcm(pieces, x.degree[k])
    found: float = (most - (x.tied[hi] - x.tied[lo])) / pieces
    return found


@compiled
def _sum(x: Summing, side: Side, rows: Index, lo: int, hi: int, tie: int, free: Array, owners: Index) -> float:
    """When layers [lo, hi), which all have the owners of the first, or a tied parameter, are summed over all stages that hold
    them: the shards apart (`hetpipe.documents.seats`). 0 if that is one stage."""
    count, pieces, slowest, start, last = 0, 1, 0.0, 0.0, 0.0
    for r in range(len(rows)):
        for layer in range(lo, hi if tie >= 0 else lo + 1):
            s = side.holder[rows[r], layer]
            if tie < 0 or (x.members[tie, layer] and (count == 0 or owners[count - 1, 0] != r or owners[count - 1, 1] != s)):
                owners[count, 0], owners[count, 1], owners[count, 2] = r, s, side.kinds[rows[r], s]
                pieces = _lcm(pieces, x.degree[owners[count, 2]])
                start, count = max(start, side.made[rows[r], layer]), count + 1
    size = x.member_bytes[tie] / pieces if tie >= 0 else _held(x, side, rows, lo, hi)
    for i in range(count):
        for j in range(i if size > 0 else 0):
            slowest = max(slowest, _seconds(x, x.link[owners[j, 2], owners[i, 2]], size / count))
    for piece in range(pieces if count > 1 else 0):
        end = start
        for i in range(count):
            end = max(end, free[owners[i, 0], owners[i, 1], piece * x.degree[owners[i, 2]] // pieces])
        end += slowest * (2 * (count - 1))
        last = max(last, end)
        for i in range(count):
            if x.one_process:
                free[owners[i, 0]] = end
            else:
                free[owners[i, 0], owners[i, 1], piece * x.degree[owners[i, 2]] // pieces] = end
    return last


@compiled
def _seconds(x: Summing, link: int, size: float) -> float:
    """The seconds of a link for so many bytes, on the line between two points."""
    i = 1
    while x.sizes[link, i] < size:
        i += 1
    rise = (x.seconds[link, i] - x.seconds[link, i - 1]) / (x.sizes[link, i] - x.sizes[link, i - 1])
    return float(x.seconds[link, i - 1] + rise * (size - x.sizes[link, i - 1]))


@compiled
def _lcm(a: int, b: int) -> int:
    """The least common multiple: of two degrees that are mostly 1."""
    found = a
    while found % b > 0:
        found += a
    return found
