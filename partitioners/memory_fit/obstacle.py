"""Why nothing fits, and the smallest change that would.

Each change is tried out on its own, with the other numbers as they are, and is the smallest of its kind: one byte less
on each device of the type, one sample more, or one device less, and no plan fits (as far as `capacity` is exact; where it
may not be, the error says that nothing is proven)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from hetpipe.files.messages import counted
from hetpipe.files.units import in_bytes
from hetpipe.partitioners.memory_fit.capacity import Capacity, Packing, StageKind
from hetpipe.partitioners.memory_fit.shortage import first_enough
from hetpipe.partitioners.stage_kinds.plan_class import cluster_sizes
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.spec.cluster import Cluster

MOST_DEVICES = 16  # more than these are no small change


def explain(problem: Problem, *, one_pipeline: bool = False) -> PartitionError:
    """The error to be raised where no plan was found: limits on price and time first, then memory."""
    free = Capacity(replace(problem, max_price_per_hour=None), one_pipeline=one_pipeline)
    if free.most().samples >= problem.global_batch:
        return _limits(problem, free)
    capacity = Capacity(problem, one_pipeline=one_pipeline, bytes_=free.bytes)
    packing = capacity.most()
    certain = capacity.certain()  # of this memory; others are tried below
    more = _memory(capacity)
    text, missing, needed = _obstacle(capacity, packing, more)
    changes = list(_changes(capacity, packing, more))
    if not changes:
        changes = [
            "use other devices: no single change of memory, batch, schedule or number of devices is enough"
        ]
    found = "no plan fits the memory of the cluster"
    if not certain:
        found = "no plan that fits the memory of the cluster was found; there may be one, as not all pipelines could be counted"
    return PartitionError(
        f"{found}: {text}. It would fit if you {', or '.join(changes)}",
        missing_bytes=missing,
        needed_bytes=needed,
    )


def refuse(problem: Problem) -> None:
    """Raise that error at once, without a search, where it is certain that nothing fits."""
    if Capacity(problem).impossible():
        raise explain(problem)


def _limits(problem: Problem, free: Capacity) -> PartitionError:
    """The error to be raised where memory is enough, but the price or the deadline allows no plan."""
    wanted = []
    if problem.max_price_per_hour is not None:
        wanted.append(f"at most {problem.max_price_per_hour} per hour")
    if problem.deadline_seconds_per_step is not None:
        wanted.append(f"at most {problem.deadline_seconds_per_step} s per step")
    if not wanted:
        return PartitionError(
            f"no plan was found, though the devices have memory for {problem.global_batch} samples; allow more time "
            "(--time-limit, time_limit_seconds)",
            out_of_time=True,
        )
    least = free.least_price() if problem.max_price_per_hour is not None else None
    if least is not None and problem.max_price_per_hour is not None and least > problem.max_price_per_hour:
        change = f"the cheapest devices that hold the model cost {least} per hour: raise --max-price-per-hour to {least}"
    else:
        change = "raise --deadline-seconds-per-step, or plan without it to see the fastest plan"
        if problem.max_price_per_hour is not None:
            change = f"raise --max-price-per-hour, {change}"
    return PartitionError(f"no plan has {' and '.join(wanted)}, though the model fits the cluster; {change}")


def _obstacle(
    capacity: Capacity, packing: Packing, more: tuple[int, str] | None
) -> tuple[str, int | None, int | None]:
    """Which layer has no device left, and how many bytes are missing on which type; that number; and what is needed there."""
    problem, layers = capacity.problem, capacity.problem.profile.layers
    short, layer, stage_kind = _largest_layer(capacity)
    if short > 0:
        limit, kind = capacity.limits[stage_kind.type], f"a {stage_kind.type!r}"
        split = f" split over {stage_kind.degree}" if stage_kind.degree > 1 else ""
        return (
            f"layer {layer} ({layers[layer].name!r}) alone needs {in_bytes(short + limit)} on {kind}{split}, which has "
            f"{in_bytes(limit)}{problem.without_reserve}: {in_bytes(short)} are missing"
        ), round(short), round(short + limit)
    samples = -(-problem.global_batch // packing.replicas) if packing.samples else 1
    end, devices, b = _longest(capacity, samples)
    text = ""
    if packing.samples:
        text = (
            f"{packing.samples} of the {problem.global_batch} samples of a step are the most that fit "
            f"({counted(packing.replicas, 'pipeline')}); "
        )
    each = (
        f"with {counted(samples, 'sample')} in micro-batches of {b}" if packing.samples else f"with micro-batches of {b}"
    )
    if end == len(layers):
        text += f"{each} no device holds even layer {end - 1} ({layers[end - 1].name!r})"
    elif end:
        text += (
            f"{each} a pipeline of {devices} devices holds only layers {end} to {len(layers) - 1}; "
            f"layer {end - 1} ({layers[end - 1].name!r}) is left over"
        )
    else:
        text += f"{each} layer {layer} ({layers[layer].name!r}) is the largest for the devices"
    if more is None:
        return text, None, None
    size, kind = more
    needed = round(capacity.limits_with({kind: size})[kind])
    return f"{text}: {in_bytes(size)} are missing on each {kind!r}", size, needed


def _largest_layer(capacity: Capacity) -> tuple[float, int, StageKind]:
    """(bytes missing, layer, kind of stage) of the layer that is shortest of memory alone, on the kind of stage that is closest
    to it."""
    L = capacity.bytes.L
    found = []
    for b, stage_kinds in capacity.sizes():
        for v in stage_kinds:
            peak = capacity.peak(v, 1, b, 1)
            found.append(
                (peak[np.arange(L), np.arange(1, L + 1)] - capacity.limits[capacity.stage_kinds[v].type], v)
            )
    table = np.stack([row for row, _ in found])
    layer = int(table.min(axis=0).argmax())
    row = int(table[:, layer].argmin())
    return float(table[row, layer]), layer, capacity.stage_kinds[found[row][1]]


def _longest(capacity: Capacity, samples: int) -> tuple[int, int, int]:
    """The first layer of the longest end of the model that a pipeline holds, its devices (the fewest), and the size of
    its micro-batches."""
    degree = np.array([stage_kind.degree for stage_kind in capacity.stage_kinds])
    best = (capacity.bytes.L, 0, capacity.sizes()[0][0])
    for yard, _ in capacity.yards:
        for b, stage_kinds in capacity.sizes():
            reaches = capacity.reaches(yard, b, stage_kinds, samples, capacity.limits)
            for level, reached in zip(yard.levels, reaches, strict=True):
                first = np.where(reached.any(axis=1), reached.argmax(axis=1), capacity.bytes.L)
                devices = level.rows @ degree
                i = int(np.lexsort((devices, first))[0])
                best = min(best, (int(first[i]), int(devices[i]), b))
    return best


def _memory(capacity: Capacity) -> tuple[int, str] | None:
    """(bytes, type): the least memory more on every device of one type with which a plan fits; None if no memory is
    enough (the price limit rules the devices out)."""
    best: tuple[int, str] | None = None
    for kind in sorted({stage_kind.type for stage_kind in capacity.stage_kinds}):

        def enough(more: int, kind: str = kind) -> bool:
            return capacity.enough({kind: more})

        high = best[0] - 1 if best is not None else _ample(capacity, kind)
        if high >= 1 and enough(high):
            best = first_enough(enough, 0, high), kind
    return best


def _ample(capacity: Capacity, kind: str) -> int:
    """So many bytes more that one device of the type holds everything."""
    whole = [capacity.peak(v, 1, b, capacity.problem.global_batch)[0, -1]
             for b, stage_kinds in capacity.sizes() for v in stage_kinds if capacity.stage_kinds[v].type == kind]  # fmt: skip
    return int(max(whole, default=0.0) / (1 - capacity.problem.memory_reserve)) + 1


def _changes(capacity: Capacity, packing: Packing, more: tuple[int, str] | None) -> Iterator[str]:
    """The changes that are enough, those that cost nothing first."""
    problem = capacity.problem

    def enough(changed: Problem) -> bool:
        found = Capacity(changed, one_pipeline=capacity.one_pipeline, bytes_=capacity.bytes)
        return found.enough()

    if not problem.allow_recompute and enough(replace(problem, allow_recompute=True)):
        yield "allow recompute"
    if problem.memory_reserve > 0 and enough(replace(problem, memory_reserve=0.0)):
        yield f"set the memory reserve of {problem.memory_reserve:.0%} to 0"
    if (
        problem.schedule == "gpipe"
        and problem.backend == "torch"
        and enough(replace(problem, schedule="auto"))
    ):
        yield "allow the schedule 1f1b"
    batch, smallest = packing.samples, cluster_sizes(problem)[0]
    while batch >= smallest and not enough(replace(problem, global_batch=batch)):
        batch -= 1 + batch // 50
    if batch >= smallest:
        yield f"use a global batch of {batch} instead of {problem.global_batch}"
    if more is not None:
        yield f"give each {more[1]!r} {in_bytes(more[0], up=True)} more memory"
    spare = _spare(capacity, enough) if _largest_layer(capacity)[0] <= 0 else None
    if spare is not None:
        yield spare


def _spare(capacity: Capacity, enough: Callable[[Problem], bool]) -> str | None:
    """The fewest devices more of one type that are enough."""
    problem = capacity.problem
    best: tuple[int, str] | None = None
    for kind in sorted({stage_kind.type for stage_kind in capacity.stage_kinds}):

        def more(number: int, kind: str = kind) -> bool:
            return enough(with_spares(problem, kind, number))

        most = best[0] - 1 if best is not None else MOST_DEVICES
        number = next((n for n in (1, 2, 4, 8, 16) if n <= most and more(n)), None)
        if number is not None:
            best = first_enough(more, number // 2, number), kind
    if best is None:
        return None
    node = next(node.name for node in problem.cluster.nodes if best[1] in node.devices)
    return f"add {best[0]} {best[1]!r}" + ("" if problem.backend == "torch" else f" to node {node!r}")


def with_spares(problem: Problem, kind: str, number: int) -> Problem:
    """The problem with more devices of a type: each in a node of its own, or, where a pipeline stays within a node, all
    in the first node that has the type."""
    document = problem.cluster.model_dump()
    if problem.backend == "torch":
        taken = {node["name"] for node in document["nodes"]}
        names = [name for i in range(number + len(taken)) if (name := f"spare{i}") not in taken]
        document["nodes"] = [*document["nodes"], *({"name": x, "devices": {kind: 1}} for x in names[:number])]
    else:
        node = next(node for node in document["nodes"] if kind in node["devices"])
        node["devices"][kind] += number
    return replace(problem, cluster=Cluster.model_validate(document))
