"""The floor under `auto`: the best plan of each of the simple rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.partitioners.step_times.desk import Desk, Rule
from hetpipe.planning import registry
from hetpipe.planning.partition import PartitionError, Problem, never
from hetpipe.predict.simulator import simulate

FIRST = "even-pipelines"


def rules() -> list[Rule]:
    """All simple rules: first the one that is best on most problems, so that its plan is there where there is no time for more,
    and most plans of the others are ruled out by what they take at least; then those others by name."""
    return sorted(registry.rules(), key=lambda rule: rule.name != FIRST)


def simple_plans(problem: Problem, below: float = math.inf, late: Callable[[], bool] = never) -> Iterator[Plan]:
    """The best plans of other partitioners, each with a step below that of the one before, the first `below` this; when it is
    `late`, no more once there is one. They do not heed prices and deadlines: where there is such a limit, the best plan of each
    that keeps it."""
    limited = problem.max_price_per_hour is not None or problem.deadline_seconds_per_step is not None
    told = problem.progress or (lambda _: None)
    desk = Desk(problem, late, lambda text: told(f"trying the simple rules: {text}"))
    for rule in rules():
        desk.say(rule.name)
        desk.below = math.inf if limited else below
        try:
            found = desk.quickest(rule.candidates(desk), desk.below)
        except (PartitionError, InputError):  # it has none; the search says what is missing
            continue
        if found is None:
            continue
        step, plan = found[0], found[1].plan(problem)
        if not limited:
            below = step
            yield plan
        elif cost(problem, plan, step) < below:
            yield plan
        if late():
            return


def cost(problem: Problem, plan: Plan, step: float | None = None) -> float:
    """What is minimised: the step, or under a deadline its price (per hour × seconds); infinite where the plan breaks a limit."""
    step = simulate(plan, problem.profile, problem.cluster).step_seconds if step is None else step
    price = sum(problem.cluster.type_of(device).price_per_hour for device in plan.device_ids)
    if (problem.max_price_per_hour is not None and price > problem.max_price_per_hour) or step > problem.latest_step:
        return math.inf
    return step if problem.deadline_seconds_per_step is None else price * step
