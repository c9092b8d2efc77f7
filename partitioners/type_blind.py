"""`type-blind`: Megatron-LM's way, which takes all devices to be equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._baseline import equal_parts
from hetpipe.partitioners._grids import device_ids, ends_of, grid_plans, grids, solve
from hetpipe.plan import Plan


@dataclass(frozen=True)
class TypeBlind:
    """Pipeline × data parallel over all devices as in Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (SC '21, sections 2.2 and 3): the same number of layers on every stage,
    the same batch for every replica, 1F1B.

    Generous where Megatron is strict: of all grids, in both of its orders of ranks, with every measured micro-batch size, and
    recompute everywhere or nowhere, the one that simulates fastest on the real devices (Megatron's user tries them out); and
    layers and samples that cannot be divided evenly differ by one (Megatron refuses them). Tensor parallelism is left
    out."""

    name: str = "type-blind"

    def __call__(self, problem: Problem) -> Solution:
        """The best grid that fits."""
        return solve(problem, self.name, self.plans(problem))

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """All that are tried."""
        L = len(problem.profile.layers)
        for grid in grids(device_ids(problem), L):
            ends = ends_of(equal_parts(L, len(grid[0])))
            yield from grid_plans(problem, self.name, grid, lambda line, b, ends=ends: ends)  # type: ignore[misc]


partitioner = TypeBlind()
