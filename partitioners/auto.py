"""`auto`: unlike replicas, each with its own devices, cuts, depths and share, over two to thousands of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.partitioners import _balance, _ends, _enumerate
from hetpipe.partitioners._cheapest import Cheapest
from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._floor import cost, simple_plans
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._limit import Limit
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._obstacle import explain, refuse
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._shortlist import Shortlists
from hetpipe.partitioners._space import microbatch_sizes, require_seats
from hetpipe.partitioners._stages import Stages
from hetpipe.planning.partition import PartitionError, Problem, Solution
from hetpipe.predict.simulator import simulate
from hetpipe.spec.plan import Plan

FEW_DEVICES = 16  # searched exactly
MOST_POOLS = 150  # types on nodes, that the search over single devices tells apart: 1 GB of tables
COUNTED_DEVICES = 8  # above, the counted planner makes a plan to start from
NEAR = 1.01  # of the least step that is not ruled out: near enough for more than so many
FAR, BOUND_SECONDS = 1.05, 1.0  # times what the search proved: then the counted planner is asked too, for so long


@dataclass(frozen=True)
class Auto:
    """It starts from the best plans of all simple rules (`_floor`), at every size, and never returns a slower one.

    Up to 16 devices the joint search of `_search`: up to 8 the optimum in the plan class of `_space`, on more a plan that is
    proven to be within 1 % of it; or, after the time limit, a plan and a proven bound. On more than 16, `_large`: a plan and
    a proven bound from counted devices (back ends that run one process a node stay with the former). The cheapest plan under
    a deadline on more than 16 devices: `_cheapest`, which plans subsets of them."""

    name: str = "auto"
    time_limit_seconds: float = 10.0

    def __call__(self, problem: Problem) -> Solution:
        """Search replicas, cuts and shares together."""
        require_seats(problem)
        microbatch_sizes(problem)  # says what is missing
        if problem.progress is not None:
            problem.progress("loading what numba compiled; the first time it compiles for some 10 s")
        _ends.ready()
        _balance.ready()
        if problem.backend == "torch":
            _enumerate.ready()
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
        counted = problem.backend == "torch" and problem.deadline_seconds_per_step is None
        if problem.backend != "torch" and len({(d.node, d.type) for d in problem.cluster.devices}) > MOST_POOLS:
            if simple:
                return Solution(plan=simple[-1])
            refuse(problem)
            raise explain(problem)
        if len(problem.cluster.devices) <= FEW_DEVICES or problem.backend != "torch":
            return self._exact(problem, seconds, simple, counted)
        if counted:
            return Large(problem, self.name, time_limit_seconds=seconds, others=simple).run()
        if not simple:
            refuse(problem)
        return Cheapest(problem, self, time_limit_seconds=seconds, start=simple).run()

    def _exact(self, problem: Problem, seconds: float, simple: Sequence[Plan], counted: bool) -> Solution:
        """The joint search; with the counted planner's bound, where its own is far."""
        start, left = list(simple), seconds
        few = len(problem.cluster.devices) <= COUNTED_DEVICES
        large = None
        if counted and not few:
            large = Large(problem, self.name, time_limit_seconds=seconds / 2, counted=True, others=simple)
            large.find()
            left = max(0.1, large.ends.left() + seconds / 2)
            start += [] if large.plan is None else [large.plan]
        if not start:
            refuse(problem)
        master = large.master if large is not None else Master(Columns(Stages(Kinds(problem)))) if counted else None
        lists, near = None if master is None else Shortlists(master), 1.0 if few else NEAR
        found = Search(problem, self.name, time_limit_seconds=left, start=start, shortlists=lists, near=near).run()
        step = simulate(found.plan, problem.profile, problem.cluster).step_seconds
        if large is None or large.plan is None or (found.lower_bound_seconds or 0.0) * FAR >= step:
            return found
        bound = min(large.bound(BOUND_SECONDS), step)
        more = bound > (found.lower_bound_seconds or 0.0)
        return replace(found, lower_bound_seconds=bound, proof="search-bound") if more else found


partitioner = Auto()
