"""What the simple rules share: of some plans by hand, the fastest that fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import isqrt
from typing import ClassVar

from hetpipe.files.messages import InputError
from hetpipe.partitioners.memory_fit.shortage import nothing_fits
from hetpipe.partitioners.stage_kinds.plan_class import microbatch_sizes
from hetpipe.partitioners.step_times.desk import Candidate, Desk
from hetpipe.planning.partition import PartitionError, Problem, Solution


class SimpleRule(ABC):
    """A partitioner that makes a few drafts by hand, and takes the fastest that fits. `equal`: it treats all devices alike.
    `by_memory`: which drafts there are depends on memory."""

    name: ClassVar[str]
    equal: ClassVar[bool] = False
    by_memory: ClassVar[bool] = False

    @abstractmethod
    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """All drafts that this rule tries; PartitionError or InputError where it has none."""

    def __call__(self, problem: Problem) -> Solution:
        """The plan that fits and simulates fastest; PartitionError, with the least shortage, if none fits. InputError for a batch
        below what was measured."""
        refuse_prices(problem, self.name)
        microbatch_sizes(problem)  # says what is missing
        desk = Desk(problem)
        candidates = list(self.candidates(desk))
        if not candidates:
            raise PartitionError(
                f"{self.name}: no arrangement of all {len(problem.cluster.devices)} devices in equal replicas suits "
                f"{len(problem.profile.layers)} layers, a global batch of {problem.global_batch} and the back end "
                f"{problem.backend!r}; use 'auto'"
            )
        found = desk.quickest(candidates)
        if found is None:
            raise nothing_fits(desk, candidates, self, by_memory=self.by_memory)
        return Solution(plan=found[1].plan(problem))


def refuse_prices(problem: Problem, name: str) -> None:
    """Baselines do not trade time for price."""
    for option in ("max_price_per_hour", "deadline_seconds_per_step"):
        if getattr(problem, option) is not None:
            raise InputError(
                f"the partitioner {name!r} knows no prices and cannot honour --{option.replace('_', '-')}; "
                "use 'auto', 'chain' or 'exhaustive'"
            )


def common_sizes(problem: Problem, largest: int) -> list[int]:
    """Micro-batch sizes measured on every type of the cluster, at most `largest`."""
    kinds = {device.type for device in problem.cluster.devices}
    sizes = set.intersection(*(set(problem.profile.measurement(kind).microbatch_sizes) for kind in kinds))
    found = sorted(b for b in sizes if b <= largest)
    if not found:
        raise PartitionError(
            f"no micro-batch size of at most {largest} was measured on all of {', '.join(sorted(kinds))}; "
            f"the sizes that all have: {sorted(sizes)}. Measure smaller ones, or use a larger global batch"
        )
    return found


def divisors(number: int) -> list[int]:
    """All divisors of a number, the least first."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def equal_parts(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole parts that differ by one at most, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def recompute_choices(problem: Problem) -> Sequence[bool]:
    """Without recompute first, so that it is used only where it must be."""
    return (False, True) if problem.allow_recompute else (False,)
