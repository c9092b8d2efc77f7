"""`even`: one pipeline over all devices in the order of the cluster file, the same number of layers on
each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetpipe.partition import PartitionError, Problem, Solution
from hetpipe.partitioners._baseline import (
    common_sizes,
    equal_layers,
    fastest,
    in_microbatches,
    recompute_choices,
    refuse_prices,
)
from hetpipe.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.schedule import ScheduleName


@dataclass(frozen=True)
class Even:
    """What pipelines for equal devices do (1F1B; gpipe where the problem asks for it). Layers that cannot be
    divided evenly go to the first stages; with more devices than layers the last ones stay unused. The
    micro-batch size, and recompute on all stages or none, are those that simulate fastest."""

    name: str = "even"

    def __call__(self, problem: Problem) -> Solution:
        """The best equal pipeline that fits."""
        refuse_prices(problem, self.name)
        return fastest(problem, self.plans(problem), self.name)

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """All that are tried."""
        if problem.backend != "torch" and len(problem.cluster.nodes) > 1:
            raise PartitionError(
                f"{self.name}: one pipeline over all devices spans {len(problem.cluster.nodes)} nodes, but the back end "
                f"{problem.backend!r} runs a pipeline within one node; use 'auto' or the back end 'torch'"
            )
        layers = len(problem.profile.layers)
        ids = [device.id for device in problem.cluster.devices][:layers]
        schedule: ScheduleName = (
            "gpipe" if problem.schedule == "gpipe" or problem.backend != "torch" else "1f1b"
        )
        for b in common_sizes(problem, problem.global_batch):
            for recompute in recompute_choices(problem):
                stages = tuple(
                    StagePlan(layers=part, devices=(device,), recompute=recompute)
                    for part, device in zip(equal_layers(layers, len(ids)), ids, strict=True)
                )
                replica = ReplicaPlan(
                    microbatch_sizes=in_microbatches(problem.global_batch, b), stages=stages
                )
                yield Plan(
                    model=problem.profile.model,
                    global_batch=problem.global_batch,
                    schedule=schedule,
                    partitioner=self.name,
                    replicas=(replica,),
                )


partitioner = Even()
