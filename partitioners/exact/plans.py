"""From rows of numbers to a Plan: real devices, named warm-up depths."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.exact.batch import PricedPipelines
from hetpipe.partitioners.stage_kinds.space import Load, Space, load_of
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan


class Chosen(NamedTuple):
    """One replica: its load, and its pipeline (one row)."""

    load: Load
    pipeline: PricedPipelines


def replicas_of(parts: list[PricedPipelines], row: int) -> list[Chosen]:
    """The replicas of one plan of many."""
    found = []
    for part in parts:
        pipeline = part.pick(np.array([row]))
        b, samples = (int(x) for x in pipeline.load[0])
        found.append(Chosen(load_of(samples, b), pipeline))
    return found


def build_plan(space: Space, chosen: list[Chosen], name: str) -> Plan:
    """The plan of these replicas. Devices of a kind are taken in the order of the cluster file."""
    free = {group: iter(kind.devices) for group, kind in zip(space.groups, space.kinds, strict=True)}
    full = all((c.pipeline.depths == c.load.m).all() for c in chosen)
    gpipe = space.families == ("gpipe",) or (
        full and "gpipe" in space.families and any(c.pipeline.kinds.shape[1] > 1 for c in chosen)
    )
    replicas = []
    for load, pipeline in chosen:
        n = pipeline.kinds.shape[1]
        stages = []
        for s in range(n):
            k, depth = int(pipeline.kinds[0, s]), int(pipeline.depths[0, s])
            plain = gpipe or depth == max(1, min(n - s, load.m))
            stages.append(
                StagePlan(
                    layers=(int(pipeline.cuts[0, s]), int(pipeline.cuts[0, s + 1])),
                    devices=tuple(islice(free[space.groups[k]], space.kinds[k].degree)),
                    recompute=bool(pipeline.recompute[0, s]),
                    warmup=None if plain else depth,
                )
            )
        replicas.append(ReplicaPlan(microbatch_sizes=load.sizes, stages=tuple(stages)))
    return Plan(
        model=space.problem.profile.model,
        global_batch=space.problem.global_batch,
        schedule="gpipe" if gpipe else "1f1b",
        partitioner=name,
        backend=space.problem.backend,
        replicas=tuple(replicas),
    )
