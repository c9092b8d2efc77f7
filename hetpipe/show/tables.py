"""Tables of a profile and of a step."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.predict.timeline import Timeline
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile


def profile_table(profile: Profile) -> Table:
    """Per layer: bytes, and forward + backward seconds of one sample on each device type."""
    table = Table(title=f"profile of {profile.model}")
    for name in ("layer", "parameters", "output/sample", "saved/sample"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    first = [m for m in profile.measurements if m.tensor_parallel == 1]
    for m in first:
        table.add_column(f"{m.device_type}: F + B", justify="right")
    for index, layer in enumerate(profile.layers):
        times = [human_seconds(m.forward_seconds[0][index] + m.backward_seconds[0][index]) for m in first]
        tied = f" (tied: {layer.tied})" if layer.tied else ""
        table.add_row(
            f"{layer.name}{tied}",
            human_bytes(layer.parameter_bytes),
            human_bytes(layer.output_bytes_per_sample),
            human_bytes(layer.saved_bytes_per_sample),
            *times,
        )
    table.add_section()
    totals = [human_seconds(sum(m.forward_seconds[0]) + sum(m.backward_seconds[0])) for m in first]
    table.add_row(
        "all",
        human_bytes(sum(layer.parameter_bytes for layer in profile.layers)),
        "",
        human_bytes(sum(layer.saved_bytes_per_sample for layer in profile.layers)),
        *totals,
    )
    return table


def step_table(timeline: Timeline, plan: Plan, cluster: Cluster) -> RenderableType:
    """A predicted step: its seconds and what they are made of, and how busy and how full each device is."""
    parts = {"pipeline": timeline.pipeline_seconds, "gradient sums": timeline.sync_seconds,
             "optimizer": timeline.optimizer_seconds}  # fmt: skip
    inside = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in parts.items())
    facts = Table.grid(padding=(0, 2))
    facts.add_row("step", f"{human_seconds(timeline.step_seconds)} ({inside})")
    if timeline.step_seconds > 0:
        facts.add_row("samples per second", f"{plan.global_batch / timeline.step_seconds:.2f}")
    bubbles = timeline.bubble_fraction()
    facts.add_row("bubble", f"{sum(bubbles.values()) / max(1, len(bubbles)):.1%} of the devices' time, on average")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "device", "busy", "bubble", "peak memory", "of"):
        table.add_column(name, justify="left" if name in ("stage", "device") else "right")
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            for device in stage.devices:
                bubble = bubbles.get(device, 1.0)
                table.add_row(f"r{r} s{s}", f"{device} {cluster.device(device).type}", f"{1 - bubble:.1%}", f"{bubble:.1%}",
                              human_bytes(timeline.peak_bytes[device]), human_bytes(cluster.type_of(device).memory))  # fmt: skip
    return Group(facts, table)
