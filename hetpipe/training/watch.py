"""A run as people see it while it goes on: every device of the plan, as its rank told of itself last."""

from __future__ import annotations

from hetpipe.processes.progress import Seen
from hetpipe.processes.pulse import beats
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan


def look(plan: Plan, cluster: Cluster) -> list[Seen]:
    """The plan's devices, stage by stage. What ranks do and how they fare comes with their signs of life, so it is a second old
    at most, and nothing is sent for it."""
    told = list(beats().values())
    figures = {device: values for beat in told for device, values in beat.figures.items()}
    doing = {device: beat.doing for beat in told for device in beat.figures}
    found = []
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            lo, hi = stage.layers
            for device in stage.devices:
                busy, peak = figures.get(device, (None, None))
                kind = cluster.device(device).type if cluster.device_types else ""
                memory = cluster.type_of(device).memory if kind else None
                found.append(Seen(
                    device=f"{device} {kind}".strip(), stage=f"r{r} s{s}", layers=f"{lo}–{hi - 1}" if hi - lo > 1 else f"{lo}",
                    doing=doing.get(device, ""), busy=busy, peak_bytes=peak, memory_bytes=memory or None,
                ))  # fmt: skip
    return found
