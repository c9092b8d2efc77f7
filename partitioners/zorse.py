"""`zorse`: groups of devices that fast links join, layers by what a group computes, micro-batches by what a device computes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from hetpipe.files.messages import InputError
from hetpipe.partitioners.rules.baseline import SimpleRule, common_sizes, recompute_choices
from hetpipe.partitioners.rules.grids import ends_of, in_proportion, runs, schedule_of
from hetpipe.partitioners.rules.min_cut import splits
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.stage_kinds.wires import Array
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Work, in_runs
from hetpipe.planning.partition import PartitionError

MOST_NODES = 32  # of which cuts are computed
MESSAGE_BYTES = 1e7  # at which Zorse measures links

ReplicaCut = tuple[tuple[int, ...], tuple[int, ...]]  # a replica's devices (places in the cluster's list), and its cuts


class Zorse(SimpleRule):
    """Zorse (Guo et al., "Zorse: Optimizing LLM Training Efficiency on Heterogeneous GPU Clusters", arXiv 2507.10392; its
    planner is `zorse_planner.py` and `zorse_optimizer` in github.com/benson-guo/zorse). For every number of groups up to that of
    nodes, the graph of bandwidths is cut where least is lost (a node is kept whole); groups follow each other by bandwidth, the
    one that sums fastest first; a group is a pipeline stage whose devices are data-parallel: micro-batches in proportion to a
    device's speed, layers in proportion to what its group then computes. Of all numbers of groups and micro-batch sizes the one
    that simulates fastest is taken; Zorse trusts its own estimate.

    What a plan cannot express: devices of a stage between which micro-batches are shared out anew (here a replica's path is
    fixed, so each group is split into as many teams, of which the fast ones go with the fast ones, and a team of several devices
    splits its group's layers; the number of teams is 1, 2, 4, … up to the smallest group, or that); parameters, gradients and
    optimizer sharded within a group (ZeRO-2) or in host memory; several stages on a device (interleaving); the optimizer within
    backward. Recompute everywhere or nowhere. Clusters of more than 32 nodes are not cut."""

    name = "zorse"
    by_memory = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        problem = desk.problem
        if len(problem.cluster.nodes) > MOST_NODES:
            raise PartitionError(f"{self.name}: the links of more than {MOST_NODES} nodes are not cut into groups; use 'auto'")
        sizes, place, seen, speeds = common_sizes(problem, problem.global_batch), 0, set(), _Speeds(desk)
        for groups in _groupings(desk):
            for b in sizes:
                layers = speeds.layers(groups, b)
                used = [(group, count) for group, count in zip(groups, layers, strict=True) if count]
                smallest = min(len(group) for group, _ in used)
                for teams in sorted({2**i for i in range(smallest.bit_length())} | {smallest}):
                    lines = speeds.lines(used, teams, b)
                    for recompute in recompute_choices(problem):
                        draft = speeds.draft(self.name, lines, b, recompute)
                        key = draft.rows.tobytes(), draft.works, draft.which.tobytes()
                        if key not in seen and runs(desk, draft.rows):
                            seen.add(key)
                            yield desk.candidate(place := place + 1, draft)


def _groupings(desk: Desk) -> Iterator[list[list[int]]]:
    """The devices in 1, 2, … groups, in the order of the pipeline."""
    cluster, costs = desk.problem.cluster, desk.appraiser.costs
    names = [node.name for node in cluster.nodes]
    members = [np.flatnonzero(desk.appraiser.links.node == i).tolist() for i in range(len(names))]
    rates = np.array([[_rate(desk, a, b) if a != b or len(members[i]) > 1 else 0.0 for b in names] for i, a in enumerate(names)])
    counts = np.array([len(group) for group in members], dtype=float)
    weights = rates * np.outer(counts, counts)
    np.fill_diagonal(weights, 0.0)
    layer_bytes = float(desk.problem.profile.trained_bytes().max())
    for parts in splits(weights):
        groups = [[device for node in part for device in members[node]] for part in parts]
        each = [costs.all_reduce_seconds([desk.appraiser.ids[d] for d in group], layer_bytes) for group in groups]
        yield [groups[i] for i in _chain(parts, each, rates)]


def _rate(desk: Desk, a: str, b: str) -> float:
    try:
        return MESSAGE_BYTES / max(desk.problem.cluster.link_between(a, b).seconds(MESSAGE_BYTES), 1e-300)
    except InputError:  # simulating what needs the link says so
        return 1.0


def _chain(parts: list[list[int]], sums: list[float], rates: Array) -> list[int]:
    """The part that sums fastest, then always the one of the greatest mean bandwidth to the last."""
    order = [min(range(len(parts)), key=lambda i: (sums[i], i))]
    left = [i for i in range(len(parts)) if i != order[0]]
    while left:
        last = parts[order[-1]]
        order.append(max(left, key=lambda i: (float(rates[np.ix_(last, parts[i])].mean()), -i)))
        left.remove(order[-1])
    return order


class _Speeds:
    """What devices, teams and groups compute in a time."""

    def __init__(self, desk: Desk) -> None:
        self.problem, self.appraiser = desk.problem, desk.appraiser
        self.kind_of: list[int] = desk.appraiser.type_of.tolist()

    @memoized
    def seconds(self, kind: int, b: int, lo: int, hi: int) -> float:
        """Forward and backward of a micro-batch on a type; at least a trace, so that speeds are finite."""
        return max(1e-12, sum(self.appraiser.costs.stage_seconds(self.appraiser.types[kind], lo, hi, b)))

    def speed(self, device: int, b: int) -> float:
        """Micro-batches a second, of the whole model."""
        return 1 / self.seconds(self.kind_of[device], b, 0, self.appraiser.L)

    def layers(self, groups: list[list[int]], b: int) -> list[int]:
        """Layers of each group: by one over the time in which its devices do all micro-batches, which they get in proportion to
        their speeds."""
        count, speeds = max(1, self.problem.global_batch // b), []
        for group in groups:
            each = [self.speed(device, b) for device in group]
            speeds.append(1 / max(share / speed for speed, share in zip(each, in_proportion(each, count), strict=True)))
        return in_proportion(speeds, self.appraiser.L)

    def teams(self, group: list[int], count: int, b: int) -> list[list[int]]:
        """A group's devices in so many teams of about equal speed: the next fastest always to the slowest; fastest team first."""
        heap: list[tuple[float, int, list[int]]] = [(0.0, i, []) for i in range(count)]
        for device in sorted(group, key=lambda d: (-self.speed(d, b), d)):
            speed, i, team = heap[0]
            heapq.heapreplace(heap, (speed + self.speed(device, b), i, [*team, device]))
        return [sorted(team) for _, _, team in sorted(heap, key=lambda found: (-found[0], found[1]))]

    def lines(self, used: list[tuple[list[int], int]], count: int, b: int) -> list[ReplicaCut]:
        """So many replicas, each of a team of every group, whose devices get the group's layers in proportion to their speeds."""
        found: list[tuple[list[int], list[int]]] = [([], []) for _ in range(count)]
        for group, layers in used:
            for (devices, counts), team in zip(found, self.teams(group, count, b), strict=True):
                devices += team
                counts += in_proportion([self.speed(device, b) for device in team], layers)
        return [(tuple(devices), tuple(ends_of(counts))) for devices, counts in found]

    def draft(self, name: str, lines: list[ReplicaCut], b: int, recompute: bool) -> Draft:
        """Micro-batches in proportion to the speed of a replica's slowest stage; what is left of the batch for the fastest."""
        speeds = []
        for devices, ends in lines:
            stages = zip(devices, pairwise(ends), strict=True)
            speeds.append(1 / max(self.seconds(self.kind_of[device], b, lo, hi) for device, (lo, hi) in stages if hi > lo))
        whole, rest = divmod(self.problem.global_batch, b)
        samples = [b * n for n in in_proportion(speeds, whole)]
        samples[speeds.index(max(speeds))] += rest
        width = max(len(devices) for devices, _ in lines)  # shorter rows end with devices of no layer
        each = []
        for (devices, ends), n in zip(lines, samples, strict=True):
            if n:
                work = Work(in_runs(n, b), ends + ends[-1:] * (width + 1 - len(ends)), recompute)
                each.append((devices + devices[:1] * (width - len(devices)), work))
        works = {work: i for i, work in enumerate(dict.fromkeys(work for _, work in each))}
        which = np.array([works[work] for _, work in each])
        return Draft(name, schedule_of(self.problem), np.array([row for row, _ in each]), tuple(works), which)


partitioner = Zorse()
