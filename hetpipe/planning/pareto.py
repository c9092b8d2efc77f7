"""The front of price and time over sub-clusters: bounds first, then plans, until each row is planned or ruled out.

1. The fluid bound of every sub-cluster, and from it the least price of a sample.
2. Layers: rows whose bounds no other row's bounds beat, then the same of the rest, and so on. The cheapest row of each
   layer comes first, then the second of each.
3. A row is *dominated* if a plan in hand of another row is at most as slow as this row's least step, and at most as dear as its
   least price: no plan of it could be on the front, so none is searched.
4. Else its sub-cluster is planned, with its share of most of the time; where memory is too short and the precision is "auto",
   again at other precisions (`hetpipe.documents.precisions.turns`). Fewer nodes are part of more: a plan for them serves the
   larger sub-cluster too, and a bound for the larger one holds for the smaller.
5. The rest of the time is for rows whose search was cut short: first those on the front, then others that their bounds allow
   there.

Nodes are rented whole, so a row's price is that of all its nodes, used or not. The price per million samples is what a training
run costs, FASOP's price × time (Hwang et al. 2024). A row on this front is also the fastest of all that cost no
more per hour: one that is faster at no higher price per hour would have beaten it in both."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.catalogue import Catalogue, Choice, Counts, choice_of
from hetpipe.documents.options import LIMITS, PlanOptions
from hetpipe.documents.plan import Plan, Proof
from hetpipe.documents.precisions import turns
from hetpipe.documents.profile import Profile
from hetpipe.files.limits import MOST_SUBCLUSTERS
from hetpipe.files.messages import InputError
from hetpipe.planning import registry
from hetpipe.planning.bounds import fluid_bound
from hetpipe.planning.front import Front, Planned, Row, Status, nodes_text, planned
from hetpipe.planning.partition import PartitionError, Problem
from hetpipe.planning.planner import note_of_precisions
from hetpipe.planning.workers import Planners, Solved

SECONDS = 50.0  # for all together, where no limit is given
EACH_SECONDS, LEAST_SECONDS = 10.0, 0.5  # for the search of one sub-cluster
FIRST = 0.7  # part of the time in which every row is to have a plan
SMALL_GAP = 0.002  # a gap that is not worth another search
Progress = Callable[[int, int, str], None]


@dataclass(eq=False)
class SubCluster:
    """One sub-cluster while the search goes on; `bound` is the least step that is not ruled out. `turn`: how many choices of
    precisions memory was too short for; bounds go from one to another where both are at the fastest."""

    counts: Counts
    problem: Problem
    price: float
    bound: float
    done: bool = False
    proof: Proof = "fluid"
    status: Status = "unknown"
    reason: str | None = None
    missing_bytes: int | None = None
    needed_bytes: int | None = None
    plan: Plan | None = None
    cut_short: bool = False
    turn: int = 0

    @property
    def step(self) -> float:
        """The step of its plan; infinite without one."""
        return self.plan.predicted.step_seconds if self.plan and self.plan.predicted else math.inf

    def close(self, status: Status, reason: str | None = None) -> None:
        """Nothing more will be searched here."""
        self.done, self.status, self.reason = True, status, reason

    def raise_bound(self, bound: float, proof: Proof) -> None:
        """Take over another lower bound on the sub-cluster's step, if it is higher."""
        if bound > self.bound:
            self.bound, self.proof = bound, proof

    def within(self, other: SubCluster) -> bool:
        """Whether each plan of this sub-cluster is one of the other: its nodes are part of the other's, and what the framework
        takes of a device's memory, which may depend on the nodes (`clusters.assumed`), is the same."""
        own, its = self.problem, other.problem
        alike = (own.cluster.runtime_overhead, own.memory_reserve) == (its.cluster.runtime_overhead, its.memory_reserve)
        return alike and all(a <= b for a, b in zip(self.counts, other.counts, strict=True))


