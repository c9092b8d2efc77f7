"""What the equal-split baselines share: of some plans by hand, the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from hetpipe.cost import Costs
from hetpipe.formats import InputError
from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.plan import Plan
from hetpipe.simulator import peak_bytes, simulate


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


def fastest(problem: Problem, plans: Iterable[Plan], name: str) -> Solution:
    """The plan with the least simulated step among those that fit; PartitionError with the least shortage if
    none does."""
    costs = Costs(problem.profile, problem.cluster)
    best: tuple[float, Plan] | None = None
    shortages: list[tuple[float, str]] = []
    for plan in plans:
        short = _shortages(problem, plan, costs)
        if short:
            shortages.append(max(short))
            continue
        step = simulate(plan, problem.profile, problem.cluster).step_seconds
        if best is None or step < best[0]:
            best = step, plan
    if best is None:
        raise PartitionError(
            f"{name}: {min(shortages)[1]}. Unequal stages or fewer devices may fit: use 'auto'"
        )
    return Solution(plan=best[1])


def _shortages(problem: Problem, plan: Plan, costs: Costs) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
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
                    f"which has {limit:.0f}: {missing:.0f} bytes are missing"
                )
                found.append((missing, text))
    return found


def equal_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Layer ranges whose lengths differ by one at most."""
    ends = [0]
    for part in equal_parts(layers, stages):
        ends.append(ends[-1] + part)
    return list(pairwise(ends))


def recompute_choices(problem: Problem) -> Sequence[bool]:
    """Without recompute first, so that it is used only where it must be."""
    return (False, True) if problem.allow_recompute else (False,)
