"""What the equal-split baselines share: of some plans by hand, the fastest that fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, Protocol

from hetpipe.cost import Costs
from hetpipe.formats import InputError
from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.plan import Plan
from hetpipe.simulator import peak_bytes, simulate


class Simple(Protocol):
    """A partitioner that tries some plans."""

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """All that are tried, or PartitionError or InputError where there is none."""
        ...


def refuse_prices(problem: Problem, name: str) -> None:
    """Baselines use every device: they cannot trade time for price."""
    for option in ("max_price_per_hour", "deadline_seconds_per_step"):
        if getattr(problem, option) is not None:
            raise InputError(
                f"the partitioner {name!r} uses every device and cannot honour --{option.replace('_', '-')}; "
                "use 'auto', 'chain' or 'exhaustive'"
            )


def common_sizes(problem: Problem, largest: int) -> list[int]:
    """Micro-batch sizes measured on every type of the cluster, at most `largest`."""
    kinds = {device.type for device in problem.cluster.devices}
    sizes = set.intersection(*(set(problem.profile.measurement(kind).microbatch_sizes) for kind in kinds))
    found = sorted(b for b in sizes if b <= largest)
    if not found:
        raise PartitionError(
            f"no micro-batch size of at most {largest} was measured on all of {', '.join(sorted(kinds))}; "
            f"the sizes that all have: {sorted(sizes)}. Measure smaller ones, or use a larger global batch"
        )
    return found


def equal_parts(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole parts that differ by one at most, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def in_microbatches(samples: int, b: int) -> tuple[int, ...]:
    """Micro-batches of b samples, and the remainder."""
    return (b,) * (samples // b) + ((samples % b,) if samples % b else ())


def fastest(
    problem: Problem,
    plans: Iterable[Plan],
    name: str,
    again: Callable[[Problem], Iterable[Plan]] | None = None,
) -> Solution:
    """The plan with the least simulated step among those that fit; PartitionError with the least shortage if
    none does. `again` lists the plans of another problem, where they depend on memory."""
    shortages: list[list[Shortage]] = []
    best: Plan | None = None
    for _, plan in faster(problem, plans, shortages=shortages):
        best = plan
    if best is None:
        worst = min(max(short) for short in shortages)
        usable = problem.cluster.device_types[worst.type].memory * (1 - problem.memory_reserve)
        raise PartitionError(
            f"{name}: {worst.text}. {_change(problem, shortages, again)}Unequal stages or fewer devices may fit: use 'auto'",
            missing_bytes=round(worst.missing),
            needed_bytes=round(usable + worst.missing),
        )
    return Solution(plan=best)


def faster(
    problem: Problem,
    plans: Iterable[Plan],
    below: float = math.inf,
    shortages: list[list[Shortage]] | None = None,
    late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[float, Plan]]:
    """(step, plan) of each of these plans that fits and has a smaller simulated step than `below` and all before. What the
    others lack is added to `shortages`, but for plans that could not have been faster. When it is `late`, no more once
    there is one."""
    costs = Costs(problem.profile, problem.cluster)
    for plan in plans:
        if math.isfinite(below) and late():
            return
        if plan.backend != problem.backend:
            plan = plan.model_copy(update={"backend": problem.backend})
        if _least_seconds(plan, costs) >= below:
            continue
        if short := _shortages(problem, plan, costs):
            if shortages is not None:
                shortages.append(short)
            continue
        step = simulate(plan, problem.profile, problem.cluster).step_seconds
        if step < below:
            below = step
            yield step, plan


def _least_seconds(plan: Plan, costs: Costs) -> float:
    """A lower bound on the step: all that a stage does, after the first forward and before the last backward of those
    before it; and the optimizer."""
    most, known = 0.0, set()
    for replica in plan.replicas:
        stages = [(costs.cluster.device(s.device).type, s.layers, s.recompute, len(s.devices)) for s in replica.stages]
        if (key := (replica.microbatch_sizes, *stages)) in known:
            continue
        known.add(key)
        counts, before = Counter(replica.microbatch_sizes), 0.0
        for kind, layers, recompute, degree in stages:
            each = [costs.stage_seconds(kind, *layers, b, recompute=recompute, degree=degree) for b in counts]
            work = sum(number * (f + b) for (f, b), number in zip(each, counts.values(), strict=True))
            most = max(most, before + work + costs.optimizer_seconds(kind, *layers, degree))
            before += min(f for f, _ in each) + min(b for _, b in each)
    return most * (1 - 1e-9)  # a sum in another order than the simulator's


class Shortage(NamedTuple):
    """Bytes that are missing on a device of this type, and what the message says of it."""

    missing: float
    type: str
    text: str


def _shortages(problem: Problem, plan: Plan, costs: Costs) -> list[Shortage]:
    found: list[Shortage] = []
    names = [layer.name for layer in problem.profile.layers]
    peaks = peak_bytes(plan, costs)
    for replica in plan.replicas:
        for stage in replica.stages:
            kind = problem.cluster.device(stage.device).type
            limit = problem.cluster.device_types[kind].memory * (1 - problem.memory_reserve)
            missing, (lo, hi) = peaks[stage.device] - limit, stage.layers
            if missing > 0:
                where = f"layers {lo} ({names[lo]!r}) to {hi - 1} ({names[hi - 1]!r})"
                text = (
                    f"{where} need {peaks[stage.device]} bytes on device {stage.device} of type {kind!r}, "
                    f"which has {limit:.0f}{problem.without_reserve}: {missing:.0f} bytes are missing"
                )
                found.append(Shortage(missing, kind, text))
    return found


def _change(
    problem: Problem, shortages: list[list[Shortage]], again: Callable[[Problem], Iterable[Plan]] | None
) -> str:
    """The least memory more, on as few types as possible, with which one of these plans fits, to the byte; or, where the
    plans depend on memory and one type is short, with which one of the new plans does, and with one byte less none."""
    most = [{s.type: s for s in sorted(short)} for short in shortages]  # the largest of each type
    least = min(most, key=lambda short: (len(short), sum(s.missing for s in short.values())))
    more = {kind: _least_memory(problem, shortage) for kind, shortage in sorted(least.items())}

    def enough(part: int, kind: str) -> bool:
        richer = with_memory(problem, more | {kind: part})
        costs = Costs(problem.profile, problem.cluster)
        return again is None or any(not _shortages(richer, plan, costs) for plan in again(richer))

    kind = min(more)
    if not enough(more[kind], kind):
        return ""
    if again is not None and len(more) == 1:
        more[kind] = first_enough(lambda part: enough(part, kind), 0, more[kind])
    each = " and ".join(f"each {kind!r} {part} bytes" for kind, part in more.items())
    return f"It would fit if you give {each} more memory. "


def _least_memory(problem: Problem, shortage: Shortage) -> int:
    """Bytes more in a device of the type, of which the reserve takes its part, that end the shortage."""
    memory, usable = problem.cluster.device_types[shortage.type].memory, 1 - problem.memory_reserve
    needed = round(memory * usable + shortage.missing)  # the peak of the stage
    return first_enough(
        lambda more: (memory + more) * usable >= needed, 0, math.ceil(shortage.missing / usable) + 1
    )


def with_memory(problem: Problem, more: Mapping[str, int]) -> Problem:
    """The problem with so many bytes more on each device of some types."""
    types = problem.cluster.device_types
    richer = {
        kind: types[kind].model_copy(update={"memory": types[kind].memory + part})
        for kind, part in more.items()
    }
    return replace(problem, cluster=problem.cluster.model_copy(update={"device_types": {**types, **richer}}))


def first_enough(enough: Callable[[int], bool], low: int, high: int) -> int:
    """A number above `low` that is enough while one less is not, where `high` is enough: the least, if all above it are."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def equal_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Layer ranges whose lengths differ by one at most."""
    ends = [0]
    for part in equal_parts(layers, stages):
        ends.append(ends[-1] + part)
    return list(pairwise(ends))


def recompute_choices(problem: Problem) -> Sequence[bool]:
    """Without recompute first, so that it is used only where it must be."""
    return (False, True) if problem.allow_recompute else (False,)