class FrontWithPlans(NamedTuple):
    """The front, and of each of its rows the plan and the cluster that it is for (fastest first, as `front.front`)."""

    front: Front
    plans: tuple[tuple[Plan, Cluster], ...]


def make_front(
    profile: Profile,
    source: Catalogue | Cluster,
    global_batch: int,
    options: PlanOptions = PlanOptions(),  # noqa: B008
    *,
    workers: int = 1,
    progress: Progress | None = None,
    **changes: Any,
) -> FrontWithPlans:
    """The Pareto front over all sub-clusters of a catalogue, or of a cluster taken as one. A price per hour or a
    deadline leaves out the rows that are over it. `time_limit_seconds` is for all together (50, or half a second for each if
    they are many); so many `workers` plan at a time, each in a process of its own if they are more than one. `changes`: see
    `make_plan`. InputError if an argument is wrong; rows without a plan say why."""
    options = options.changed(changes)
    name = registry.partitioner(options.partitioner).name
    if isinstance(source, Cluster):
        source = profile.joined(source)
    choice = choice_of(source)
    if choice.size > MOST_SUBCLUSTERS:
        raise InputError(
            f"the catalogue has {choice.size} sub-clusters, more than {MOST_SUBCLUSTERS}. Give it narrower ranges of nodes"
        )
    if all(kind.price_per_hour == 0 for kind in choice.whole().device_types.values()):
        raise InputError("the front weighs price against time, but no device type has a price_per_hour")
    search = FrontSearch(profile, choice, global_batch, options, progress)
    with Planners(options.partitioner, max(1, min(workers, choice.size))) as planners:
        search.run(planners)
    front = Front.of(
        [search.row(item) for item in search.items],
        model=profile.model,
        global_batch=global_batch,
        partitioner=name,
        max_price_per_hour=options.max_price_per_hour,
        deadline_seconds_per_step=options.deadline_seconds_per_step,
    )
    items = {tuple(search.nodes(item).items()): item for item in search.items}
    best = [items[tuple(row.nodes.items())] for row in front.front]
    return FrontWithPlans(front, tuple((item.plan, item.problem.cluster) for item in best if item.plan is not None))


