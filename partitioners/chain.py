"""`chain`: one pipeline over any of the devices, in any order."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.even import Even
from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.planning.partition import PartitionError, Problem, Solution


@dataclass(frozen=True)
class Chain:
    """The search of `exact/best_first.py` with one replica: exact in simulated step time over all subsets, orders, cuts,
    micro-batch sizes and depth families. A dynamic program over counts of devices bounds every composition;
    the pipelines whose own bound is below the plan in hand are simulated, least bound first."""

    name: str = "chain"
    time_limit_seconds: float = 30.0

    def __call__(self, problem: Problem) -> Solution:
        """Search one pipeline, from that of `even` if there is one."""
        start = list[Plan]()
        with suppress(PartitionError, InputError):  # the search says what is missing
            start.append(Even()(problem).plan)
        seconds = problem.time_limit_seconds or self.time_limit_seconds
        return ExactSearch(problem, self.name, max_replicas=1, time_limit_seconds=seconds, start=start).run()


partitioner = Chain()
