"""`chain`: one pipeline over any of the devices, in any order."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.planning.partition import Problem, Solution


@dataclass(frozen=True)
class Chain:
    """The search of `exact/best_first.py` with one replica: exact in simulated step time over all subsets, orders, cuts,
    micro-batch sizes and depth families. A dynamic program over counts of devices bounds every composition;
    the pipelines whose own bound is below the plan in hand are simulated, least bound first."""

    name: str = "chain"
    time_limit_seconds: float = 30.0

    def __call__(self, problem: Problem) -> Solution:
        """Search one pipeline."""
        seconds = problem.time_limit_seconds or self.time_limit_seconds
        return ExactSearch(problem, self.name, max_replicas=1, time_limit_seconds=seconds).run()


partitioner = Chain()
