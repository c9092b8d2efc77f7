"""`auto`: unlike replicas, each with its own devices, cuts, depths and share, over two to thousands of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.partitioners import _balance, _estimate, _places, _real, _relaxed
from hetpipe.partitioners._cheapest import Cheapest
from hetpipe.partitioners._floor import cost, simple_plans
from hetpipe.partitioners._limit import Limit
from hetpipe.partitioners._obstacle import explain, refuse
from hetpipe.partitioners._planner import Planner
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._space import microbatch_sizes, require_seats
from hetpipe.planning.partition import PartitionError, Problem, Solution, no_plan_in_time
from hetpipe.spec.plan import Plan

FEW_DEVICES = 8  # searched to the end; or the cheapest plan under a deadline, on up to twice as many
MOST_POOLS = 150  # types on nodes, that the search over single devices tells apart: 1 GB of tables
CLOSE = 1.0001  # times the bound: nothing is left to search for


@dataclass(frozen=True)
class Auto:
    """It starts from the best plans of all simple rules (`_floor`), at every size, and never returns a slower one; then
    `_planner`, which counts devices: a plan and a proven bound. On up to 8 devices the joint search of `_search` follows, which
    ends with the optimum in the plan class of `_space`, or at its limit. Back ends that run one process a node have the
    latter only, at every size. The cheapest plan under a deadline on more than 16 devices: `_cheapest`, which plans subsets."""

    name: str = "auto"
    time_limit_seconds: float = 10.0

    def __call__(self, problem: Problem) -> Solution:
        """Search replicas, cuts and shares together."""
        require_seats(problem)
        microbatch_sizes(problem)  # says what is missing
        if problem.progress is not None:
            problem.progress("loading what numba compiled; the first time it compiles for some 20 s")
        for module in (_balance, _estimate, _places, _real, _relaxed):
            module.ready()
        seconds, timed = problem.time_limit_seconds or self.time_limit_seconds, problem.time_limit_seconds is not None
        clock = Limit(seconds)
        simple = list(simple_plans(problem, late=lambda: timed and clock.left() < seconds / 2))
        try:
            found = self._search(problem, max(0.1, clock.left()) if timed else seconds, simple)
        except PartitionError:
            if not simple:
                raise
            found = Solution(plan=simple[-1])
        best = min([found.plan, *simple], key=lambda plan: cost(problem, plan))
        return replace(found, plan=best.model_copy(update={"partitioner": self.name}))

    def _search(self, problem: Problem, seconds: float, simple: Sequence[Plan]) -> Solution:
        """By size, limits and back end."""
        devices, torch = problem.cluster.devices, problem.backend == "torch"
        timed = problem.time_limit_seconds is not None
        if problem.deadline_seconds_per_step is not None and len(devices) > 2 * FEW_DEVICES and torch:
            if not simple:
                refuse(problem)
            own = replace(problem, time_limit_seconds=seconds) if timed else problem
            return Cheapest(own, self, simple).run()
        if torch and problem.deadline_seconds_per_step is None:
            return self._counted(problem, seconds, simple)
        if not simple:
            refuse(problem)
        if len({(d.node, d.type) for d in devices}) > MOST_POOLS:
            if simple:
                return Solution(plan=simple[-1])
            raise explain(problem)
        return Search(problem, self.name, time_limit_seconds=seconds, start=simple).run()

    def _counted(self, problem: Problem, seconds: float, simple: Sequence[Plan]) -> Solution:
        """The counted planner; on few devices the joint search from its plan, with the better of both bounds."""
        limit, few = Limit(seconds), len(problem.cluster.devices) <= FEW_DEVICES
        timed = problem.time_limit_seconds is not None
        planner = Planner(
            problem,
            min((cost(problem, plan) for plan in simple), default=math.inf),
            lambda: timed and limit.late(),
            [len(plan.replicas) for plan in reversed(simple)],
        )
        plan = planner.run()
        plans = [*simple, *([] if plan is None else [plan])]
        if not plans:
            refuse(problem)
        bound = planner.lower.bound
        if plans and not (few and planner.assembly.step > CLOSE * bound):
            return Solution(
                plan=plans[-1], lower_bound_seconds=min(bound, planner.assembly.step), proof="search-bound"
            )
        if not plans and not few:
            if timed and limit.late():
                raise no_plan_in_time(seconds)
            raise explain(problem)
        left = max(0.1, limit.left()) if timed else seconds
        found = Search(problem, self.name, time_limit_seconds=left, start=plans).run()
        step, own = cost(problem, found.plan), found.lower_bound_seconds or 0.0
        return (
            found
            if own >= min(bound, step)
            else replace(found, lower_bound_seconds=min(bound, step), proof="search-bound")
        )


partitioner = Auto()
