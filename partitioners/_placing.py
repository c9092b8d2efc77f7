"""From counted groups to a Plan: real devices, the stages of a replica on one node where they fit."""

from __future__ import annotations

from collections import defaultdict

from hetpipe.partitioners._fleet import Group
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._paths import Pipeline
from hetpipe.spec.plan import Plan, ReplicaPlan


class Yard:
    """The free devices, class by class and node by node."""

    def __init__(self, kinds: Kinds) -> None:
        self.free = [{n.name: list(kinds.ids[n.name, c.type]) for n in c.nodes} for c in kinds.classes]
        self.by_count: list[dict[int, dict[str, None]]] = []
        for nodes in self.free:
            buckets: dict[int, dict[str, None]] = defaultdict(dict)
            for name, ids in nodes.items():
                buckets[len(ids)][name] = None
            self.by_count.append(buckets)

    def take(self, k: int, number: int, *, whole: bool) -> list[str] | None:
        """So many devices of a class: from the node that they fill best, or (not `whole`) from as few nodes as there
        are; None if there are not so many on one node."""
        taken: list[str] = []
        while len(taken) < number:
            left = number - len(taken)
            sizes = [size for size, names in self.by_count[k].items() if names and size]
            size = min((s for s in sizes if s >= left), default=max(sizes, default=0))
            if size == 0 or (whole and size < left):
                return None
            name = next(iter(self.by_count[k][size]))
            del self.by_count[k][size][name]
            part = min(left, size)
            ids = self.free[k][name]
            taken += ids[:part]
            self.free[k][name] = ids[part:]
            self.by_count[k][size - part][name] = None
        return taken


def place(kinds: Kinds, groups: list[Group], name: str, *, side_by_side: bool = False) -> Plan | None:
    """The plan; None if tensor-parallel groups do not fit into the nodes. Wide groups and long replicas choose first;
    `side_by_side`: the same stage of all replicas of a group on one node."""
    problem, yard, replicas = kinds.problem, Yard(kinds), []
    widest = [max(kinds.kinds[v].degree for v in g.pipeline.path.kinds) for g in groups]
    order = sorted(range(len(groups)), key=lambda i: (-widest[i], -len(groups[i].pipeline.path.kinds)))
    for group in (groups[i] for i in order):
        together = group.number if side_by_side else 1
        for _ in range(0, group.number, together):
            found = _replicas(kinds, yard, group.pipeline, together)
            if found is None:
                return None
            replicas += found
    gpipe = problem.schedule == "gpipe"
    return Plan(
        model=problem.profile.model, global_batch=problem.global_batch, schedule="gpipe" if gpipe else "1f1b",
        partitioner=name, replicas=tuple(replicas),
    )  # fmt: skip


def _replicas(kinds: Kinds, yard: Yard, pipeline: Pipeline, number: int) -> list[ReplicaPlan] | None:
    """The pipeline so many times on free devices: groups first, then single devices. One replica has its stages of a
    class together; several have each stage together."""
    chosen: list[dict[int, tuple[str, ...]]] = [{} for _ in range(number)]
    stages = [kinds.kinds[v] for v in pipeline.path.kinds]
    for s in sorted(range(len(stages)), key=lambda s: -stages[s].degree):
        if s in chosen[0]:
            continue
        kind = stages[s]
        alone = kind.degree > 1 or number > 1
        alike = [s] if alone else [i for i, x in enumerate(stages) if x == kind]
        taken = yard.take(kind.at, len(alike) * number * kind.degree, whole=alone)
        if taken is None:
            return None
        for j, (r, i) in enumerate((r, i) for r in range(number) for i in alike):
            chosen[r][i] = tuple(taken[j * kind.degree : (j + 1) * kind.degree])
    found = []
    for devices in chosen:
        plans = [x.model_copy(update={"devices": devices[i]}) for i, x in enumerate(pipeline.replica.stages)]
        found.append(pipeline.replica.model_copy(update={"stages": tuple(plans)}))
    return found
