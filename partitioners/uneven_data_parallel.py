"""`uneven-data-parallel`: the whole model on every device, shares of the batch by speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetpipe.cost import Costs
from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._baseline import common_sizes, equal_parts, recompute_choices
from hetpipe.partitioners._grids import schedule_of, solve
from hetpipe.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.shares import proportional_shares


def limited_shares(wanted: Sequence[int], limits: Sequence[int], room: Sequence[float]) -> list[int] | None:
    """`wanted` samples per device, none above its limit: what is too much goes to the devices with most `room`
    (bytes left over) first, each up to its own limit. None if the limits are below the sum.

    >>> limited_shares([6, 2, 2], [4, 3, 9], [0.0, 1.0, 5.0])
    [4, 2, 4]
    """
    shares = [min(want, limit) for want, limit in zip(wanted, limits, strict=True)]
    left = sum(wanted) - sum(shares)
    for r in sorted(range(len(shares)), key=lambda r: (-room[r], r)):
        more = min(left, limits[r] - shares[r])
        shares[r] += more
        left -= more
    return shares if left == 0 else None


@dataclass(frozen=True)
class UnevenDataParallel:
    """DistributedDataParallel with a batch per device, as FastSpeed's "autobalanced" strategy finds it: (1) the largest
    batch that each device's memory holds, (2) shares in proportion to the speed measured at one test size, (3) what exceeds a
    device's memory goes to the devices with the most memory left. The steps of gradient accumulation, equal on all devices,
    the test size, and recompute everywhere or nowhere, are those that simulate fastest; FastSpeed's user sets them. The
    batch is met exactly, and the sum of gradients too (FastSpeed's is divided by the number of devices once more)."""

    name: str = "uneven-data-parallel"

    def __call__(self, problem: Problem) -> Solution:
        """The best unequal shares that fit."""
        return solve(problem, self.name, self.plans(problem), self.plans)

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """All that are tried."""
        batch, seen = problem.global_batch, set()
        steps = sorted(
            {*range(1, min(batch, 24) + 1), *(batch // d for d in range(1, batch + 1) if batch % d == 0)}
        )
        for test in common_sizes(problem, batch):
            for recompute in recompute_choices(problem):
                devices = _Devices(problem, recompute)
                wanted = proportional_shares([1 / t for t in devices.seconds(test)], batch)
                for accumulate in steps:
                    limits = devices.limits(accumulate)
                    shares = limited_shares(wanted, limits, devices.room) if all(limits) else None
                    if shares is None and accumulate == steps[-1]:
                        shares = wanted  # so that the error says what is missing
                    if shares is not None and (key := (tuple(shares), accumulate, recompute)) not in seen:
                        seen.add(key)
                        yield devices.plan(shares, accumulate, self.name)


class _Devices:
    """The whole model on each device of the cluster."""

    def __init__(self, problem: Problem, recompute: bool) -> None:
        self.problem, self.recompute = problem, recompute
        self.costs = Costs(problem.profile, problem.cluster)
        self.ids = [device.id for device in problem.cluster.devices]
        self.types = [device.type for device in problem.cluster.devices]
        self.schedule = schedule_of(problem)
        self.room = [self._limit(kind) - self._peak(kind, (1,)) for kind in self.types]

    def _limit(self, kind: str) -> float:
        return self.problem.cluster.device_types[kind].memory * (1 - self.problem.memory_reserve)

    def _peak(self, kind: str, sizes: Sequence[int]) -> int:
        memory = self.costs.stage_memory(
            kind, 0, self.costs.layer_count, samples=sum(sizes), recompute=self.recompute
        )
        return memory.peak(sizes, len(sizes) if self.schedule == "gpipe" else 1)

    def seconds(self, b: int) -> list[float]:
        """Seconds of forward and backward of b samples on each device; at least a trace, so that speeds are finite."""
        return [
            max(1e-12, sum(self.costs.stage_seconds(kind, 0, self.costs.layer_count, b)))
            for kind in self.types
        ]

    def limits(self, accumulate: int) -> list[int]:
        """Most samples of a step on each device: `accumulate` micro-batches of the largest size that was measured and
        fits (it grows with the size, so bisection)."""
        found = {}
        for kind in set(self.types):
            low, high = 0, self.problem.profile.measurement(kind).microbatch_sizes[-1]
            while low < high:
                b = (low + high + 1) // 2
                low, high = (
                    (b, high) if self._peak(kind, (b,) * accumulate) <= self._limit(kind) else (low, b - 1)
                )
            found[kind] = low * accumulate
        return [found[kind] for kind in self.types]

    def plan(self, shares: Sequence[int], accumulate: int, name: str) -> Plan:
        """Each share in `accumulate` micro-batches that differ by one at most; a device without samples is left out."""
        layers = (0, self.costs.layer_count)
        replicas = tuple(
            ReplicaPlan(
                microbatch_sizes=tuple(size for size in equal_parts(share, accumulate) if size),
                stages=(StagePlan(layers=layers, devices=(device,), recompute=self.recompute),),
            )
            for share, device in zip(shares, self.ids, strict=True)
            if share
        )
        return Plan(
            model=self.problem.profile.model,
            global_batch=self.problem.global_batch,
            schedule=self.schedule,
            partitioner=name,
            replicas=replicas,
        )


partitioner = UnevenDataParallel()
