"""What the rules from other systems share: pipelines × replicas grids over all devices, as drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hetpipe.documents.schedule import ScheduleName
from hetpipe.partitioners.rules.baseline import common_sizes, divisors, recompute_choices
from hetpipe.partitioners.step_times.desk import Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index, Work, in_runs
from hetpipe.planning.partition import Problem

Ends = Sequence[int]  # 0, the ends of the stages, L; an empty stage leaves its device unused


def in_proportion(weights: Sequence[float], total: int) -> list[int]:
    """`total` by weight, rounded down; what is left goes one by one to the greatest weights.

    >>> in_proportion([3.0, 2.0, 2.0], 10)
    [5, 3, 2]
    """
    whole = sum(weights)
    shares = [int(total * weight / whole) if whole else 0 for weight in weights]
    first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    for i in range(total - sum(shares)):
        shares[first[i % len(first)]] += 1
    return shares


class Layout(NamedTuple):
    """A grid over all devices of R pipelines (rows) of n stages. From one stage to the next it is so many devices, and from one
    row to the next."""

    R: int
    n: int
    stage: int
    row: int

    def rows(self, start: int = 0) -> Index:
        """The devices [R, n], from one of them on in the cluster's order, of which the first come after the last."""
        there = np.arange(self.R)[:, None] * self.row + np.arange(self.n) * self.stage
        return (start + there) % (self.R * self.n)


def layouts(devices: int, layers: int) -> Iterator[Layout]:
    """All grids of n stages × R replicas over all devices, n ≤ layers, in Megatron's two orders of ranks: first
    tp-dp-pp (neighbours are replicas of one stage), then tp-pp-dp (neighbours are stages of one replica)."""
    for R in divisors(devices):
        n = devices // R
        if n > layers:
            continue
        yield Layout(R, n, R, 1)
        if R > 1 and n > 1:
            yield Layout(R, n, 1, n)


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


def one_line(problem: Problem) -> Index:
    """One pipeline in cluster order; with more devices than layers the last ones stay unused."""
    return np.arange(min(len(problem.cluster.devices), len(problem.profile.layers)))[None, :]


def runs(desk: Desk, rows: Index) -> bool:
    """Whether the back end can run it: fairscale and torchgpipe keep a pipeline within one node."""
    nodes = desk.appraiser.links.node[rows]
    return desk.problem.backend == "torch" or bool((nodes == nodes[:, :1]).all())


def grid_drafts(
    desk: Desk, name: str, rows: Index, cut: Callable[[Sequence[str], int], Ends], usual: ScheduleName = "1f1b"
) -> Iterator[Draft]:
    """Drafts of a grid with an equal share of the batch per replica (they differ by one sample where it does not
    divide): every micro-batch size b measured on all types, `cut(types, b)` by the types of a row, recompute nowhere or
    everywhere."""
    problem, R = desk.problem, len(rows)
    share, more = divmod(problem.global_batch, R)
    smallest = common_sizes(problem, problem.global_batch)[0]
    if share < smallest or not runs(desk, rows):
        return
    unlike, where = np.unique(desk.appraiser.type_of[rows], axis=0, return_inverse=True)
    kinds = [[desk.appraiser.types[kind] for kind in row] for row in unlike.tolist()]
    unlike, where = np.unique(2 * where.reshape(-1) + (np.arange(R) < more), return_inverse=True)
    for b in common_sizes(problem, share):
        ends = [tuple(cut(types, b)) for types in kinds]
        for recompute in recompute_choices(problem):
            each = [Work(in_runs(share + i % 2, b), ends[i // 2], recompute) for i in unlike.tolist()]
            works = {work: i for i, work in enumerate(dict.fromkeys(each))}
            yield Draft(name, schedule_of(problem, usual), rows, tuple(works), np.array([works[work] for work in each])[where])
