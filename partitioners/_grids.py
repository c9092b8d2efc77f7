"""What the baselines from other systems share: pipelines × replicas grids over all devices, as plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise

from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners._baseline import (
    common_sizes,
    equal_parts,
    fastest,
    in_microbatches,
    recompute_choices,
    refuse_prices,
)
from hetpipe.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.schedule import ScheduleName

Line = tuple[str, ...]  # the devices of one pipeline, first stage to last
Grid = tuple[Line, ...]  # the pipelines of a plan
Ends = Sequence[int]  # 0, the ends of the stages, L; an empty stage leaves its device unused


def schedule_of(problem: Problem, usual: ScheduleName = "1f1b") -> ScheduleName:
    """What the problem asks for, else the system's usual one. The back ends fairscale and torchgpipe run gpipe."""
    if problem.schedule == "gpipe" or problem.backend != "torch":
        return "gpipe"
    return "1f1b" if problem.schedule == "1f1b" else usual


def ends_of(counts: Iterable[int]) -> list[int]:
    """Layer counts as ends: [2, 3] → [0, 2, 5]."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return ends


def device_ids(problem: Problem) -> list[str]:
    """All devices, in the order of the cluster file."""
    return [device.id for device in problem.cluster.devices]


def one_line(problem: Problem) -> Grid:
    """One pipeline in cluster order; with more devices than layers the last ones stay unused."""
    return (tuple(device_ids(problem)[: len(problem.profile.layers)]),)


def grids(ids: Sequence[str], layers: int) -> Iterator[Grid]:
    """All grids of n stages × R replicas over all devices, n ≤ layers, in Megatron's two orders of ranks: first
    tp-dp-pp (neighbours are replicas of one stage), then tp-pp-dp (neighbours are stages of one replica)."""
    for R in (r for r in range(1, len(ids) + 1) if len(ids) % r == 0):
        n = len(ids) // R
        if n > layers:
            continue
        yield tuple(tuple(ids[s * R + r] for s in range(n)) for r in range(R))
        if R > 1 and n > 1:
            yield tuple(tuple(ids[r * n : (r + 1) * n]) for r in range(R))


def runs(problem: Problem, grid: Grid) -> bool:
    """Whether the back end can run it: fairscale and torchgpipe keep a pipeline within one node."""
    nodes = [{problem.cluster.device(d).node for d in line} for line in grid]
    return problem.backend == "torch" or all(len(found) == 1 for found in nodes)


def grid_plans(
    problem: Problem,
    name: str,
    grid: Grid,
    cut: Callable[[Line, int], Ends],
    usual: ScheduleName = "1f1b",
) -> Iterator[Plan]:
    """Plans of a grid with an equal share of the batch per replica (they differ by one sample where it does not
    divide): every micro-batch size b measured on all types, `cut(line, b)`, recompute nowhere or everywhere."""
    shares = equal_parts(problem.global_batch, len(grid))
    smallest = common_sizes(problem, problem.global_batch)[0]
    if shares[-1] < smallest or not runs(problem, grid):
        return
    for b in common_sizes(problem, shares[-1]):
        cuts = [list(pairwise(cut(line, b))) for line in grid]
        for recompute in recompute_choices(problem):
            replicas = tuple(
                ReplicaPlan(
                    microbatch_sizes=in_microbatches(share, b),
                    stages=tuple(
                        StagePlan(layers=part, devices=(device,), recompute=recompute)
                        for part, device in zip(parts, line, strict=True)
                        if part[1] > part[0]
                    ),
                )
                for share, parts, line in zip(shares, cuts, grid, strict=True)
            )
            yield Plan(
                model=problem.profile.model,
                global_batch=problem.global_batch,
                schedule=schedule_of(problem, usual),
                partitioner=name,
                replicas=replicas,
            )


def solve(
    problem: Problem,
    name: str,
    plans: Iterable[Plan],
    again: Callable[[Problem], Iterable[Plan]] | None = None,
) -> Solution:
    """Of these plans the one that fits and simulates fastest; PartitionError if none fits, or there is none."""
    refuse_prices(problem, name)
    found = iter(plans)
    first = next(found, None)
    if first is None:
        raise PartitionError(
            f"{name}: no arrangement of all {len(problem.cluster.devices)} devices in equal replicas suits "
            f"{len(problem.profile.layers)} layers, a global batch of {problem.global_batch} and the back end "
            f"{problem.backend!r}; use 'auto'"
        )
    return fastest(problem, chain([first], found), name, again)
