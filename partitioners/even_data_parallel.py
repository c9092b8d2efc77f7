"""`even-data-parallel`: the whole model on every device, and the same share of the batch:
DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners._baseline import (
    common_sizes,
    equal_parts,
    fastest,
    in_microbatches,
    recompute_choices,
    refuse_prices,
)
from hetpipe.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.schedule import ScheduleName


@dataclass(frozen=True)
class EvenDataParallel:
    """Equal shares (they differ by one sample where the batch does not divide). The model must fit the
    smallest device. The micro-batch size, and recompute everywhere or nowhere, are those that simulate
    fastest."""

    name: str = "even-data-parallel"

    def __call__(self, problem: Problem) -> Solution:
        """The best equal data-parallel plan that fits."""
        refuse_prices(problem, self.name)
        return fastest(problem, self.plans(problem), self.name)

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """All that are tried."""
        ids = [device.id for device in problem.cluster.devices]
        if problem.global_batch < len(ids):
            raise PartitionError(
                f"{self.name}: a global batch of {problem.global_batch} leaves some of {len(ids)} devices idle"
            )
        shares = equal_parts(problem.global_batch, len(ids))
        layers = (0, len(problem.profile.layers))
        schedule: ScheduleName = (
            "gpipe" if problem.schedule == "gpipe" or problem.backend != "torch" else "1f1b"
        )
        for b in common_sizes(problem, shares[-1]):
            for recompute in recompute_choices(problem):
                replicas = tuple(
                    ReplicaPlan(
                        microbatch_sizes=in_microbatches(share, b),
                        stages=(StagePlan(layers=layers, devices=(device,), recompute=recompute),),
                    )
                    for share, device in zip(shares, ids, strict=True)
                )
                yield Plan(
                    model=problem.profile.model,
                    global_batch=problem.global_batch,
                    schedule=schedule,
                    partitioner=self.name,
                    replicas=replicas,
                )


partitioner = EvenDataParallel()
