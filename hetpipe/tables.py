"""Tables of what was measured: a profile, a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from hetpipe.profiles import Profile
from hetpipe.report import human_bytes, human_seconds, utilisation_table

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
        rows.append(("loss", f"{summary['first_loss']:.4f} → {summary['last_loss']:.4f}"))
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
        rows.append(("test loss", f"{result.evaluation.loss:.4f}"))
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
