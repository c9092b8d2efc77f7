"""`fasop`: grids of pipelines × replicas, cuts by FASOP's greedy move of layers from the slowest to the fastest stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.rules.baseline import common_sizes, divisors, equal_parts, recompute_choices, solve
from hetpipe.partitioners.rules.grids import Layout, ends_of, layouts, runs, schedule_of
from hetpipe.partitioners.rules.rotations import AlikeGrids, alike_grids
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.step_times.appraisal import Appraiser, PipelineKind, Sketch
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index, Work, in_runs
from hetpipe.partitioners.step_times.earliest import CommonWork, PipelineRows
from hetpipe.partitioners.step_times.sets import Set
from hetpipe.planning.partition import Problem, Solution
from hetpipe.predict.cost import occupied_seconds


def greedy(seconds: Callable[[int, int, int], float], layers: int, n: int) -> list[int]:
    """Ends of n stages. From equal counts, the slowest stage gives one layer to the fastest (the layers between shift)
    as long as the slowest time does not rise; equal times go on until a partition comes back. `seconds(s, lo, hi)` is the time
    of stage s. Keeps the best partition seen. Each move O(n); a local optimum, with no promise."""
    counts = equal_parts(layers, n)
    best: tuple[float, list[int]] | None = None
    seen: set[tuple[int, ...]] = set()
    while tuple(counts) not in seen:
        seen.add(tuple(counts))
        ends = ends_of(counts)
        times = [seconds(s, ends[s], ends[s + 1]) for s in range(n)]
        if best is not None and max(times) > best[0]:
            break
        if best is None or max(times) < best[0]:
            best = max(times), ends
        slowest, fastest = times.index(max(times)), times.index(min(times))
        if counts[slowest] == 1:
            break
        counts[slowest] -= 1
        counts[fastest] += 1
    assert best is not None
    return best[1]


def placements(problem: Problem) -> list[int]:
    """Where device orders begin: the cyclic rotations of the cluster's blocks (the devices of one type on one node), once for
    each sequence of types."""
    devices = problem.cluster.devices
    blocks = [i for i, d in enumerate(devices) if i == 0 or (d.node, d.type) != (devices[i - 1].node, devices[i - 1].type)]
    types = [device.type for device in devices]
    period = next(d for d in divisors(len(types)) if types[d:] + types[:d] == types)
    found: dict[int, int] = {}
    for start in blocks:
        found.setdefault(start % period, start)
    return list(found.values())


@dataclass(frozen=True)
class Fasop:
    """FASOP (Hwang et al., "FASOP: Fast yet Accurate Automated Search for Optimal Parallelization of Transformers on
    Heterogeneous GPU Clusters", HPDC '24, doi 10.1145/3625549.3658687): all grids of pipeline × data parallelism, node
    placements by rotation, the same cuts and the same batch for every replica, 1F1B. A stage whose replicas are of several
    types is as slow as its slowest, and a stage that receives activations pays for the transfer.

    FASOP then trusts its own estimate of the step, which leaves out most transfers; here the grid that simulates fastest and
    fits is taken, so this is FASOP at its best. Tensor parallelism is left out. Recompute everywhere or nowhere."""

    name: str = "fasop"

    def __call__(self, problem: Problem) -> Solution:
        """The best grid that fits."""
        return solve(problem, self)

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """All drafts that this rule tries."""
        problem, cuts = desk.problem, _Cuts(desk.appraiser)
        smallest = common_sizes(problem, problem.global_batch)[0]
        starts, every = placements(problem), list(layouts(len(problem.cluster.devices), cuts.layers))
        for i, layout in enumerate(every):
            desk.say(f"{self.name}, {i} of {len(every)} grids")
            usable = [start for start in starts if problem.backend == "torch" or runs(desk, layout.rows(start))]
            if problem.global_batch // layout.R < smallest or not usable:
                continue
            grids = alike_grids(desk.appraiser, layout, problem.global_batch % layout.R, usable)
            yield from _Grids(self.name, desk, layout, i, grids).candidates(cuts)


class _Grids(NamedTuple):
    """The grids of one layout."""

    name: str
    desk: Desk
    layout: Layout
    number: int
    alike: AlikeGrids

    def candidates(self, cuts: _Cuts) -> Iterator[Candidate]:
        """The drafts of these grids, for each micro-batch size, with recompute nowhere or everywhere."""
        problem = self.desk.problem
        for i, b in enumerate(common_sizes(problem, problem.global_batch // self.layout.R)):
            ends = cuts.of(self.alike, b)
            for recompute in recompute_choices(problem):
                yield from self._drafts(i, b, recompute, ends)

    def _drafts(self, i: int, b: int, recompute: bool, ends: Index) -> Iterator[Candidate]:
        """The drafts of these grids with these cuts [U, n + 1]."""
        R, grids, schedule = self.layout.R, self.alike, schedule_of(self.desk.problem)
        share, more = divmod(self.desk.problem.global_batch, R)
        rows, which = self.layout.rows(), (np.arange(R) >= more).astype(np.int64)
        ways = [(in_runs(share + 1, b), grids.more)] * (more > 0) + [(in_runs(share, b), grids.others)]
        bounds = np.zeros(len(ends))
        for sizes, types in ways:
            rows_of = PipelineRows(types, grids.links, ends[:, :-1], ends[:, 1:], grids.spread)
            least = self.desk.appraiser.earliest.steps(rows_of, CommonWork(sizes, recompute, R, schedule))
            bounds = np.maximum(bounds, least)
        for u, bound in enumerate(bounds.tolist()):
            works = tuple(Work(sizes, tuple(ends[u].tolist()), recompute) for sizes, _ in ways)
            links, spread = tuple(grids.links[u].tolist()), tuple(grids.spread[u].tolist())
            on = [tuple(types[u].tolist()) for _, types in ways]
            pipelines = [PipelineKind(work, types, links) for work, types in zip(works, on, strict=True)]
            draft = Draft(self.name, schedule, rows, works, which if more else np.zeros_like(which))
            yield Candidate(bound, (self.number, i, recompute), draft, Sketch(pipelines, spread), grids.starts[u])


class _Cuts:
    """The cuts of grids, which are the same for all pipelines of a grid."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser, self.layers = appraiser, appraiser.L

    def of(self, grids: AlikeGrids, b: int) -> Index:
        """The ends of the stages for every kind of grid, [U, n + 1]."""
        more, others, links = ([tuple(row) for row in part.tolist()] for part in (grids.more, grids.others, grids.links))
        return np.array([self.found(*given, b) for given in zip(more, others, links, strict=True)])

    @memoized
    def found(self, more: tuple[int, ...], others: tuple[int, ...], links: tuple[int, ...], b: int) -> tuple[int, ...]:
        """Where stages on these types, joined by these links, are cut."""
        kinds, joins = self.appraiser.type_sets.all, self.appraiser.link_sets.all
        types = [kinds[x] | kinds[y] for x, y in zip(more, others, strict=True)]

        def seconds(s: int, lo: int, hi: int) -> float:
            compute = self._compute(types[s], lo, hi, b)
            return compute + self._transfer(joins[links[s - 1]], lo, b) if s else compute

        return tuple(greedy(seconds, self.layers, len(types)))

    @memoized
    def _compute(self, types: Set, lo: int, hi: int, b: int) -> float:
        names = self.appraiser.types
        return max(sum(self.appraiser.costs.stage_seconds(names[kind], lo, hi, b)) for kind in types)

    @memoized
    def _transfer(self, links: Set, boundary: int, b: int) -> float:
        size = float(self.appraiser.problem.profile.output_bytes[boundary - 1]) * b
        each = [self.appraiser.links.link(link) for link in links]
        return max(occupied_seconds(link, size) + link.seconds(0) for link in each)


partitioner = Fasop()
