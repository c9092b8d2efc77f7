"""Plans that are not built yet: rows of devices, most of which do the same. Thousands of them are compared by what is different
in them (`appraisal`); only the best is built."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.schedule import ScheduleName, default_depths
from hetpipe.partitioners.stage_kinds.plan_class import depth
from hetpipe.planning.partition import Problem

Index = NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]  # micro-batches: (samples of each, how many), larger ones first


def in_runs(samples: int, b: int) -> Runs:
    """Micro-batches of b samples, and the remainder."""
    return tuple((size, count) for size, count in ((b, samples // b), (samples % b, 1)) if size and count)


def equal_runs(samples: int, parts: int) -> Runs:
    """At most so many micro-batches, which differ by one sample at most."""
    more = samples % parts
    found = ((samples // parts + 1, more), (samples // parts, parts - more))
    return tuple((size, count) for size, count in found if size and count)


class _Work(NamedTuple):
    runs: Runs
    ends: tuple[int, ...]
    recompute: bool | tuple[bool, ...]
    degrees: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    offload: tuple[bool, ...] = ()


class Work(_Work):
    """What a pipeline does: its micro-batches, where the layers are cut (a device of an empty range is not used), and whether
    all stages recompute, or each. Of each stage, where it is not one device with the schedule's depth: how many devices split
    it, which follow the first one in the cluster's list; and its warm-up depth. Whether each stage offloads, where some do."""

    @cached_property
    def used(self) -> list[int]:
        """Which devices of the row have layers."""
        return [s for s, (lo, hi) in enumerate(pairwise(self.ends)) if hi > lo]

    @cached_property
    def stages(self) -> list[tuple[int, int]]:
        """The layers [lo, hi) of each stage."""
        return [(lo, hi) for lo, hi in pairwise(self.ends) if hi > lo]

    @cached_property
    def samples(self) -> int:
        """The samples of one step."""
        return sum(size * count for size, count in self.runs)

    @cached_property
    def m(self) -> int:
        """Micro-batches of one step."""
        return sum(count for _, count in self.runs)

    @cached_property
    def recomputes(self) -> tuple[bool, ...]:
        """Whether each stage recomputes."""
        return (self.recompute,) * len(self.stages) if isinstance(self.recompute, bool) else self.recompute

    @cached_property
    def offloads(self) -> tuple[bool, ...]:
        """Whether each stage offloads."""
        return self.offload or (False,) * len(self.stages)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Devices of each stage."""
        return self.degrees or (1,) * len(self.stages)

    def with_way(self, s: int, *, recompute: bool, offload: bool) -> Work:
        """The work whose stage s recomputes, offloads or neither."""
        again, away = list(self.recomputes), list(self.offloads)
        again[s], away[s] = recompute, offload
        return self._replace(recompute=tuple(again), offload=tuple(away) if any(away) else ())

    def in_flight(self, schedule: ScheduleName) -> tuple[int, ...]:
        """Warm-up depth of each stage."""
        return self.depths or default_depths(schedule, len(self.stages), self.m)

    def warmed(self, forwards: int, schedule: ScheduleName) -> Work:
        """The work with the warm-up depths of stages that do so many forwards more than the next (`plan_class.depth`)."""
        depths = tuple(depth(forwards, place, self.m) for place in range(len(self.stages), 0, -1))
        return self._replace(depths=() if depths == default_depths(schedule, len(depths), self.m) else depths)

    def replica(self, row: Sequence[int], ids: Sequence[str]) -> ReplicaPlan:
        """The pipeline on a row of devices, which are called so."""
        default = default_depths("1f1b", len(self.stages), self.m)
        depths = [None if own == depth else own for own, depth in zip(self.depths or default, default, strict=True)]
        return ReplicaPlan.model_construct(
            microbatch_sizes=tuple(chain.from_iterable(repeat(size, count) for size, count in self.runs)),
            stages=tuple(
                StagePlan.model_construct(
                    layers=part, devices=tuple(ids[row[s] : row[s] + degree]), recompute=again, offload=away, warmup=depth
                )
                for s, part, degree, again, away, depth in zip(
                    self.used, self.stages, self.groups, self.recomputes, self.offloads, depths, strict=True
                )
            ),
        )


class Draft(NamedTuple):
    """Pipeline r is on the devices `rows[r]` (places in the cluster's list, first stage to last) and does `works[which[r]]`."""

    name: str
    schedule: ScheduleName
    rows: Index
    works: tuple[Work, ...]
    which: Index

    def plan(self, problem: Problem) -> Plan:
        """The plan that this is a draft of."""
        ids = [device.id for device in problem.cluster.devices]
        replicas = tuple(self.works[i].replica(row, ids) for row, i in zip(self.rows.tolist(), self.which.tolist(), strict=True))
        return Plan(
            model=problem.profile.model,
            global_batch=problem.global_batch,
            schedule=self.schedule,
            partitioner=self.name,
            backend=problem.backend,
            replicas=replicas,
        )
