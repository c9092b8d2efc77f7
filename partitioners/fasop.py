"""`fasop`: grids of pipelines × replicas, cuts by FASOP's greedy move of layers from the slowest to the fastest stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetpipe.cost import Costs
from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._baseline import equal_parts
from hetpipe.partitioners._grids import Ends, Grid, Line, ends_of, grid_plans, grids, solve
from hetpipe.plan import Plan


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


def placements(problem: Problem) -> Iterator[list[str]]:
    """Device orders: the cyclic rotations of the cluster's blocks (the devices of one type on one node), once for each
    sequence of types."""
    blocks: list[list[str]] = []
    kind = None
    for device in problem.cluster.devices:
        if (device.node, device.type) != kind:
            blocks.append([])
            kind = device.node, device.type
        blocks[-1].append(device.id)
    seen: set[tuple[str, ...]] = set()
    for i in range(len(blocks)):
        order = [d for block in blocks[i:] + blocks[:i] for d in block]
        types = tuple(problem.cluster.device(d).type for d in order)
        if types not in seen:
            seen.add(types)
            yield order


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
        return solve(problem, self.name, self.plans(problem))

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """All that are tried."""
        costs, seen = Costs(problem.profile, problem.cluster), set()
        for ids in placements(problem):
            for grid in grids(ids, costs.layer_count):
                if grid not in seen:
                    seen.add(grid)
                    yield from grid_plans(problem, self.name, grid, _cut(grid, costs))


def _cut(grid: Grid, costs: Costs) -> Callable[[Line, int], Ends]:
    """The same cuts for all lines of a grid, found once per micro-batch size."""
    stages = list(zip(*grid, strict=True))
    types: Sequence[list[str]] = [sorted({costs.cluster.device(d).type for d in stage}) for stage in stages]
    found: dict[int, list[int]] = {}

    def cut(line: Line, b: int) -> Ends:
        def seconds(s: int, lo: int, hi: int) -> float:
            compute = max(sum(costs.stage_seconds(kind, lo, hi, b)) for kind in types[s])
            if s == 0:
                return compute
            sends = (
                costs.transfer(up, down, lo, b) for up, down in zip(stages[s - 1], stages[s], strict=True)
            )
            return compute + max(sum(send) for send in sends)

        if b not in found:
            found[b] = greedy(seconds, costs.layer_count, len(stages))
        return found[b]

    return cut


partitioner = Fasop()
