"""A run as `--watch` shows it while it goes on: every device of the plan, as its rank told of itself last."""

from __future__ import annotations

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.processes import progress
from hetpipe.processes.progress import Seen
from hetpipe.processes.pulse import beats
from hetpipe.processes.whereabouts import Figures, figures_from
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import RunRecord, StepRecord


class Watch(Observer):
    """Lets a rank tell with its signs of life how its devices fare, where somebody watches."""

    every_rank = True

    def began(self, run: RunRecord) -> None:
        """What they hold is known, but not yet how busy they are."""
        self._figures: Figures = {device: (None, peak) for device, peak in run.peak_bytes.items()}
        if progress.watched:
            figures_from(lambda: self._figures)

    def stepped(self, step: StepRecord) -> None:
        """How busy they were, and the most bytes that they held."""
        if step.peak_bytes:
            self._figures = {device: (step.busy.get(device), peak) for device, peak in step.peak_bytes.items()}


def look(plan: Plan, cluster: Cluster) -> list[Seen]:
    """The plan's devices, stage by stage. What ranks do, and how they fared in one of their last steps, comes with their signs of
    life, so nothing is sent for it."""
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
                found.append(
                    Seen(
                        device=f"{device} {kind}".strip(),
                        stage=f"r{r} s{s}",
                        layers=f"{lo}–{hi - 1}" if hi - lo > 1 else f"{lo}",
                        doing=doing.get(device, ""),
                        busy=busy,
                        peak_bytes=peak,
                        memory_bytes=memory or None,
                    )
                )
    return found
