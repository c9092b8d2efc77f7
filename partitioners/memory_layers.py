"""`memory-layers`: layers in proportion to the memory of the devices, FlashFlex's rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetpipe.partitioners.rules.baseline import SimpleRule
from hetpipe.partitioners.rules.grids import Ends, ends_of, grid_drafts, in_proportion, layouts
from hetpipe.partitioners.step_times.desk import Candidate, Desk


class MemoryLayers(SimpleRule):
    """The layer rule of FlashFlex (Yan et al. 2024, "FlashFlex: Accommodating Large Language Model Training over
    Heterogeneous Environment", arXiv 2409.01143): within each pipeline, layers in proportion to memory, so cuts
    differ between replicas; the batch is split evenly; 1F1B.

    FlashFlex chooses the pipelines by graph partitioning with tensor-parallel groups. Here they are the grids of equal
    depth over all devices, in two orders, of which the one that simulates fastest is taken, with the best micro-batch
    size, and recompute everywhere or nowhere."""

    name = "memory-layers"
    by_memory = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        types, L, place = desk.problem.cluster.device_types, len(desk.problem.profile.layers), 0

        def cut(line: Sequence[str], b: int) -> Ends:
            return ends_of(in_proportion([types[kind].memory for kind in line], L))

        for layout in layouts(len(desk.problem.cluster.devices), L):
            for draft in grid_drafts(desk, self.name, layout.rows(), cut):
                yield desk.candidate(place := place + 1, draft)


partitioner = MemoryLayers()
