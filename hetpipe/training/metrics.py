"""Fills the result of a run while it goes on (times, timeline, peaks), and says when there is a line for its log."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetpipe.files.units import human_seconds
from hetpipe.files.writing import append_line
from hetpipe.measuring.layer_run import DIFFERENT
from hetpipe.predict.timeline import Span, Timeline
from hetpipe.processes import progress
from hetpipe.processes.progress import duration, say, warn
from hetpipe.processes.whereabouts import Figures, figures_from
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.spec.job import METRICS_FILE, LogSection
from hetpipe.training.runlog import TrainResult, number, trim_metrics

TOLD_SECONDS = 1.0  # between looks at how busy this rank's devices are, for who watches
NOTED_STEP = 12  # of a run: after it, steps that are far from their prediction are noted


class Metrics:
    """Fills the `result` of a run on one rank. A step's time is that between its beginning and the next's, less its pauses."""

    def __init__(self, engine: PlanEngine, result: TrainResult, log: LogSection | None) -> None:
        self.engine, self.result, self.log = engine, result, log
        self._batches: list[int] = []
        self._began: float | None = None
        self._paused = 0.0
        self._busy: dict[str, float] = {}
        self._told = 0.0

    def begin(self, first: int, steps: int, predicted: Timeline | None) -> None:
        """A run of so many steps begins with step `first`."""
        self.result.first_step, self.result.predicted = first, predicted
        if progress.watched:
            figures_from(self._figures)
        if self.engine.world.is_main:
            if predicted is not None and steps:
                say(_outlook(steps, predicted.step_seconds))
            if self.log is not None:
                trim_metrics(Path(self.log.folder) / METRICS_FILE, first)

    def begin_step(self) -> None:
        """A step begins, and the one before has ended."""
        now = time.perf_counter()
        if self._began is not None:
            self.result.step_seconds.append(now - self._began - self._paused)
        self._began, self._paused = now, 0.0

    def took(self, loss: float, samples: int) -> None:
        """The step's loss and samples."""
        self.result.losses.append(loss)
        self.result.samples += samples
        self._batches.append(samples)

    def after(self, done: int, *, last: bool, learning_rate: float, norm: float | None, epoch: int) -> None:
        """Step `done` is over: its timeline and its line of the log, where they are due. Collective."""
        began = time.perf_counter()
        if progress.watched and began - self._told > TOLD_SECONDS and self._began is not None:
            self._told, step_seconds = began, began - self._began - self._paused
            bubbles = _as_timeline(self.engine.spans(), step_seconds).bubble_fraction()
            self._busy = {device: 1 - bubble for device, bubble in bubbles.items()}
        due = last or (self.log is not None and done % self.log.every_steps == 0)
        whole = self._batches[-1] == self.engine.plan.global_batch  # a partial batch is no step to compare with the plan's
        if due and (whole or self.result.measured is None):
            self.result.measured = self._timeline()
        if self.engine.world.is_main:
            if self.log is not None and due:
                self._write_line(Path(self.log.folder), done, learning_rate, norm, epoch)
            if done - self.result.first_step == NOTED_STEP:
                self._note_difference()
        self.pause(began)

    def pause(self, began: float) -> None:
        """What has been done since `began` is not part of the step."""
        self._paused += time.perf_counter() - began

    def end(self) -> None:
        """All steps are over. Collective."""
        self.engine.world.barrier()
        self.begin_step()
        self._began = None

    def collect(self) -> None:
        """Overruns and peak bytes of all ranks. Collective."""
        rows = [row for part in self.engine.world.gather(self.engine.usage()) for row in part]
        if self.result.losses:
            elapsed = max(sum(self.result.steady_seconds), 1e-9)
            self.result.overrun_fraction = max(row[2] for row in rows) / elapsed
            self.result.peak_bytes = {row[0]: row[1] for row in rows if row[1] is not None}

    def _timeline(self) -> Timeline:
        """The step just done, as it was: every rank's actions, in seconds since its step began. Collective."""
        return _as_timeline([span for part in self.engine.world.gather(self.engine.spans()) for span in part])

    def _figures(self) -> Figures:
        """How this rank's devices fare: how busy they were, and the most bytes that they held."""
        return {device: (self._busy.get(device), peak) for device, peak, _ in self.engine.usage()}

    def _write_line(self, folder: Path, done: int, learning_rate: float, norm: float | None, epoch: int) -> None:
        result = self.result
        line: dict[str, Any] = {
            "step": done, "epoch": epoch, "loss": number(result.losses[-1]), "learning_rate": learning_rate,
        }  # fmt: skip
        if norm is not None:
            line["grad_norm"] = number(norm)
        if result.step_seconds:  # both of the step before
            seconds = result.step_seconds[-1]
            line |= {"step_seconds": seconds, "samples_per_second": self._batches[-2] / seconds}
        if result.measured is not None:
            line["utilisation"] = {d: round(1 - b, 4) for d, b in result.measured.bubble_fraction().items()}
        append_line(folder / METRICS_FILE, json.dumps(line))

    def _note_difference(self) -> None:
        predicted, measured = self.result.predicted, self.result.median_step_seconds
        if predicted is not None and measured > (1 + DIFFERENT) * predicted.step_seconds:
            times = f"{human_seconds(measured)}, predicted {human_seconds(predicted.step_seconds)}"
            warn(
                f"note: a step takes {times}: the profile no longer holds, or other work keeps the machines busy; 'hetpipe "
                "profile' measures the devices and links as they are now"
            )


def _as_timeline(found: Sequence[Any], step_seconds: float = 0.0) -> Timeline:
    """Of what engines noted of a step (see `PlanEngine.spans`), which took at least so long."""
    spans = tuple(
        Span(device=d, replica=r, stage=s, kind=kind, microbatch=i if kind in "FB" else None, start=a, end=b)
        for d, r, s, kind, i, a, b in found
    )
    pipeline = max((s.end for s in spans if s.kind in "FB"), default=0.0)
    first = min((s.start for s in spans if s.kind == "optimizer"), default=pipeline)
    end = max((s.end for s in spans), default=0.0)
    return Timeline(
        spans=spans,
        step_seconds=max(end, step_seconds),
        pipeline_seconds=pipeline,
        sync_seconds=max(0.0, first - pipeline),
        optimizer_seconds=end - max(first, pipeline),
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what an optimizer keeps."""
    values = (t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in values)


def _outlook(steps: int, seconds: float) -> str:
    """How long a run is going to take."""
    text = f"{steps} steps of {human_seconds(seconds)} (predicted): about {duration(steps * seconds)}"
    return text + ("; --set train.steps=N trains fewer" if steps * seconds > 3600 else "")
