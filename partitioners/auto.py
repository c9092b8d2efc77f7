"""`auto`: unlike replicas, each with its own devices, cuts, depths and share, over two to thousands of devices."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.partition import Problem, Solution
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._search import Search

FEW_DEVICES = 16  # searched exactly


@dataclass(frozen=True)
class Auto:
    """Up to 16 devices the joint search of `_search`: optimal in the plan class of `_space`, or with a proven bound
    after the time limit. Above, `_large`: a plan and a proven bound from counted devices (back ends that run one
    process a node, and the search for the cheapest plan under a deadline, stay with the former)."""

    name: str = "auto"
    time_limit_seconds: float = 30.0

    def __call__(self, problem: Problem) -> Solution:
        """Search replicas, cuts and shares together."""
        counted = problem.backend == "torch" and problem.deadline_seconds_per_step is None
        seconds = problem.time_limit_seconds or self.time_limit_seconds
        if counted and len(problem.cluster.devices) > FEW_DEVICES:
            return Large(problem, self.name, time_limit_seconds=seconds).run()
        return Search(problem, self.name, time_limit_seconds=seconds).run()


partitioner = Auto()
