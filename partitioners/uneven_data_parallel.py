"""`uneven-data-parallel`: the whole model on every device, shares of the batch by speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hetpipe.partitioners.rules.baseline import SimpleRule, common_sizes, divisors, recompute_choices
from hetpipe.partitioners.rules.grids import schedule_of
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index, Work, equal_runs
from hetpipe.planning.shares import proportional_shares


def limited_shares(wanted: Index, limits: Index, room: Index) -> Index | None:
    """`wanted` samples per device, none above its limit: what is too much goes to the devices with most `room`
    (bytes left over) first, each up to its own limit. None if the limits are below the sum.

    >>> limited_shares(np.array([6, 2, 2]), np.array([4, 3, 9]), np.array([0, 1, 5])).tolist()
    [4, 2, 4]
    """
    shares = np.minimum(wanted, limits)
    left = int(wanted.sum() - shares.sum())
    order = np.argsort(-room, kind="stable")
    spare = (limits - shares)[order]
    shares[order] += np.clip(left - (np.cumsum(spare) - spare), 0, spare)
    return shares if spare.sum() >= left else None


class UnevenDataParallel(SimpleRule):
    """DistributedDataParallel with a batch per device, as FastSpeed's "autobalanced" strategy finds it: (1) the largest
    batch that each device's memory holds, (2) shares in proportion to the speed measured at one test size, (3) what exceeds a
    device's memory goes to the devices with the most memory left. The steps of gradient accumulation, equal on all devices,
    the test size, and recompute everywhere or nowhere, are those that simulate fastest; FastSpeed's user sets them. The
    batch is met exactly, and the sum of gradients too (FastSpeed's is divided by the number of devices once more)."""

    name = "uneven-data-parallel"
    by_memory = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        problem, seen, place = desk.problem, set(), 0
        batch = problem.global_batch
        steps = sorted({*range(1, min(batch, 24) + 1), *divisors(batch)})
        for test in common_sizes(problem, batch):
            for recompute in recompute_choices(problem):
                devices = _Devices(desk, recompute)
                wanted = devices.wanted(test)
                for accumulate in steps:
                    limits = devices.limits(accumulate)
                    shares = limited_shares(wanted, limits, devices.room) if limits.all() else None
                    if shares is None and accumulate == steps[-1]:
                        shares = wanted  # so that the error says what is missing
                    if shares is not None and (key := (shares.tobytes(), accumulate, recompute)) not in seen:
                        seen.add(key)
                        yield desk.candidate(place := place + 1, devices.draft(shares, accumulate, self.name))


class _Devices:
    """The whole model on each device of the cluster."""

    def __init__(self, desk: Desk, recompute: bool) -> None:
        self.appraiser, self.batch, self.recompute = desk.appraiser, desk.problem.global_batch, recompute
        self.schedule = schedule_of(desk.problem)
        measured = [desk.problem.profile.measurement(kind) for kind in self.appraiser.types]
        self.largest = [found.microbatch_sizes[-1] for found in measured]
        kinds = range(len(self.appraiser.types))
        self.room = self._each([self.appraiser.limits[kind] - self._peak(kind, 1, 1) for kind in kinds])

    def _each(self, by_kind: list[Any]) -> Any:
        """One value for every device, from one for every type."""
        return np.array(by_kind)[self.appraiser.type_of]

    def _work(self, samples: int, accumulate: int) -> Work:
        """A share in micro-batches that differ by one at most."""
        return Work(equal_runs(samples, accumulate), (0, self.appraiser.L), self.recompute)

    def _peak(self, kind: int, b: int, accumulate: int) -> int:
        depth = accumulate if self.schedule == "gpipe" else 1
        return self.appraiser.peak(kind, 0, self._work(b * accumulate, accumulate), depth)

    def wanted(self, b: int) -> Index:
        """Samples of each device in proportion to its speed with b; it takes at least a trace, so that speeds are finite."""
        costs, L = self.appraiser.costs, self.appraiser.L
        seconds = [max(1e-12, sum(costs.stage_seconds(kind, 0, L, b))) for kind in self.appraiser.types]
        return np.array(proportional_shares(self._each([1 / t for t in seconds]).tolist(), self.batch))

    def limits(self, accumulate: int) -> Index:
        """Most samples of a step on each device: `accumulate` micro-batches of the largest size that was measured and
        fits (it grows with the size, so bisection)."""
        found = []
        for kind, high in enumerate(self.largest):
            low = 0
            while low < high:
                b = (low + high + 1) // 2
                low, high = (b, high) if self._peak(kind, b, accumulate) <= self.appraiser.limits[kind] else (low, b - 1)
            found.append(low * accumulate)
        limits: Index = self._each(found)
        return limits

    def draft(self, shares: Index, accumulate: int, name: str) -> Draft:
        """The draft of these shares; a device without samples is left out."""
        rows = np.nonzero(shares)[0]
        unlike, which = np.unique(shares[rows], return_inverse=True)
        works = tuple(self._work(share, accumulate) for share in unlike.tolist())
        return Draft(name, self.schedule, rows[:, None], works, which)


partitioner = UnevenDataParallel()
