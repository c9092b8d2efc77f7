"""`type-blind`: Megatron-LM's way, which takes all devices to be equal."""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.partitioners.rules.baseline import SimpleRule, equal_parts
from hetpipe.partitioners.rules.grids import ends_of, grid_drafts, layouts
from hetpipe.partitioners.step_times.desk import Candidate, Desk


class TypeBlind(SimpleRule):
    """Pipeline × data parallel over all devices as in Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (SC '21, sections 2.2 and 3): the same number of layers on every stage,
    the same batch for every replica, 1F1B.

    Generous where Megatron is strict: of all grids, in both of its orders of ranks, with every measured micro-batch size, and
    recompute everywhere or nowhere, the one that simulates fastest on the real devices (Megatron's user tries them out); and
    layers and samples that cannot be divided evenly differ by one (Megatron refuses them). Tensor parallelism is left
    out."""

    name = "type-blind"

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        L, place = len(desk.problem.profile.layers), 0
        for layout in layouts(len(desk.problem.cluster.devices), L):
            ends = ends_of(equal_parts(L, layout.n))
            for draft in grid_drafts(desk, self.name, layout.rows(), lambda types, b, ends=ends: ends):  # type: ignore[misc]
                yield desk.candidate(place := place + 1, draft)


partitioner = TypeBlind()
