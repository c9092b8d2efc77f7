"""`cephalo`: the whole model on every device, to each the share and the micro-batch size that end the slowest one soonest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetpipe.partitioners.rules.baseline import SimpleRule, recompute_choices
from hetpipe.partitioners.rules.grids import schedule_of
from hetpipe.partitioners.stage_kinds.wires import Array
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index, Work, in_runs
from hetpipe.planning.shares import proportional_shares


def least_maximum(times: Array, counts: Index, total: int) -> Index | None:
    """Shares of `total` samples with the least maximum time, where each of the counts[k] devices of type k takes times[k, b] for
    b samples, rising in b, and infinitely long where it cannot: of each type how many devices get how many, as rows (type,
    samples, devices). None where they cannot. O(K·B·log(K·B)), by bisection over the times that there are.

    >>> least_maximum(np.array([[0.0, 1, 2, 3], [0, 2, 4, 6]]), np.array([1, 1]), 3).tolist()
    [[0, 2, 1], [1, 1, 1]]
    """
    levels = np.unique(times[np.isfinite(times)])

    def most(level: float, side: str) -> Index:
        return np.array([np.searchsorted(row, level, side) - 1 for row in times])  # type: ignore[call-overload]

    if not len(levels) or int((most(levels[-1], "right") * counts).sum()) < total:
        return None
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int((most(levels[middle], "right") * counts).sum()) >= total else (middle + 1, high)
    shares, below = most(levels[low], "right"), np.maximum(most(levels[low], "left"), 0)
    surplus, rows = int((shares * counts).sum()) - total, []
    for k, (share, less, count) in enumerate(zip(shares.tolist(), below.tolist(), counts.tolist(), strict=True)):
        full, rest = divmod(min(surplus, (share - less) * count), max(share - less, 1))
        surplus -= full * (share - less) + rest
        rows += [(k, share, count - full - (rest > 0)), (k, less, full), (k, share - rest, int(rest > 0))]
    return np.array([row for row in rows if row[1] and row[2]])


class Cephalo(SimpleRule):
    """Cephalo (Guo et al., "Cephalo: Harnessing Heterogeneous GPU Clusters for Training Transformer Models", ICS '25, arXiv
    2411.01075; its planner is `split_workload.py`, strategy `dp_ga`, in github.com/benson-guo/cephalo): every device computes the
    whole model on a share of the batch of its own, in micro-batches of a size of its own, by a dynamic program for the least time
    of the slowest. Here the same optimum is found by bisection, since no gathered parameters are waited for.

    What a plan cannot express: training states sharded unevenly over the devices (FSDP), so that a device that cannot hold the
    whole model has no share; a layer that computes all micro-batches before the next one is gathered; activations in host memory.
    A plan can express a smaller last micro-batch, which Cephalo has not. Recompute is everywhere or nowhere."""

    name = "cephalo"
    by_memory = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """A draft without and one with recompute."""
        appraiser, batch = desk.appraiser, desk.problem.global_batch
        counts = np.bincount(appraiser.type_of, minlength=len(appraiser.types))
        for place, recompute in enumerate(recompute_choices(desk.problem)):
            found = [_Times(desk, kind, recompute) for kind in range(len(appraiser.types))]
            rows = least_maximum(np.array([own.seconds for own in found]), counts, batch)
            if rows is None:  # so that the error says what is missing
                even = proportional_shares([1.0] * len(appraiser.ids), batch)
                works = [Work(in_runs(share, 1), (0, appraiser.L), recompute) if share else None for share in even]
            else:
                works = _in_order(appraiser.type_of, [(found[k].work(share), k, devices) for k, share, devices in rows.tolist()])
            used = {device: work for device, work in enumerate(works) if work is not None}
            unlike = {work: i for i, work in enumerate(dict.fromkeys(used.values()))}
            which = np.array([unlike[work] for work in used.values()])
            draft = Draft(self.name, schedule_of(desk.problem), np.array(list(used))[:, None], tuple(unlike), which)
            yield desk.candidate(place, draft)


def _in_order(type_of: Index, rows: list[tuple[Work, int, int]]) -> list[Work | None]:
    """The work of each device, in the cluster's order, from rows (work, type, how many devices)."""
    left: dict[int, list[Work]] = {}
    for work, kind, devices in rows:
        left.setdefault(kind, []).extend([work] * devices)
    turns = {kind: iter(works) for kind, works in left.items()}
    return [next(turns[kind], None) if kind in turns else None for kind in type_of.tolist()]


class _Times:
    """Seconds of the whole model on one type, for every share, with the micro-batch size that is best for it."""

    def __init__(self, desk: Desk, kind: int, recompute: bool) -> None:
        appraiser, batch = desk.appraiser, desk.problem.global_batch
        self.recompute, self.L = recompute, appraiser.L
        schedule = schedule_of(desk.problem)
        shares = np.arange(batch + 1)
        self.seconds, self.best = np.full(batch + 1, np.inf), np.ones(batch + 1, dtype=np.int64)
        self.seconds[0] = 0.0
        for b in desk.problem.profile.measurement(appraiser.types[kind]).microbatch_sizes:
            most = self._most(desk, kind, b, schedule == "gpipe")
            if b > batch or not most:
                break
            each = [
                sum(appraiser.costs.stage_seconds(appraiser.types[kind], 0, self.L, size, recompute=recompute))
                for size in range(1, b + 1)
            ]
            time = shares // b * each[-1] + np.array([0.0, *each])[shares % b]
            time[most + 1 :] = np.inf
            better = time < self.seconds
            self.seconds, self.best = np.where(better, time, self.seconds), np.where(better, b, self.best)
        self.seconds = np.maximum.accumulate(self.seconds)

    def _most(self, desk: Desk, kind: int, b: int, all_in_flight: bool) -> int:
        """The largest share that memory holds in micro-batches of b; inputs of all of them are there."""
        low, high = 0, desk.problem.global_batch
        while low < high:
            share = (low + high + 1) // 2
            work = Work(in_runs(share, b), (0, self.L), self.recompute)
            fits = desk.appraiser.peak(kind, 0, work, work.m if all_in_flight else 1) <= desk.appraiser.limits[kind]
            low, high = (share, high) if fits else (low, share - 1)
        return low

    def work(self, share: int) -> Work:
        """What a device with this share does."""
        return Work(in_runs(share, int(self.best[share])), (0, self.L), self.recompute)


partitioner = Cephalo()
