"""`fasop`: grids of pipelines × replicas, cuts by FASOP's greedy move of layers from the slowest to the fastest stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._appraisal import Appraiser, Set, Sketch, Sort
from hetpipe.partitioners._baseline import common_sizes, divisors, equal_parts, recompute_choices, solve
from hetpipe.partitioners._desk import Candidate, Desk
from hetpipe.partitioners._drafts import Draft, Work, in_runs
from hetpipe.partitioners._grids import Layout, ends_of, layouts, runs, schedule_of
from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._rotations import Alike, Sets, alike


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
        """All that are tried."""
        problem, cuts, sets = desk.problem, _Cuts(desk.appraiser), (Sets(), Sets())
        smallest = common_sizes(problem, problem.global_batch)[0]
        starts, every = placements(problem), list(layouts(len(problem.cluster.devices), cuts.layers))
        for i, layout in enumerate(every):
            desk.say(f"{self.name}, {i} of {len(every)} grids")
            usable = [start for start in starts if problem.backend == "torch" or runs(desk, layout.rows(start))]
            if problem.global_batch // layout.R < smallest or not usable:
                continue
            for grids in alike(desk.appraiser, layout, problem.global_batch % layout.R, usable, sets):
                for j, (draft, sketch) in enumerate(self._drafts(desk, layout, grids, cuts)):
                    yield desk.candidate((i, j), draft, sketch, grids.starts)

    def _drafts(self, desk: Desk, layout: Layout, grids: Alike, cuts: _Cuts) -> Iterator[tuple[Draft, Sketch]]:
        """Of grids that are alike: each micro-batch size, recompute nowhere or everywhere."""
        problem, ways = desk.problem, (grids.more, grids.others)
        share, more = divmod(problem.global_batch, layout.R)
        rows, which = layout.rows(), (np.arange(layout.R) >= more).astype(np.int64)
        for b in common_sizes(problem, share):
            ends = cuts.found(tuple(map(frozenset.union, *ways)), grids.links, b)
            for recompute in recompute_choices(problem):
                works = tuple(Work(in_runs(samples, b), ends, recompute) for samples in (share + 1, share))
                sorts = [Sort(work, types, grids.links) for work, types in zip(works, ways, strict=True) if all(types)]
                yield Draft(self.name, schedule_of(problem), rows, works, which), Sketch(sorts, grids.spread)


class _Cuts:
    """The same cuts for all lines of a grid."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser, self.layers = appraiser, appraiser.L

    @kept
    def found(self, types: tuple[Set, ...], links: tuple[Set, ...], b: int) -> tuple[int, ...]:
        """Where stages on these types, joined by these links, are cut."""

        def seconds(s: int, lo: int, hi: int) -> float:
            compute = self._compute(types[s], lo, hi, b)
            return compute + self._transfer(links[s - 1], lo, b) if s else compute

        return tuple(greedy(seconds, self.layers, len(types)))

    @kept
    def _compute(self, types: Set, lo: int, hi: int, b: int) -> float:
        names = self.appraiser.types
        return max(sum(self.appraiser.costs.stage_seconds(names[kind], lo, hi, b)) for kind in types)

    @kept
    def _transfer(self, links: Set, boundary: int, b: int) -> float:
        return max(sum(self.appraiser.transfer(link, boundary, b)) for link in links)


partitioner = Fasop()
