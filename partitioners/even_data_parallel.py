"""`even-data-parallel`: the whole model on every device, and the same share of the batch:
DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetpipe.partitioners.rules.baseline import SimpleRule, common_sizes
from hetpipe.partitioners.rules.grids import grid_drafts
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.planning.partition import PartitionError


class EvenDataParallel(SimpleRule):
    """Equal shares (they differ by one sample where the batch does not divide). The model must fit the
    smallest device. The micro-batch size, and recompute everywhere or nowhere, are those that simulate
    fastest."""

    name = "even-data-parallel"
    equal = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        devices, batch = len(desk.problem.cluster.devices), desk.problem.global_batch
        if batch < devices:
            raise PartitionError(f"{self.name}: a global batch of {batch} leaves some of {devices} devices idle")
        common_sizes(desk.problem, batch // devices)  # says what is missing
        ends = (0, len(desk.problem.profile.layers))
        rows = np.arange(devices)[:, None]
        for place, draft in enumerate(grid_drafts(desk, self.name, rows, lambda types, b: ends)):
            yield desk.candidate(place, draft)


partitioner = EvenDataParallel()
