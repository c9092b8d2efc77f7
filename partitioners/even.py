"""`even`: one pipeline over all devices in the order of the cluster file, the same number of layers on
each."""

from __future__ import annotations

from collections.abc import Iterator

from hetpipe.partitioners.rules.baseline import SimpleRule, equal_parts
from hetpipe.partitioners.rules.grids import ends_of, grid_drafts, one_line
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.planning.partition import PartitionError


class Even(SimpleRule):
    """What pipelines for equal devices do (1F1B; gpipe where the problem asks for it). Layers that cannot be
    divided evenly go to the first stages; with more devices than layers the last ones stay unused. The
    micro-batch size, and recompute on all stages or none, are those that simulate fastest."""

    name = "even"
    equal = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        problem = desk.problem
        if problem.backend != "torch" and len(problem.cluster.nodes) > 1:
            raise PartitionError(
                f"{self.name}: one pipeline over all devices spans {len(problem.cluster.nodes)} nodes, but the back end "
                f"{problem.backend!r} runs a pipeline within one node; use 'auto' or the back end 'torch'"
            )
        rows = one_line(problem)
        ends = ends_of(equal_parts(len(problem.profile.layers), rows.size))
        for place, draft in enumerate(grid_drafts(desk, self.name, rows, lambda types, b: ends)):
            yield desk.candidate(place, draft)


partitioner = Even()
