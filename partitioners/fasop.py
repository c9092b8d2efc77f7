"""`fasop`: grids of pipelines × replicas, cuts by FASOP's greedy move of layers from the slowest to the fastest stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.rules.baseline import SimpleRule, common_sizes, divisors, equal_parts, recompute_choices
from hetpipe.partitioners.rules.grids import Layout, ends_of, layouts, runs, schedule_of
from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.step_times.appraisal import Appraiser
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Work, in_runs
from hetpipe.planning.partition import Problem
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


class Fasop(SimpleRule):
    """FASOP (Hwang et al., "FASOP: Fast yet Accurate Automated Search for Optimal Parallelization of Transformers on
    Heterogeneous GPU Clusters", HPDC '24, doi 10.1145/3625549.3658687): all grids of pipeline × data parallelism, node
    placements by rotation, the same cuts and the same batch for every replica, 1F1B. A stage whose replicas are of several
    types is as slow as its slowest, and a stage that receives activations pays for the transfer.

    FASOP then trusts its own estimate of the step, which leaves out most transfers; here the grid that simulates fastest and
    fits is taken, so this is FASOP at its best. Tensor parallelism is left out. Recompute everywhere or nowhere."""

    name = "fasop"

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        problem, cuts = desk.problem, _Cuts(desk.appraiser)
        smallest = common_sizes(problem, problem.global_batch)[0]
        starts, every = placements(problem), list(layouts(len(problem.cluster.devices), cuts.layers))
        for i, layout in enumerate(every):
            desk.say(f"{self.name}, {i} of {len(every)} grids")
            usable = [start for start in starts if problem.backend == "torch" or runs(desk, layout.rows(start))]
            if problem.global_batch // layout.R >= smallest:
                for grids in _alike(desk, layout, usable):
                    yield from self._drafts(desk, i, layout, grids, cuts)

    def _drafts(self, desk: Desk, number: int, layout: Layout, grids: _Grids, cuts: _Cuts) -> Iterator[Candidate]:
        """The drafts of these grids, for each micro-batch size, with recompute nowhere or everywhere."""
        R, schedule = layout.R, schedule_of(desk.problem)
        share, more = divmod(desk.problem.global_batch, R)
        which = (np.arange(R) >= more).astype(np.int64) if more else np.zeros(R, dtype=np.int64)
        for i, b in enumerate(common_sizes(desk.problem, share)):
            ends = cuts.found(grids.types, grids.links, b)
            for recompute in recompute_choices(desk.problem):
                works = [Work(in_runs(samples, b), ends, recompute) for samples in ([share + 1, share] if more else [share])]
                draft = Draft(self.name, schedule, layout.rows(), tuple(works), which)
                bound = desk.appraiser.least(desk.moved(draft, grids.starts[0]))
                yield Candidate(bound, (number, i, recompute), draft, grids.starts)


class _Grids(NamedTuple):
    """Grids that are alike to this rule, from each of `starts` on: of each stage the types of its devices in all rows, and of
    each boundary the links."""

    types: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, ...], ...]
    starts: list[int]


def _alike(desk: Desk, layout: Layout, starts: Sequence[int]) -> list[_Grids]:
    """The grids of this layout from the given devices on, by what is alike to this rule and needs memory alike. Of those that
    differ only in the order of their rows, the first."""
    appraiser, found, members = desk.appraiser, dict[bytes, _Grids](), set[tuple[bytes, int]]()
    more = desk.problem.global_batch % layout.R
    same = layout.n if layout.row == layout.n and not more else len(appraiser.ids)  # so far on, the same rows in another order
    for start in starts:
        rows = layout.rows(start)
        joins = _there(appraiser.links.numbers(rows[:, :-1], rows[:, 1:]), len(appraiser.links.all) + 1)
        first, others = (_there(appraiser.type_of[some], len(appraiser.types)) for some in (rows[:more], rows[more:]))
        key = first.tobytes() + others.tobytes() + joins.tobytes()
        grids = found.setdefault(key, _Grids(_members(first | others), _members(joins), []))
        if (key, start % same) not in members:
            members.add((key, start % same))
            grids.starts.append(start)
    return list(found.values())


def _there(numbers: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Which of so many numbers each column has [count, columns]; −1 is the last."""
    found = np.zeros((count, numbers.shape[1]), dtype=bool)
    found[numbers, np.arange(numbers.shape[1])] = True
    return found


def _members(there: NDArray[np.bool_]) -> tuple[tuple[int, ...], ...]:
    """The numbers of each column."""
    return tuple(tuple(np.flatnonzero(column).tolist()) for column in there.T)


class _Cuts:
    """The cuts of grids, which are the same for all pipelines of a grid."""

    def __init__(self, appraiser: Appraiser) -> None:
        self.appraiser, self.layers = appraiser, appraiser.L

    @memoized
    def found(self, types: tuple[tuple[int, ...], ...], links: tuple[tuple[int, ...], ...], b: int) -> tuple[int, ...]:
        """Where stages on these types, joined by these links, are cut."""

        def seconds(s: int, lo: int, hi: int) -> float:
            compute = self._compute(types[s], lo, hi, b)
            return compute + self._transfer(links[s - 1], lo, b) if s else compute

        return tuple(greedy(seconds, self.layers, len(types)))

    @memoized
    def _compute(self, types: tuple[int, ...], lo: int, hi: int, b: int) -> float:
        names = self.appraiser.types
        return max(sum(self.appraiser.costs.stage_seconds(names[kind], lo, hi, b)) for kind in types)

    @memoized
    def _transfer(self, links: tuple[int, ...], boundary: int, b: int) -> float:
        size = float(self.appraiser.problem.profile.output_bytes[boundary - 1]) * b
        each = [self.appraiser.links.link(link if link < len(self.appraiser.links.all) else -1) for link in links]
        return max(occupied_seconds(link, size) + link.seconds(0) for link in each)


partitioner = Fasop()
