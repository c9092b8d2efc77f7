"""From counted groups to a Plan: real devices, the stages of a replica on one node where they fit."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hetpipe.partitioners._classes import Classes
from hetpipe.partitioners._fleet import Group
from hetpipe.plan import Plan, ReplicaPlan, StagePlan


class Yard:
    """The free devices, class by class and node by node."""

    def __init__(self, space: Classes) -> None:
        self.space = space
        self.free = [{n.name: list(space.ids[n.name, kind.type]) for n in nodes}
                     for kind, nodes in zip(space.kinds, space.nodes, strict=True)]  # fmt: skip
        self.by_count: list[dict[int, dict[str, None]]] = []
        for nodes in self.free:
            buckets: dict[int, dict[str, None]] = defaultdict(dict)
            for name, ids in nodes.items():
                buckets[len(ids)][name] = None
            self.by_count.append(buckets)

    def take(self, k: int, number: int) -> list[str]:
        """So many devices of a class: from the node that they fill best, or from as few nodes as there are."""
        taken: list[str] = []
        while len(taken) < number:
            left = number - len(taken)
            sizes = [size for size, names in self.by_count[k].items() if names and size]
            size = min((s for s in sizes if s >= left), default=max(sizes))
            name = next(iter(self.by_count[k][size]))
            del self.by_count[k][size][name]
            part = min(left, size)
            ids = self.free[k][name]
            taken += ids[:part]
            self.free[k][name] = ids[part:]
            self.by_count[k][size - part][name] = None
        return taken


def place(space: Classes, groups: list[Group], b: int, name: str) -> Plan:
    """The plan. Large replicas choose their nodes first; the remainder of the batch is the last micro-batch of the
    replica that ends soonest."""
    problem, yard, replicas = space.problem, Yard(space), []
    q = problem.global_batch % b
    groups = sorted(groups, key=lambda g: (-g.pipeline.kinds.shape[1], -g.m))
    gpipe = space.families == ("gpipe",)
    last = min(range(len(groups)), key=lambda i: float(groups[i].pipeline.bound[0]) * groups[i].m)
    for i, group in enumerate(groups):
        kinds = group.pipeline.kinds[0].tolist()
        for i_th in range(group.number):
            taken = {k: yard.take(k, kinds.count(k)) for k in dict.fromkeys(kinds)}
            rest = q if i == last and i_th == group.number - 1 else 0
            sizes = (b,) * (group.m - (rest > 0)) + ((rest,) if rest else ())
            replicas.append(_replica(group, sizes, [taken[k].pop(0) for k in kinds], gpipe))
    return Plan(
        model=problem.profile.model, global_batch=problem.global_batch, schedule="gpipe" if gpipe else "1f1b",
        partitioner=name, replicas=tuple(replicas),
    )  # fmt: skip


def _replica(group: Group, sizes: tuple[int, ...], devices: list[str], gpipe: bool) -> ReplicaPlan:
    row, n, m = group.pipeline, len(devices), len(sizes)
    depths = np.minimum(row.depths[0], m).tolist()
    stages = []
    for s, device in enumerate(devices):
        plain = gpipe or depths[s] == max(1, min(n - s, m))
        stages.append(
            StagePlan(
                layers=(int(row.cuts[0, s]), int(row.cuts[0, s + 1])),
                devices=(device,),
                recompute=bool(row.recompute[0, s]),
                warmup=None if plain else depths[s],
            )
        )
    return ReplicaPlan(microbatch_sizes=sizes, stages=tuple(stages))
