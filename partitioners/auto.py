"""`auto`: unlike replicas, each with its own devices, cuts, depths and share, over two to thousands of devices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hetpipe.formats import InputError
from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners._candidates import never
from hetpipe.partitioners._cheapest import Cheapest
from hetpipe.partitioners._columns import Columns
from hetpipe.partitioners._desk import Desk, Rule
from hetpipe.partitioners._enumerate import ready
from hetpipe.partitioners._kinds import Kinds
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._obstacle import refuse
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._shortlist import Shortlists
from hetpipe.partitioners._space import microbatch_sizes, require_seats
from hetpipe.partitioners._stages import Stages
from hetpipe.partitioners.equal_parameters import EqualParameters
from hetpipe.partitioners.even import Even
from hetpipe.partitioners.even_data_parallel import EvenDataParallel
from hetpipe.partitioners.fasop import Fasop
from hetpipe.partitioners.memory_layers import MemoryLayers
from hetpipe.partitioners.torchgpipe_balance import TorchgpipeBalance
from hetpipe.partitioners.type_blind import TypeBlind
from hetpipe.partitioners.uneven_data_parallel import UnevenDataParallel
from hetpipe.plan import Plan
from hetpipe.simulator import simulate

FEW_DEVICES = 16  # searched exactly
COUNTED_DEVICES = 8  # above, the counted planner makes a plan to start from
NEAR = 1.01  # of the least step that is not ruled out: near enough for more than so many
FAR, BOUND_SECONDS = 1.05, 1.0  # times what the search proved: then the counted planner is asked too, for so long
SIMPLE: tuple[Rule, ...] = (
    EvenDataParallel(), UnevenDataParallel(), TypeBlind(), MemoryLayers(), Fasop(), Even(), EqualParameters(),
    TorchgpipeBalance(),
)  # fmt: skip
MOST_SIMPLE = 64  # devices up to which the simple plans are made, too: those of 1,024 devices take 13 s
MOST_FASOP = 32  # devices up to which FASOP's grids are tried, which takes 0.3 s for 16 and 7 s for 128


@dataclass(frozen=True)
class Auto:
    """Up to 16 devices the joint search of `_search`: up to 8 the optimum in the plan class of `_space`, on more a plan that is
    proven to be within 1 % of it; or, after the time limit, a plan and a proven bound. On more than 16, `_large`: a plan and
    a proven bound from counted devices (back ends that run one process a node stay with the former). The cheapest plan under
    a deadline on more than 16 devices: `_cheapest`, which plans subsets of them.

    Up to 64 devices its plan is never slower than those of the other partitioners (but FASOP's up to 32 devices only): up to 16
    devices theirs are plans to start from, on more they come last, as far as the time goes. Prices and deadlines, which they
    do not heed, leave them out."""

    name: str = "auto"
    time_limit_seconds: float = 10.0

    def __call__(self, problem: Problem) -> Solution:
        """Search replicas, cuts and shares together."""
        require_seats(problem)
        microbatch_sizes(problem)  # says what is missing
        if problem.backend == "torch":
            if problem.progress is not None:
                problem.progress("loading what numba compiled; the first time it compiles for some 10 s")
            ready()
        began = time.monotonic()
        seconds = problem.time_limit_seconds or self.time_limit_seconds
        counted = problem.backend == "torch" and problem.deadline_seconds_per_step is None
        devices = len(problem.cluster.devices)
        if problem.backend == "torch" and not counted and devices > FEW_DEVICES:
            refuse(problem)
            return Cheapest(problem, self, time_limit_seconds=seconds).run()
        if counted and devices > FEW_DEVICES:
            return self._counted(problem, began, seconds)
        return self._searched(problem, began + seconds, counted)

    def _searched(self, problem: Problem, until: float, counted: bool) -> Solution:
        """The exact search; with the counted planner's bound, where its own is far."""
        start: list[Plan] = []
        few = len(problem.cluster.devices) <= COUNTED_DEVICES
        large = None if few or not counted else Large(problem, self.name, time_limit_seconds=(until - time.monotonic()) / 2)
        if large is not None:
            large.find()
            start += [] if large.plan is None else [large.plan]
        below = math.inf if large is None else large.best_step
        start += simple_plans(problem, below, lambda: time.monotonic() > until)
        if not start:
            refuse(problem)
        master = large.master if large is not None else Master(Columns(Stages(Kinds(problem)))) if counted else None
        lists, near = None if master is None else Shortlists(master), 1.0 if few else NEAR
        left = max(0.1, until - time.monotonic())
        found = Search(problem, self.name, time_limit_seconds=left, start=start, shortlists=lists, near=near).run()
        step = _step(problem, found.plan)
        if large is None or large.plan is None or (found.lower_bound_seconds or 0.0) * FAR >= step:
            return found
        large.deadline_at = time.monotonic() + BOUND_SECONDS
        bound = min(large.bound(), step)
        more = bound > (found.lower_bound_seconds or 0.0)
        return replace(found, lower_bound_seconds=bound, proof="search-bound") if more else found

    def _counted(self, problem: Problem, began: float, seconds: float) -> Solution:
        """The plan of the counted planner, or a faster one of the simple ones."""
        until = began + seconds
        try:
            found = Large(problem, self.name, time_limit_seconds=seconds).run()
        except PartitionError:
            refuse(problem)
            plans = list(simple_plans(problem))
            if not plans:
                raise
            found = Solution(plan=plans[-1])
        else:
            if len(problem.cluster.devices) <= MOST_SIMPLE:
                for plan in simple_plans(problem, _step(problem, found.plan), lambda: time.monotonic() > until):
                    found = replace(found, plan=plan)
        return replace(found, plan=found.plan.model_copy(update={"partitioner": self.name}))


def _step(problem: Problem, plan: Plan) -> float:
    return simulate(plan, problem.profile, problem.cluster).step_seconds


def simple_plans(problem: Problem, below: float = math.inf, late: Callable[[], bool] = never) -> Iterator[Plan]:
    """The best plans of other partitioners, each with a step below that of the one before, the first `below` this; when it is
    `late`, no more once there is one."""
    if problem.max_price_per_hour is not None or problem.deadline_seconds_per_step is not None:
        return
    desk = Desk(problem, late)
    for rule in SIMPLE:
        try:
            found = desk.quickest(rule.candidates(desk), below)
        except (PartitionError, InputError):  # it has none; the search says what is missing
            continue
        if found is not None:
            below = found[0]
            yield found[1].plan(problem)


partitioner = Auto()
