"""Plans in tests: checked against their problem, and pipelines drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from hetpipe.partitioners._chains import Gaps
from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._paths import Path
from hetpipe.planning.partition import Problem
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.spec.plan import Plan, ReplicaPlan, StagePlan

ROUNDING = 1 + 1e-9


def checked(problem: Problem, plan: Plan) -> Timeline:
    """How a plan runs that does the whole batch and fits."""
    plan.check(cluster=problem.cluster, profile=problem.profile, global_batch=problem.global_batch)
    timeline = simulate(plan, problem.profile, problem.cluster)
    for device, peak in timeline.peak_bytes.items():
        assert peak <= problem.cluster.type_of(device).memory * (1 - problem.memory_reserve)
    return timeline


def drawn_replicas(data: st.DataObject, columns: Columns) -> list[ReplicaPlan]:
    """Of any devices, one or a measured number of them a stage, and any cuts."""
    kinds, replicas = columns.kinds, list[ReplicaPlan]()
    free = {(node.name, kind): list(kinds.ids[node.name, kind]) for node in kinds.problem.cluster.nodes for kind in node.devices}
    for _ in range(data.draw(st.integers(2, 4))):
        stages, lo = [], 0
        while lo < columns.L:
            fits = [(place, k) for place, ids in free.items() for k in kinds.kinds if k.type == place[1] and k.degree <= len(ids)]
            if not fits:
                return replicas
            place, k = data.draw(st.sampled_from(fits))
            devices = tuple(free[place].pop() for _ in range(k.degree))
            hi = data.draw(st.sampled_from([*range(lo + 1, columns.L), *[columns.L] * 3]))
            stages.append(StagePlan(layers=(lo, hi), devices=devices))
            lo = hi
        replicas.append(ReplicaPlan(microbatch_sizes=(1,), stages=tuple(stages)))
    return replicas


def open_gaps(columns: Columns, replicas: Sequence[ReplicaPlan]) -> tuple[int, ...]:
    """Those of which no single device of these has both layers."""
    layers = columns.chains.layers.tolist()
    single = [stage.layers for replica in replicas for stage in replica.stages if len(stage.devices) == 1]
    pairs = enumerate(pairwise(layers), 1)
    return tuple(gap for gap, (a, b) in pairs if not any(lo <= a and b < hi for lo, hi in single))


def lies_in(gaps: Gaps, opened: tuple[int, ...], columns: Columns) -> bool:
    """Whether plans with these open gaps are among them."""
    following = (*opened, columns.chains.all.high)[len(gaps.open)] if len(gaps.open) <= len(opened) else -1
    return opened[: len(gaps.open)] == gaps.open and gaps.low <= following <= gaps.high


def drawn_path(data: st.DataObject, columns: Columns) -> Path:
    """Of kinds of stage of which there are devices enough, and any cuts."""
    free, kinds, cuts = list(columns.kinds.counts), list[int](), [0]
    while cuts[-1] < columns.L:
        fits = [v for v, kind in enumerate(columns.kinds.kinds) if kind.degree <= free[kind.at]]
        kinds.append(data.draw(st.sampled_from(fits)))
        free[columns.at[kinds[-1]]] -= columns.degree[kinds[-1]]
        more = any(kind.degree <= free[kind.at] for kind in columns.kinds.kinds)
        cuts.append(min(cuts[-1] + data.draw(st.sampled_from([1, 1, 2, columns.L])), columns.L) if more else columns.L)
    return Path(tuple(kinds), tuple(cuts))
