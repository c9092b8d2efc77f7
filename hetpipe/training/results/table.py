"""The result of a training run as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.show.report import utilisation_table
from hetpipe.training.runlog import TrainResult


def train_table(result: TrainResult, *, devices: bool = False) -> RenderableType:
    """What a run came to: loss, speed and memory, predicted against measured; with `devices`, where the time and the memory of
    each device went."""
    table = Table(title="training", show_header=False)
    summary = result.summary()
    rows = [("steps", f"{summary['steps']}{'' if result.losses else ' (the run was finished: none was left to do)'}")]
    if result.losses:
        rows.append(("loss", f"{result.losses[0]:.4f} → {result.losses[-1]:.4f}"))
    elif result.loss_before is not None:
        rows.append(("loss", f"{result.loss_before:.4f}"))
    if result.step_seconds:
        rows += [*_step_rows(result), ("samples per second", f"{result.samples_per_second:.2f}")]
    rows += [*_memory_row(result), *_evaluation_rows(result)]
    if result.overrun_fraction > 0.01:
        over = f"emulated devices overran by {result.overrun_fraction:.1%} of the time"
        rows.append(("not valid", f"{over}: timings are wrong; use greater slowdowns"))
    for name, value in rows:
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if devices and result.measured is not None:
        parts.append(utilisation_table(result.predicted, result.measured, differ=bool(result.lengths)))
    if devices and result.peak_bytes:
        parts.append(memory_table(result))
    return Group(*parts)


def _memory_row(result: TrainResult) -> Iterator[tuple[str, str]]:
    """The fullest device."""
    if result.peak_bytes:
        device, most = max(result.peak_bytes.items(), key=lambda item: item[1])
        said = result.predicted.peak_bytes.get(device) if result.predicted is not None else None
        beside = f" (predicted {human_bytes(said, beside=most)})" if said else ""
        yield "memory", f"at most {human_bytes(most, beside=said or most)}, on {device}{beside}"


def _evaluation_rows(result: TrainResult) -> Iterator[tuple[str, str]]:
    """The last evaluation, and the best one."""
    if result.evaluations:
        last = result.evaluations[-1]
        some = f" of {last.test_samples}" if last.samples < last.test_samples else ""
        more = "; evaluate.samples=all takes all" if some else ""
        yield "test loss", f"{last.loss:.4f} ({last.samples}{some} samples{more})"
        if last.perplexity is not None:
            yield "test perplexity", f"{last.perplexity:.4g}"
        if last.accuracy is not None:
            yield "test accuracy", f"{last.accuracy:.2%}"
        if last.metric is not None and last.value is not None:
            yield f"test {last.metric}", f"{last.value:.4g}"
    if (best := result.best) is not None:
        yield "best evaluation", f"that of step {best.step}: {best.metric} {best.value:.4g}"


def _step_rows(result: TrainResult) -> Iterator[tuple[str, str]]:
    """A step as measured and as predicted: of the same steps."""
    seconds, predicted = result.usual_step_seconds, result.predicted_step_seconds
    count, kinds = len(result.steady_seconds), len(set(result.steady_numbers))
    of = f"mean of {count}, of {kinds} lengths" if kinds > 1 else f"median of {count}"
    yield "measured step", f"{human_seconds(seconds)} ({of})"
    if predicted is not None:
        same = "of the same lengths, " if kinds > 1 else ""
        yield "predicted step", f"{human_seconds(predicted)} ({same}measured {seconds / predicted - 1:+.1%})"


def memory_table(result: TrainResult) -> Table:
    """Greatest bytes on each device: as measured, as the plan predicted, and by how much the first is off."""
    table = Table(title="peak memory")
    table.add_column("device")
    for column in ("measured", "predicted", "measured is"):
        table.add_column(column, justify="right")
    predicted = result.predicted.peak_bytes if result.predicted is not None else {}
    for device, size in sorted(result.peak_bytes.items()):
        said = predicted.get(device, 0)
        beside = (human_bytes(said, beside=size), f"{size / said - 1:+.1%}") if said else ("", "")
        table.add_row(device, human_bytes(size, beside=said), *beside)
    return table
