"""The least price of a step within a deadline, on more devices than can be searched exactly: the fastest plans of subsets.

The price of a plan is that of the devices it uses, so the cheapest plan within the deadline is the fastest plan of some subset
of them. Devices of one type in nodes that are alike are counted, so subsets are counts. A subset costs at least (its price per
hour) × (its fluid bound), and is no use if that bound is over the deadline or that price not below the plan in hand.

1. Plan the whole cluster: if even that is too slow, so is every subset (as far as its search goes).
2. Plan the subset that is expected to be cheapest, next that of the rest, until none could be cheaper, the price is near the
   least possible, or so many are planned (`PLANS`; `IN_VAIN`, while none is in time). A subset's step is expected at its fluid
   bound times the ratio that the plans so far have had to theirs; of those that promise about the same, small and large ones
   take turns.

Which plans there are is up to the planner of the subsets, so the plan need not be the cheapest of all; what no plan at all can
cost less than is `hetpipe.planning.bounds.fluid_price`, which comes with every plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from typing import NamedTuple

from hetpipe.documents.cluster import Node
from hetpipe.documents.clusters.catalogue import alike_nodes
from hetpipe.documents.plan import Plan
from hetpipe.partitioners.search.floor import cost
from hetpipe.partitioners.stage_kinds.limit import Limit
from hetpipe.planning.bounds import fluid_bound, fluid_price
from hetpipe.planning.partition import PartitionError, Problem, Solution, no_plan_in_time
from hetpipe.predict.simulator import simulate

SUBSETS = 600  # bounded at most
PLANS, IN_VAIN = 8, 4  # subsets planned at most; while none is in time
EACH_SECONDS = 5.0  # for one of them, where there is a time limit
GOOD_PRICE = 1.005  # a price this near to the least that any plan can have is good enough
GroupCounts = tuple[int, ...]


class Subset(NamedTuple):
    """So many devices of each group of nodes."""

    counts: GroupCounts
    problem: Problem
    price: float
    bound: float


class Cheapest:
    """One search; `run` gives the Solution. `planner` finds the fastest plan of a subset. It starts from the plans `start`, which
    must keep the limits of the problem."""

    def __init__(self, problem: Problem, planner: Callable[[Problem], Solution], start: Sequence[Plan] = ()) -> None:
        assert problem.deadline_seconds_per_step is not None
        self.problem, self.planner, self.deadline = problem, planner, problem.deadline_seconds_per_step
        self.limit = Limit.of(problem)
        self.groups = alike_nodes(problem.cluster)
        self.best = min(((cost(problem, plan), plan) for plan in start), key=lambda found: found[0], default=None)
        self.fastest, self.planned = math.inf, 0
        self.ratios: list[float] = []

    def run(self) -> Solution:
        """The cheapest plan in time that was found."""
        whole = self.subset(tuple(sum(sum(node.devices.values()) for node in group) for group in self.groups))
        if whole.bound > self.problem.latest_step:
            raise PartitionError(
                f"no plan has a step of at most {self.deadline} s: on all devices it takes at least {whole.bound:.4g} s"
            )
        if self.affordable(whole):
            self.plan(whole)
        least = fluid_price(self.problem, self.deadline)
        every = [self.subset(counts) for counts in self.counts()]
        left = [subset for subset in every if subset.bound <= self.problem.latest_step and self.affordable(subset)]
        left = spread(sorted(left, key=lambda s: (s.price, s.counts)))
        while left and self.more() and (self.best is None or self.best[0] > least * GOOD_PRICE):
            subset = min(left, key=self.expected)
            left = [other for other in left if other is not subset and self.cheaper(other)]
            self.plan(subset)
        if self.best is None:
            raise self.nothing(whole)
        return Solution(plan=self.best[1])

    def affordable(self, subset: Subset) -> bool:
        """Whether all of its devices are within the price limit."""
        most = self.problem.max_price_per_hour
        return most is None or subset.price <= most * (1 + 1e-12)

    def cheaper(self, subset: Subset) -> bool:
        """Whether its bounds leave it a chance."""
        return self.best is None or subset.price * subset.bound < self.best[0] * (1 - 1e-9)

    def counts(self) -> Iterator[GroupCounts]:
        """Subsets: every count of each group where they are few, else fewer and fewer of them. Very many groups are taken one
        after the other where they have the same types."""
        together = dict[object, list[int]]()
        for i, group in enumerate(self.groups):
            many = 2 ** len(self.groups) > SUBSETS
            together.setdefault(tuple(sorted(group[0].devices)) if many else i, []).append(i)
        steps = [list(self.filled(some)) for some in together.values()]
        while math.prod(map(len, steps)) > SUBSETS and max(map(len, steps)) > 2:
            longest = max(range(len(steps)), key=lambda i: len(steps[i]))
            steps[longest] = [steps[longest][0], *steps[longest][2:-1:2], steps[longest][-1]]
        places = [i for some in together.values() for i in some]
        for chosen in islice(product(*steps), 1, SUBSETS + 1):  # but for none of any
            count = dict(zip(places, chain.from_iterable(chosen), strict=True))
            yield tuple(count[i] for i in range(len(places)))

    def filled(self, some: list[int]) -> Iterator[GroupCounts]:
        """How many devices of each of some groups: none, more and more of the first, all of that and of the next, up to all."""
        sizes = [self.sizes(self.groups[i]) for i in some]
        yield (0,) * len(some)
        for i, own in enumerate(sizes):
            full, none = tuple(size[-1] for size in sizes[:i]), (0,) * (len(some) - i - 1)
            yield from ((*full, count, *none) for count in own[1:])

    def sizes(self, group: list[Node]) -> list[int]:
        """How many devices may be taken: any number from nodes of one type, else those of whole nodes."""
        in_node = sum(group[0].devices.values())
        step = 1 if len(group[0].devices) == 1 else in_node
        return list(range(0, in_node * len(group) + 1, step))

    def subset(self, counts: GroupCounts) -> Subset:
        """The cluster of the first so many devices of each group, and its bounds."""
        cluster = self.problem.cluster
        nodes: dict[str, Node] = {}
        for group, count in zip(self.groups, counts, strict=True):
            in_node = sum(group[0].devices.values())
            for i, node in enumerate(group[: -(-count // in_node)]):
                kept = min(in_node, count - i * in_node)
                devices = dict(node.devices) if kept == in_node else {next(iter(node.devices)): kept}
                nodes[node.name] = node.model_copy(update={"devices": devices})
        found = replace(
            self.problem,
            cluster=cluster.with_nodes(nodes[node.name] for node in cluster.nodes if node.name in nodes),
            deadline_seconds_per_step=None,
            max_price_per_hour=None,
            progress=None,
        )
        price = sum(found.cluster.device_types[d.type].price_per_hour for d in found.cluster.devices)
        return Subset(counts, found, price, fluid_bound(found))

    def expected(self, subset: Subset) -> tuple[bool, float]:
        """First those expected in time, then by price to about a percent."""
        ratio = sorted(self.ratios)[len(self.ratios) // 2] if self.ratios else 1.1
        step = subset.bound * ratio
        return step > self.problem.latest_step, round(math.log(max(subset.price * step, 1e-300)), 2)

    def plan(self, subset: Subset) -> None:
        """Plan a subset, and keep its plan if it is in time and cheaper than the one in hand."""
        seconds = None if math.isinf(self.limit.seconds) else max(0.1, min(EACH_SECONDS, self.limit.left()))
        self.planned += 1
        self.say(subset)
        try:
            plan = self.planner(replace(subset.problem, time_limit_seconds=seconds)).plan
        except PartitionError as error:
            if subset.problem.cluster.devices == self.problem.cluster.devices and not error.out_of_time:
                raise  # not even all of them have room
            return
        cluster = self.problem.cluster
        step = simulate(plan, self.problem.profile, subset.problem.cluster).step_seconds
        self.ratios.append(step / max(subset.bound, 1e-300))
        self.fastest = min(self.fastest, step)
        price = sum(cluster.type_of(device).price_per_hour for device in plan.device_ids)
        if step <= self.problem.latest_step and (self.best is None or price * step < self.best[0]):
            self.best = price * step, plan

    def more(self) -> bool:
        """Whether another subset may be planned."""
        return self.planned < (IN_VAIN if self.best is None else PLANS) and not self.limit.late()

    def nothing(self, whole: Subset) -> PartitionError:
        """The error where no plan was found in time."""
        if not math.isfinite(self.fastest) and (math.isfinite(self.limit.seconds) or self.limit.late()):
            return no_plan_in_time(self.problem)
        fastest = f"the fastest found takes {self.fastest:.4g} s, and " if math.isfinite(self.fastest) else ""
        return PartitionError(
            f"no plan with a step of at most {self.deadline} s was found; {fastest}none can take less than {whole.bound:.4g} s. "
            "Raise --deadline-seconds-per-step, or plan without it to see the fastest plan"
        )

    def say(self, subset: Subset) -> None:
        """Report progress."""
        if self.problem.progress is not None:
            best = "none in time yet" if self.best is None else f"best {self.best[0] / 3600:.4g} a step"
            self.problem.progress(f"{sum(subset.counts)} devices; {best}")


def spread(subsets: list[Subset]) -> list[Subset]:
    """These subsets in an order whose every beginning is spread over the whole: by the bits of their places, reversed."""
    bits = max(1, len(subsets) - 1).bit_length()
    order = sorted(range(len(subsets)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [subsets[i] for i in order]
