"""Profile + cluster + global batch → Plan: calls the named partitioner, simulates, attaches the prediction
and its bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Plan, Prediction, Proof
from hetpipe.documents.precisions import turns
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.files.units import in_bytes
from hetpipe.planning import registry
from hetpipe.planning.bounds import fluid_bound, fluid_price
from hetpipe.planning.offload import solve
from hetpipe.planning.partition import PartitionError, Problem, Solution, never
from hetpipe.predict.simulator import simulate

LIMIT_SLACK = 1 + 1e-9  # sums in another order
LEAST_SECONDS = 0.1  # of a search after another


def make_plan(
    profile: Profile,
    cluster: Cluster,
    global_batch: int,
    options: PlanOptions = PlanOptions(),  # noqa: B008
    *,
    progress: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = never,
    **changes: Any,
) -> Plan:
    """The plan of the partitioner that the options name, with its prediction. `changes` are options by their names:
    `make_plan(profile, cluster, 64, partitioner="fasop")`. `progress` is told what the search knows so far; when `stopped`
    says so, it ends, and the best plan so far is the answer. Where the precision is "auto" and memory is too short for a plan at
    the fastest, others that are safe are tried (`turns` of `hetpipe.documents.precisions`); the time limit is for all together.
    InputError if an argument is wrong, PartitionError if no plan fits, none was found in time, or the partitioner's own breaks a
    limit."""
    options = options.changed(changes)
    found = registry.partitioner(options.partitioner)
    prices = (cluster.device_types[device.type].price_per_hour for device in cluster.devices)
    if options.deadline_seconds_per_step is not None and not any(prices):
        raise InputError(
            "deadline_seconds_per_step asks for the cheapest plan, but no device type of the cluster has a price_per_hour"
        )
    began, (*first, last) = time.monotonic(), turns(options.precision, profile, cluster)
    for each in first:
        problem = Problem.of(profile.at(each), cluster, global_batch, _in_time(options, began), progress, stopped)
        try:
            return with_prediction(solve(found, problem), problem)
        except PartitionError as error:
            if error.missing_bytes is None:
                raise
    problem = Problem.of(profile.at(last), cluster, global_batch, _in_time(options, began), progress, stopped)
    return with_prediction(solve(found, problem), problem)


def _in_time(options: PlanOptions, began: float) -> PlanOptions:
    """With what is left of the time limit since then, and never with more than it."""
    limit = options.time_limit_seconds
    left = None if limit is None else min(limit, max(LEAST_SECONDS, limit - (time.monotonic() - began)))
    return options.model_copy(update={"time_limit_seconds": left})


def note_of_precisions(plan: Plan, profile: Profile, cluster: Cluster, options: PlanOptions) -> str | None:
    """What to say of a plan for which "auto" was to choose the precisions, and which is not at the fastest, since none fits at
    these, or at none, since the profile does not say at which it was measured."""
    if options.precision != "auto":
        return None
    fastest, planned = turns("auto", profile, cluster)[0], plan.precision or {}
    if not planned:
        return (
            "the profile does not say at which precision it was measured, so 'auto' chooses none; "
            "'hetpipe profile --precision auto' measures each that the devices have"
        )
    others = [f"{p} on {kind!r} in place of {fastest[kind]}" for kind, p in planned.items() if fastest.get(kind, p) != p]
    if not others:
        return None
    return f"no plan fits at the fastest precisions; this one computes in {' and '.join(others)}, which takes fewer bytes"


def with_prediction(solution: Solution, problem: Problem) -> Plan:
    """The solution's plan with what the simulator says of it. PartitionError if it breaks a limit of the problem: memory, price
    or deadline; InputError if it is not for this cluster and profile.

    `lower_bound_seconds` is the fluid bound, which holds for any system, unless the search proved a larger
    one for its plan class (proof "exhaustive" or "search-bound"); `fluid_bound_seconds` comes with every plan. Under a
    deadline the same holds for the price, whose gap and proof are given."""
    plan, cluster = solution.plan.model_copy(update={"backend": problem.backend}), problem.cluster
    kinds = dict.fromkeys(cluster.device(device).type for device in plan.device_ids)
    precision = {kind: found for kind in kinds for found in problem.profile.precisions(kind) if found is not None}
    plan = plan.model_copy(update={"precision": precision or None})
    timeline = simulate(plan, problem.profile, cluster)
    step = timeline.step_seconds
    price = sum(cluster.type_of(device).price_per_hour for device in plan.device_ids)
    _check_limits(plan, problem, timeline.peak_bytes, price, step)
    fluid = min(fluid_bound(problem), step)  # equal but for rounding when a plan reaches it
    bound, proof = _best_bound(solution.lower_bound_seconds, solution.proof, fluid, step)
    per_million = 1e6 / 3600 / plan.global_batch
    prediction = Prediction(
        step_seconds=step,
        pipeline_seconds=timeline.pipeline_seconds,
        gradient_sync_seconds=timeline.sync_seconds,
        optimizer_seconds=timeline.optimizer_seconds,
        samples_per_second=plan.global_batch / step if step > 0 else math.inf,
        price_per_hour=price,
        price_per_million_samples=per_million * price * step,
        peak_bytes=dict(timeline.peak_bytes),
        host_bytes=dict(timeline.host_bytes) or None,
        lower_bound_seconds=bound,
        fluid_bound_seconds=fluid,
        gap=step / bound - 1 if bound > 0 else None,
        proof=proof,
    )
    if problem.deadline_seconds_per_step is not None:
        cost = price * step
        least = min(fluid_price(problem, problem.deadline_seconds_per_step), cost)
        least, proof = _best_bound(solution.lower_bound_price, solution.proof, least, cost)
        prediction = prediction.model_copy(
            update={
                "lower_bound_price_per_million_samples": per_million * least,
                "gap": cost / least - 1 if least > 0 else None,
                "proof": proof,
            }
        )
    return plan.model_copy(update={"predicted": prediction})


def _best_bound(searched: float | None, proof: Proof | None, fluid: float, reached: float) -> tuple[float, Proof]:
    """The larger of the two bounds, and its name."""
    if searched is not None and proof is not None and searched >= fluid:
        return min(searched, reached), proof
    return fluid, "fluid"


def _check_limits(
    plan: Plan, problem: Problem, peaks: Mapping[str, int], price: float, step: float
) -> None:  # a partitioner may come from anywhere
    most, deadline = problem.max_price_per_hour, problem.deadline_seconds_per_step
    if most is not None and price > most * LIMIT_SLACK:
        raise PartitionError(f"the plan of {plan.partitioner!r} costs {price:.6g} per hour, more than {most:.6g}")
    if deadline is not None and step > deadline * LIMIT_SLACK:
        raise PartitionError(f"the plan of {plan.partitioner!r} takes {step:.6g} s per step, more than {deadline:.6g}")
    for device, peak in peaks.items():
        limit = problem.cluster.type_of(device).memory * (1 - problem.memory_reserve)
        if peak > limit:
            raise PartitionError(
                f"the plan of {plan.partitioner!r} needs {in_bytes(peak)} on {device}, which has {in_bytes(limit)}",
                missing_bytes=math.ceil(peak - limit),
                needed_bytes=peak,
            )