class FrontSearch:
    """One search over all sub-clusters; `run` closes every item."""

    def __init__(
        self, profile: Profile, choice: Choice, global_batch: int, options: PlanOptions, progress: Progress | None
    ) -> None:
        self.profile, self.choice, self.options, self.progress = profile, choice, options, progress
        self.each = options.model_copy(update=dict.fromkeys(LIMITS))  # what limits the front does not limit each row's plan
        whole = choice.whole()
        self.fastest = turns(options.precision, profile, whole)[0]
        self.whole = Problem.of(profile.at(self.fastest), whole, global_batch, self.each)
        if self.each.allow_offload:  # wherever a row's devices can
            self.each = self.each.model_copy(update={"allow_offload": None})
        seconds = options.time_limit_seconds or max(SECONDS, LEAST_SECONDS * choice.size)
        self.ends_at = time.monotonic() + seconds
        self.items: list[SubCluster] = []

    def run(self, planners: Planners) -> None:
        """Bound all, then plan in order what is not ruled out by then."""
        bounds: dict[tuple[tuple[str, int], ...], float] = {}
        for counts in self.choice.counts():
            self.items.append(self.item(counts, bounds))
        self.sweep(planners, self.order(), time.monotonic() + FIRST * (self.ends_at - time.monotonic()))
        self.sweep(planners, self.improvable(self.front()), self.ends_at)
        self.sweep(planners, self.improvable(self.items), self.ends_at)
        self.share()

    def sweep(self, planners: Planners, queue: Sequence[SubCluster], until: float) -> None:
        """Settle these in order, each with its share of the time until then."""
        left, running = deque(queue), dict[Future[Solved], tuple[SubCluster, float]]()
        while left or running:
            while left and len(running) < planners.count:
                seconds = (until - time.monotonic()) * planners.count / (len(left) + len(running))
                item = left.popleft()
                if not self.ruled_out(item):
                    self.tell(item)
                    seconds = max(LEAST_SECONDS, min(EACH_SECONDS, seconds))
                    future = planners.submit(replace(item.problem, time_limit_seconds=seconds))
                    running[future] = item, seconds
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                item, seconds = running.pop(future)
                if self.settle(item, seconds, future):
                    left.appendleft(item)

    def improvable(self, items: Sequence[SubCluster]) -> list[SubCluster]:
        """The items whose search was cut short and that could be on the front with a better plan, the largest gap first."""
        found = [i for i in items if i.cut_short and i.step > i.bound * (1 + SMALL_GAP) and self.winner(i) is None]
        for item in found:
            item.done = False
        return sorted(found, key=lambda item: -item.step / item.bound)

    def winner(self, item: SubCluster) -> SubCluster | None:
        """Another row with a plan that no plan of this one can beat, as far as its bound goes."""
        for other in self.items:
            if other is not item and other.step <= item.bound and other.price * other.step <= item.price * item.bound:
                return other
        return None

    def front(self) -> list[SubCluster]:
        """Planned items that no other one beats, fastest first."""
        found: list[SubCluster] = []
        for item in sorted((i for i in self.items if i.plan), key=lambda i: (i.step, i.price)):
            if not found or item.price * item.step < found[-1].price * found[-1].step:
                found.append(item)
        return found

    def item(self, counts: Counts, bounds: dict[tuple[tuple[str, int], ...], float]) -> SubCluster:
        """A sub-cluster with its fluid bound (the same for the same devices); closed if that is over a limit."""
        problem = Problem.of(self.whole.profile, self.choice.cluster(counts), self.whole.global_batch, self.each)
        cluster = problem.cluster
        key = tuple(sorted(devices_of(cluster).items()))
        if key not in bounds:
            bounds[key] = fluid_bound(problem)
        price = sum(cluster.device_types[device.type].price_per_hour for device in cluster.devices)
        found = SubCluster(counts, problem, price, bounds[key])
        most, deadline = self.options.max_price_per_hour, self.options.deadline_seconds_per_step
        if most is not None and price > most * (1 + 1e-12):
            found.close("excluded", f"its price of {price:g} per hour is over the limit of {most:g}")
        elif deadline is not None and found.bound > deadline:
            found.close("excluded", f"its step takes at least {found.bound:.4g} s, the deadline is {deadline:g} s")
        return found

    def order(self) -> list[SubCluster]:
        """Open items, in layers: those that no other beats in both bounds, then the same of the rest, and so on. The cheapest of
        each layer come first, then the second of each, so that plans are spread over the front however early the time ends."""
        left = sorted((i for i in self.items if not i.done), key=lambda i: (i.bound, i.price))
        layers = []
        while left:
            layer = [left[0]]
            for item in left[1:]:
                if item.price * item.bound < layer[-1].price * layer[-1].bound * (1 - 1e-12):
                    layer.append(item)
            layers.append(layer[::-1])
            left = [item for item in left if item not in layer]
        return [item for items in zip_longest(*layers) for item in items if item is not None]

    def ruled_out(self, item: SubCluster) -> bool:
        """Closed without a search: beaten by a plan in hand, or out of time."""
        for other in self.items:
            if item.within(other) and item.turn == other.turn == 0:
                item.raise_bound(other.bound, "search-bound")
        winner, late = self.winner(item), time.monotonic() >= self.ends_at
        if item.plan is not None:
            item.done = late or winner is not None
        elif winner is not None:
            text = f"{self.name(winner)} takes {winner.step:.4g} s and costs no more; not searched further"
            item.close("dominated", text)
        elif late:
            item.close("unknown", "the time limit ended the search before this sub-cluster was planned")
        return item.done

    def settle(self, item: SubCluster, seconds: float, future: Future[Solved]) -> bool:
        """Planned, or without a plan; or, where it says so, to be searched again."""
        try:
            plan, taken = future.result()
        except PartitionError as error:
            if item.plan is None:
                if error.missing_bytes is not None and self.at_other_precisions(item):
                    return True
                item.missing_bytes, item.needed_bytes = error.missing_bytes, error.needed_bytes
                item.close("unknown" if error.out_of_time else "infeasible", str(error))
            return False
        predicted = plan.predicted
        assert predicted is not None
        if predicted.step_seconds < item.step:
            item.plan = plan
        item.cut_short = taken > 0.9 * seconds
        item.close("planned", note_of_precisions(item.plan or plan, self.profile, item.problem.cluster, self.options))
        item.raise_bound(predicted.lower_bound_seconds or 0.0, predicted.proof or "fluid")
        return False

    def at_other_precisions(self, item: SubCluster) -> bool:
        """Whether memory is too short for an item at its precisions, and "auto" has others for it."""
        choices = turns(self.options.precision, self.profile, item.problem.cluster)
        item.turn += 1
        if item.turn >= len(choices):
            return False
        item.problem = replace(item.problem, profile=self.profile.at({**self.fastest, **choices[item.turn]}))
        item.bound, item.proof = fluid_bound(item.problem), "fluid"
        return True

    def share(self) -> None:
        """Plans of fewer nodes serve more, bounds of more nodes hold for fewer; then the deadline."""
        own = [(item, item.plan, item.step, item.bound, item.problem.profile) for item in self.items]
        for item in self.items:
            for other, plan, step, bound, profile in own:
                if item.status in ("planned", "unknown") and step < item.step * (1 - 1e-9) and other.within(item):
                    item.plan, item.problem = plan, replace(item.problem, profile=profile)
                    item.close("planned", f"the plan of {self.name(other)}, which is part of it")
                if item.within(other) and item.turn == other.turn == 0:
                    item.raise_bound(bound, "search-bound")
        deadline = self.options.deadline_seconds_per_step
        for item in self.items:
            if deadline is not None and item.status == "planned" and item.step > deadline:
                item.close("excluded", f"the step of its plan takes {item.step:.4g} s, the deadline is {deadline:g} s")

    def row(self, item: SubCluster) -> Row:
        """What is known of a sub-cluster in the end."""
        plan: Planned | None = None
        cluster = item.problem.cluster
        if item.plan is not None:
            plan = planned(item.plan, item.problem.profile, cluster, item.price)
            gap = max(0.0, item.step / item.bound - 1) if item.bound > 0 else None
            plan = plan.model_copy(update={"gap": gap, "proof": item.proof})
        return Row(
            nodes=self.nodes(item),
            devices=devices_of(cluster),
            price_per_hour=item.price,
            status=item.status,
            lower_bound_seconds=None if item.status == "infeasible" else min(item.bound, item.step),
            reason=item.reason,
            missing_bytes=item.missing_bytes,
            needed_bytes=item.needed_bytes,
            plan=plan,
        )

    def nodes(self, item: SubCluster) -> dict[str, int]:
        """How many nodes of each template."""
        return dict(zip(self.choice.templates, item.counts, strict=True))

    def name(self, item: SubCluster) -> str:
        """`3 p4d + 1 g5`."""
        return nodes_text(self.nodes(item))

    def tell(self, item: SubCluster) -> None:
        """Report progress: how many are done, the size of the front so far, and what comes next."""
        if self.progress is None:
            return
        done = sum(i.done for i in self.items)
        message = f"{len(self.front())} on the front; next {self.name(item)}: at least {item.bound:.4g} s"
        self.progress(done, len(self.items), message)


def devices_of(cluster: Cluster) -> dict[str, int]:
    """How many devices of each type."""
    return dict(Counter(device.type for device in cluster.devices))
