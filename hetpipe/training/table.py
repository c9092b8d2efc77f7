"""The result of a training run as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.show.report import utilisation_table
from hetpipe.training.runlog import TrainResult


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
            (f"measured step ({'mean' if result.steps_differ else 'median'})", human_seconds(result.usual_step_seconds)),
            ("samples per second", f"{result.samples_per_second:.2f}"),
        ]
        if result.predicted is not None:
            difference = result.usual_step_seconds / result.predicted.step_seconds - 1
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
