"""Fills the result of a run while it goes on (times, timeline, peaks), and makes the records of its steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetpipe.building.feed import Batch
from hetpipe.documents.profiles.lengths import LengthFactor
from hetpipe.documents.sections.log import LogSection
from hetpipe.predict.timeline import Span, Timeline
from hetpipe.processes import progress
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.observers.records import StepRecord
from hetpipe.training.runlog import WARMUP_STEPS, TrainResult

TOLD_SECONDS = 1.0  # between looks at how busy this rank's devices are, for who watches


class Metrics:
    """Fills the `result` of a run on one rank. A step's time is that between its beginning and the next's, less its pauses."""

    def __init__(self, engine: PlanEngine, result: TrainResult, log: LogSection | None) -> None:
        self.engine, self.result, self.log = engine, result, log
        self.batches: list[int] = []  # the samples of each step
        self._began: float | None = None
        self._paused = 0.0
        self._warmed_up: dict[str, float] = {}  # device → seconds of overrun, which do not count
        self._utilisation: Mapping[str, float] = {}
        self._memory: Mapping[str, int] = {}
        self._tokens: list[int | None] = []  # of each step
        self._told, self._left_out = 0.0, False

    def begin(self, first: int, predicted: Timeline | None, lengths: Sequence[LengthFactor]) -> None:
        """A run begins with step `first`."""
        self.result.first_step, self.result.predicted, self.result.lengths = first, predicted, lengths

    def begin_step(self) -> None:
        """A step begins, and the one before has ended."""
        now = time.perf_counter()
        if self._began is not None:
            self.result.step_seconds.append(now - self._began - self._paused)
        self._began, self._paused = now, 0.0

    def took(self, loss: float, samples: int, *, left_out: bool) -> None:
        """The step's loss and samples; whether the optimizer left it out."""
        self._left_out = left_out
        self.result.losses.append(loss)
        self.result.step_numbers.append(self.engine.numbers)
        self.result.samples += samples
        self.batches.append(samples)
        row = self.engine.row_tokens
        self._tokens.append(samples * row if row is not None else None)
        if len(self.batches) == WARMUP_STEPS:
            self._warmed_up = {device: overrun for device, _, overrun in self.engine.usage()}

    def record(self, done: int, batch: Batch, *, last: bool, learning_rate: float, norm: float | None) -> StepRecord:
        """Step `done` is over: what is told of it, with the timeline where one is due. Collective."""
        busy, peaks = self._watched()
        whole = self.batches[-1] == self.engine.plan.global_batch  # a partial batch is no step to compare with the plan's
        due = last or (self.log is not None and done % self.log.every_steps == 0)
        if due and (whole or self.result.measured is None):
            self.result.measured, self._memory = self._measured()
            self._utilisation = _busy(self.result.measured)
        seconds = self.result.step_seconds[-1] if self.result.step_seconds else None
        return StepRecord(
            step=done,
            epoch=batch.epoch,
            samples=len(batch.numbers),
            loss=self.result.losses[-1],
            learning_rate=learning_rate,
            grad_norm=norm,
            loss_scale=self.engine.loss_scale.scale if self.engine.scaled else None,
            left_out=self._left_out,
            fetch_seconds=batch.seconds,
            step_seconds=seconds,
            samples_per_second=self.batches[-2] / seconds if seconds is not None else None,
            utilisation=self._utilisation,
            busy=busy,
            peak_bytes=peaks,
            memory_bytes=self._memory,
            tokens_per_second=self._tokens[-2] / seconds if seconds is not None and self._tokens[-2] is not None else None,
        )

    def pause(self, began: float) -> None:
        """What has been done since `began` is not part of the step."""
        self._paused += time.perf_counter() - began

    def take_back(self) -> None:
        """The step that has begun does not count."""
        self._began = None

    def end(self) -> None:
        """All steps are over. Collective."""
        self.engine.world.barrier()
        self.begin_step()
        self._began = None

    def collect(self) -> None:
        """Overruns after the warm-up and peak bytes of all ranks. Collective."""
        own = [(device, peak, over - self._warmed_up.get(device, 0.0)) for device, peak, over in self.engine.usage()]
        rows = [row for part in self.engine.world.gather(own) for row in part]
        if self.result.losses:
            elapsed = max(sum(self.result.steady_seconds), 1e-9)
            self.result.overrun_fraction = max(row[2] for row in rows) / elapsed
            self.result.peak_bytes = {row[0]: row[1] for row in rows if row[1] is not None}
            if self.result.measured is not None:
                self.result.measured = replace(self.result.measured, peak_bytes=self.result.peak_bytes)

    def _measured(self) -> tuple[Timeline, dict[str, int]]:
        """The step just done, as it was: every rank's actions, in seconds since its step began; and the most bytes that each
        device has held so far, as far as that is known. Collective."""
        own = self.engine.spans(), [(device, peak) for device, peak, _ in self.engine.usage()]
        every = self.engine.world.gather(own)
        held = {device: peak for _, peaks in every for device, peak in peaks if peak is not None}
        return _as_timeline([span for spans, _ in every for span in spans]), held

    def _watched(self) -> tuple[Mapping[str, float], Mapping[str, int | None]]:
        """How busy this rank's devices were in the step just done, and the most bytes that they held, for who watches: now and
        then, since a GPU is waited for."""
        now = time.perf_counter()
        if not progress.watched or now - self._told < TOLD_SECONDS or self._began is None:
            return {}, {}
        self._told, step_seconds = now, now - self._began - self._paused
        return _busy(_as_timeline(self.engine.spans(), step_seconds)), {d: peak for d, peak, _ in self.engine.usage()}


def _busy(timeline: Timeline) -> dict[str, float]:
    """The share of the time in which each device works."""
    return {device: 1 - bubble for device, bubble in timeline.bubble_fraction().items()}


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
