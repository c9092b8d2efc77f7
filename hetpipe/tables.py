"""Tables of what was measured: a profile, a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from hetpipe.cluster import Cluster
from hetpipe.plan import Plan
from hetpipe.profiles import Profile
from hetpipe.report import human_bytes, human_seconds, utilisation_table
from hetpipe.timeline import Timeline

if TYPE_CHECKING:
    from hetpipe.runlog import TrainResult


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


def train_table(result: TrainResult) -> RenderableType:
    """What a run came to: loss, throughput, predicted against measured, and where the time went on each device."""
    table = Table(title="training", show_header=False)
    summary = result.summary()
    rows = [("steps", f"{summary['steps']}{'' if result.losses else ' (the run was finished: none was left to do)'}")]
    if result.losses:
        rows.append(("loss", f"{result.losses[0]:.4f} → {result.losses[-1]:.4f}"))
    elif result.loss_before is not None:
        rows.append(("loss", f"{result.loss_before:.4f}"))
    if result.step_seconds:
        rows += [
            ("measured step (median)", human_seconds(result.median_step_seconds)),
            ("samples per second", f"{result.samples_per_second:.2f}"),
        ]
        if result.predicted is not None:
            difference = result.median_step_seconds / result.predicted.step_seconds - 1
            rows.append(
                (
                    "predicted step",
                    f"{human_seconds(result.predicted.step_seconds)} (measured {difference:+.1%})",
                )
            )
    if result.evaluation is not None:
        some = f" of {result.test_samples}" if result.evaluated_samples < result.test_samples else ""
        more = "; train.evaluate_samples=all takes all" if some else ""
        rows.append(("test loss", f"{result.evaluation.loss:.4f} ({result.evaluated_samples}{some} samples{more})"))
        if result.evaluation.metric is not None:
            rows.append(("test accuracy", f"{result.evaluation.metric:.2%}"))
    if result.overrun_fraction > 0.01:
        over = f"emulated devices overran by {result.overrun_fraction:.1%} of the time"
        rows.append(("not valid", f"{over}: timings are wrong; use greater slowdowns"))
    for name, value in rows:
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if result.measured is not None:
        parts.append(utilisation_table(result.predicted, result.measured))
    if result.peak_bytes:
        parts.append(memory_table(result))
    return Group(*parts)


def memory_table(result: TrainResult) -> Table:
    """Greatest bytes on each device: as measured, and as the plan predicted."""
    table = Table(title="peak memory")
    table.add_column("device")
    table.add_column("measured", justify="right")
    table.add_column("predicted", justify="right")
    predicted = result.predicted.peak_bytes if result.predicted is not None else {}
    for device, size in sorted(result.peak_bytes.items()):
        table.add_row(device, human_bytes(size), human_bytes(predicted[device]) if device in predicted else "")
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
