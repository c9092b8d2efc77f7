"""From rows of numbers to a Plan: real devices, named warm-up depths."""

from __future__ import annotations

from itertools import islice

from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.partitioners.exact.pricing import PricedPipelines
from hetpipe.partitioners.stage_kinds.plan_class import depth, load_of
from hetpipe.partitioners.stage_kinds.space import Space


def build_plan(space: Space, chosen: list[PricedPipelines], name: str) -> Plan:
    """The plan of these replicas, each one row. Devices of a kind are taken in the order of the cluster file."""
    free = {group: iter(kind.devices) for group, kind in zip(space.groups, space.kinds, strict=True)}
    loads, depths = [], []
    for pipeline in chosen:
        (b, samples, forwards), n = pipeline.load[0].tolist(), pipeline.kinds.shape[1]
        loads.append(load_of(samples, b))
        depths.append([depth(forwards, n - s, loads[-1].m) for s in range(n)])
    full = all(set(own) == {load.m} for own, load in zip(depths, loads, strict=True))
    gpipe = space.families == ("gpipe",) or (full and "gpipe" in space.families and any(len(own) > 1 for own in depths))
    replicas = []
    for pipeline, load, own in zip(chosen, loads, depths, strict=True):
        stages = []
        kinds, cuts, recompute = (x[0].tolist() for x in (pipeline.kinds, pipeline.cuts, pipeline.recompute))
        for s, k in enumerate(kinds):
            plain = gpipe or own[s] == max(1, min(len(own) - s, load.m))
            devices = tuple(islice(free[space.groups[k]], space.kinds[k].degree))
            warmup = None if plain else own[s]
            way = {"recompute": bool(recompute[s]), "offload": space.types.kinds[space.kinds[k].at].offload}
            stages.append(StagePlan(layers=(cuts[s], cuts[s + 1]), devices=devices, warmup=warmup, **way))
        replicas.append(ReplicaPlan(microbatch_sizes=load.sizes, stages=tuple(stages)))
    problem = space.problem
    return Plan(
        model=problem.profile.model,
        global_batch=problem.global_batch,
        schedule="gpipe" if gpipe else "1f1b",
        partitioner=name,
        backend=problem.backend,
        replicas=tuple(replicas),
    )
