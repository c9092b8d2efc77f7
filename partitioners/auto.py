"""`auto`: unlike replicas, each with its own devices, cuts, depths and share, over two to thousands of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.documents.plan import Plan
from hetpipe.partitioners.bound import relaxed
from hetpipe.partitioners.exact import best_first, side_by_side
from hetpipe.partitioners.exact.best_first import ExactSearch
from hetpipe.partitioners.memory_fit.obstacle import explain, refuse
from hetpipe.partitioners.pipelines import line_cuts, stage_orders
from hetpipe.partitioners.search import estimate, places
from hetpipe.partitioners.search.cheapest import Cheapest
from hetpipe.partitioners.search.effort import EFFORTS
from hetpipe.partitioners.search.floor import cost, simple_plans
from hetpipe.partitioners.search.planner import Planner
from hetpipe.partitioners.stage_kinds.limit import Limit
from hetpipe.partitioners.stage_kinds.plan_class import microbatch_sizes, require_stage_kinds
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.partition import PartitionError, Problem, Solution, no_plan_in_time
from hetpipe.predict.compiled import are_kept, compile_beside, is_compiling, stop_compiling

FEW_DEVICES = 8  # searched to the end; without a plan, or for the cheapest under a deadline, twice as many
MOST_GROUPS = 150  # types on nodes, that the search over single devices tells apart: 1 GB of tables
MOST_SHARES = 4096  # samples, of which it looks at every number that a replica could get, each a pipeline of its own
CLOSE = 1.0001  # times the bound: nothing is left to search for
LOOPS = (relaxed, line_cuts, stage_orders, estimate, places)  # modules of compiled loops, beside those of the joint search


def ready(*, exact: bool = True) -> None:
    """Compile all that is compiled for `auto`, or read it from disk: outside of any time limit. What the `exact` search needs,
    half of the work, is left out where it is not asked for, and else compiled by a process beside this one."""
    if exact and not are_kept(side_by_side.plans_below):
        compile_beside(best_first.__name__)
    for module in LOOPS:
        module.ready()
    if exact:
        stop_compiling(wait=True)
        best_first.ready()


def is_ready(*, exact: bool = True) -> bool:
    """Whether numba keeps what `ready` would compile, by the last of it."""
    return are_kept(places.put, *([side_by_side.plans_below] if exact else []))


@dataclass(frozen=True)
class Auto:
    """`planner` tells devices apart by their type only: it finds a plan and a proven bound. Then all simple rules (`floor`) are
    tried for a better one, at every size, so it never returns a slower plan than theirs. On up to 8 devices the exact search of
    `best_first` follows, which ends with the optimum in the plan class, or at its limit; with more than 4,096 samples, each
    number of which would be another pipeline to it, the others are near their bound without it. Back ends that run one
    process a node have the rules and that search only. For the cheapest plan under a deadline `cheapest` plans subsets of more
    than 8 devices, or with so many samples; on up to 16 devices that search follows."""

    name: str = "auto"
    time_limit_seconds: float | None = None  # of the joint search, counted; None: what the problem's effort says

    def __call__(self, problem: Problem) -> Solution:
        """Search replicas, cuts and shares together."""
        require_stage_kinds(problem)
        microbatch_sizes(problem)  # says what is missing
        if len(problem.cluster.devices) > 1:
            problem = self._begun(problem)
        found = self._searched(problem, Limit.of(problem))
        return replace(found, plan=found.plan.model_copy(update={"partitioner": self.name}))

    def _begun(self, problem: Problem) -> Problem:
        """Get what is compiled where all of it is there, or time is limited, which no compiling counts in. Else Python runs the
        loops until another process has compiled them; what the simple rules give is said first, and from then on."""
        exact, say = not self._is_large(problem), problem.progress or (lambda _: None)
        if is_ready(exact=exact):
            ready(exact=exact)
            return problem
        if problem.time_limit_seconds is not None:
            say("numba compiles the loops of the search, once on a machine")
            ready(exact=exact)
            return problem
        compile_beside(*(module.__name__ for module in (*LOOPS, *([best_first] if exact else []))))
        found = min((cost(problem, plan) for plan in simple_plans(problem, late=problem.stopped)), default=math.inf)
        if problem.progress is None or math.isinf(found):
            return problem
        what = "step" if problem.deadline_seconds_per_step is None else "price of a step (per hour × seconds)"
        known = f"the simple rules' best {what}: {found:.4g}{' s' if what == 'step' else ''}"

        def told(text: str) -> None:
            say(f"{text}; {known}{'; meanwhile numba compiles, once on a machine' if is_compiling() else ''}")

        return replace(problem, progress=told)

    def _searched(self, problem: Problem, limit: Limit) -> Solution:
        """The best solution that the searches find which suit this size, these limits and this back end."""
        if problem.backend == "torch" and problem.deadline_seconds_per_step is None:
            return self._by_type(problem, limit)
        simple, unfound = list(simple_plans(problem, late=limit.half_over)), None
        if not simple:
            refuse(problem)
        many = len(problem.cluster.devices) > FEW_DEVICES or problem.global_batch > MOST_SHARES
        if problem.backend == "torch" and many:
            try:
                simple.append(self._subsets(problem, limit, simple))
            except PartitionError as error:
                unfound = error
        try:
            found = self._joint(problem, limit, simple)
        except PartitionError as error:
            if unfound is not None and (error.out_of_time or self._is_large(problem)):
                error = unfound  # which says what was found, and what none can be below
            if not simple:
                raise error from None
            found = Solution(plan=simple[-1])
        return replace(found, plan=min([found.plan, *simple], key=lambda plan: cost(problem, plan)))

    def _left(self, problem: Problem, limit: Limit) -> float:
        """Seconds for the joint search."""
        if math.isfinite(limit.seconds):
            return max(0.1, limit.left())
        if self.time_limit_seconds is not None:
            return self.time_limit_seconds
        return EFFORTS[problem.effort].times(Types(problem).ways).exact_seconds

    def _subsets(self, problem: Problem, limit: Limit, start: Sequence[Plan]) -> Plan:
        """The cheapest plan of subsets under a deadline. Of a time limit a joint search that follows has half of the rest."""
        if problem.time_limit_seconds is not None:
            left = self._left(problem, limit) / (1 if self._is_large(problem) else 2)
            problem = replace(problem, time_limit_seconds=left)
        return Cheapest(problem, self.quickly, start).run().plan

    def _is_large(self, problem: Problem) -> bool:
        """Whether there are too many devices for the joint search, too many nodes that are unlike, or too many samples."""
        devices = problem.cluster.devices
        return (problem.backend == "torch" and len(devices) > 2 * FEW_DEVICES) or (
            len({(d.node, d.type) for d in devices}) > MOST_GROUPS or problem.global_batch > MOST_SHARES
        )

    def _joint(self, problem: Problem, limit: Limit, start: Sequence[Plan]) -> Solution:
        """The search over single devices, where these are not too many."""
        if not self._is_large(problem):
            return ExactSearch(problem, self.name, time_limit_seconds=self._left(problem, limit), start=start).run()
        if start:
            return Solution(plan=start[-1])
        raise no_plan_in_time(problem) if limit.late() else explain(problem)

    def quickly(self, problem: Problem) -> Solution:
        """The plan of `planner` without a proof, or, where it has none, the plan of the best rule."""
        limit = Limit.of(problem)
        with Planner(problem, limit.late) as planner:
            plan = planner.run() or next(reversed([*simple_plans(problem, late=limit.late)]), None)
        if plan is None:
            raise no_plan_in_time(problem) if limit.late() else explain(problem)
        return Solution(plan=plan)

    def _by_type(self, problem: Problem, limit: Limit) -> Solution:
        """The plan of `planner`, then the rules; on few devices, and on some more where there is no plan yet, the joint search
        from the best plan, which the bound goes on after, if that did not end. Of a time limit the planner has half."""
        few = len(problem.cluster.devices) <= FEW_DEVICES and problem.global_batch <= MOST_SHARES
        with Planner(problem, limit.half_over, limit.late) as planner:
            plan = planner.run()
            plans = [] if plan is None else [plan]
            plans += simple_plans(problem, planner.assembly.step, limit.late)
            if not plans:
                refuse(problem)
            found, step = None, min((cost(problem, plan) for plan in plans), default=math.inf)
            if (few or (not plans and not self._is_large(problem))) and step > CLOSE * planner.bound:
                found = ExactSearch(problem, self.name, time_limit_seconds=self._left(problem, limit), start=plans).run()
                if found.proof == "exhaustive":
                    return found
                plans.append(found.plan)
                step = min(step, cost(problem, found.plan))
            if not plans:
                raise no_plan_in_time(problem) if limit.late() else explain(problem)
            bound = planner.prove(step)
        if found is not None and (found.lower_bound_seconds or 0.0) >= bound:
            return found
        return Solution(plan=plans[-1], lower_bound_seconds=bound, proof="search-bound")


partitioner = Auto()
