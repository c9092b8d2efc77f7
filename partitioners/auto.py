"""`auto`: unlike replicas, each with its own devices, cuts, depths and share, over two to thousands of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from hetpipe.formats import InputError
from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners._cheapest import Cheapest
from hetpipe.partitioners._large import Large
from hetpipe.partitioners._obstacle import refuse
from hetpipe.partitioners._search import Search
from hetpipe.partitioners._space import microbatch_sizes, require_seats
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
STARTED_SECONDS = 5.0  # with less time for more devices, the counted planner has a plan sooner than the simple ones
COUNTED_DEVICES = 8  # above, the counted planner makes a plan to start from
SIMPLE: tuple[Callable[[Problem], Solution], ...] = (
    UnevenDataParallel(), MemoryLayers(), TypeBlind(), Even(), EqualParameters(), TorchgpipeBalance(), EvenDataParallel(),
)  # fmt: skip
MOST_SIMPLE = 64  # devices up to which the simple plans are made first: those of 1,024 devices take 13 s
MOST_FASOP = 32  # devices up to which FASOP's grids are tried, which takes 0.3 s for 16 and 7 s for 128


@dataclass(frozen=True)
class Auto:
    """Up to 16 devices the joint search of `_search`: optimal in the plan class of `_space`, or with a proven bound
    after the time limit. Above, `_large`: a plan and a proven bound from counted devices (back ends that run one
    process a node stay with the former). The cheapest plan under a deadline on more than 16 devices: `_cheapest`, which
    plans subsets of them.

    Up to 64 devices it starts from the plans of the other partitioners (but FASOP's up to 32 devices only), so that it is
    never slower than they are, and has a plan before it begins; with less than 5 s for more than 16 devices they come last,
    as far as the time goes. Prices and deadlines, which they do not heed, leave them out."""

    name: str = "auto"
    time_limit_seconds: float = 10.0

    def __call__(self, problem: Problem) -> Solution:
        """Search replicas, cuts and shares together."""
        began = time.monotonic()
        require_seats(problem)
        microbatch_sizes(problem)  # says what is missing
        refuse(problem)
        seconds = problem.time_limit_seconds or self.time_limit_seconds
        counted = problem.backend == "torch" and problem.deadline_seconds_per_step is None
        devices = len(problem.cluster.devices)
        if problem.backend == "torch" and not counted and devices > FEW_DEVICES:
            return Cheapest(problem, self, time_limit_seconds=seconds).run()
        simple = devices <= FEW_DEVICES or (devices <= MOST_SIMPLE and seconds >= STARTED_SECONDS)
        start = list(simple_plans(problem)) if simple else []
        first = None
        if counted and devices > COUNTED_DEVICES:
            part = seconds if devices > FEW_DEVICES else seconds / 2
            later = not simple and devices <= MOST_SIMPLE
            first = self._counted(problem, start, part, began + seconds if later else began)
            if devices > FEW_DEVICES:
                return first
            start.append(first.plan)
        left = max(0.1, seconds - (time.monotonic() - began))
        found = Search(problem, self.name, time_limit_seconds=left, start=start).run()
        return found if first is None else _better_bound(found, first, problem)

    def _counted(self, problem: Problem, start: list[Plan], seconds: float, until: float) -> Solution:
        """The plan of the counted planner, or a faster one of `start`, or of the simple ones where it ended before `until`."""
        try:
            found = Large(problem, self.name, time_limit_seconds=seconds).run()
        except PartitionError:
            start = start or list(simple_plans(problem))
            if not start:
                raise
            found = Solution(plan=start[0])
        if time.monotonic() < until:
            start = [*start, *takewhile(lambda _: time.monotonic() < until, simple_plans(problem))]
        plan = min([found.plan, *start], key=lambda plan: _step(problem, plan))
        named = plan.model_copy(update={"partitioner": self.name})
        return replace(found, plan=named)


def _step(problem: Problem, plan: Plan) -> float:
    return simulate(plan, problem.profile, problem.cluster).step_seconds


def _better_bound(found: Solution, other: Solution, problem: Problem) -> Solution:
    """The plan found, with the larger of two bounds."""
    low, more = found.lower_bound_seconds or 0.0, other.lower_bound_seconds or 0.0
    if more <= low:
        return found
    return replace(found, lower_bound_seconds=min(more, _step(problem, found.plan)), proof=other.proof)


def simple_plans(problem: Problem) -> Iterator[Plan]:
    """Plans of other partitioners."""
    if problem.max_price_per_hour is not None or problem.deadline_seconds_per_step is not None:
        return
    found: list[Callable[[Problem], Solution]] = [*SIMPLE]
    if len(problem.cluster.devices) <= MOST_FASOP:
        found.append(Fasop())
    for simple in found:
        try:
            yield simple(problem).plan
        except (PartitionError, InputError):  # it has none; the search says what is missing
            continue


partitioner = Auto()
