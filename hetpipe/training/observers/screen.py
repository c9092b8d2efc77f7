"""What people see of a run while it goes on: how long it is going to take, how far it is, and where it is not as predicted."""

from __future__ import annotations

from functools import partial

from hetpipe.files.units import human_seconds
from hetpipe.measuring.layer_run import DIFFERENT
from hetpipe.processes import progress
from hetpipe.processes.progress import Activity, duration, say, warn
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import DriftRecord, EndRecord, RunRecord, StepRecord
from hetpipe.training.observers.watch import look
from hetpipe.training.runlog import steady_median

NOTED_STEP = 12  # of a run: after it, steps that are far from their prediction, or wait for samples, are noted
WAITED_SHARE, WAITED_SECONDS = 0.1, 0.01  # of a step that waits for its samples at least


class Outlook(Observer):
    """Says how long the run is going to take, and notes where its steps, or its devices, take longer."""

    def began(self, run: RunRecord) -> None:
        """What is predicted."""
        self._first, self._predicted, self._workers = run.first_step, run.predicted_step_seconds, run.job.data.workers
        self._seconds, self._waited, self._alike = list[float](), list[float](), not run.steps_differ
        steps = run.total_steps - run.first_step
        if self._predicted is not None and steps > 0:
            say(_outlook(steps, self._predicted, differ=run.steps_differ))

    def stepped(self, step: StepRecord) -> None:
        """What is measured."""
        if step.step_seconds is not None:
            self._seconds.append(step.step_seconds)
        self._waited.append(step.fetch_seconds)
        if step.step - self._first == NOTED_STEP:
            measured = steady_median(self._seconds)
            self._note_waits(steady_median(self._waited), measured)
            if self._alike and self._predicted is not None and measured > (1 + DIFFERENT) * self._predicted:
                times = f"{human_seconds(measured)}, predicted {human_seconds(self._predicted)}"
                warn(
                    f"note: a step takes {times}: the profile no longer holds, or other work keeps the machines busy; 'hetpipe "
                    "profile' measures the devices and links as they are now"
                )

    def drifted(self, drift: DriftRecord) -> None:
        """What is said of it."""
        warn(f"note: {drift.told}")

    def _note_waits(self, waited: float, step: float) -> None:
        if self._workers == 0 and waited > max(WAITED_SECONDS, WAITED_SHARE * step):
            warn(
                f"note: a step of {human_seconds(step)} waits {human_seconds(waited)} for its samples; data.workers=2 lets two "
                "processes of each rank read them ahead"
            )


def _outlook(steps: int, seconds: float, *, differ: bool) -> str:
    """How long a run is going to take, whose steps `differ` in length or not."""
    mean = ", in the mean" if differ else ""
    text = f"{steps} steps of {human_seconds(seconds)} (predicted{mean}): about {duration(steps * seconds)}"
    return text + ("; --set train.steps=N trains fewer" if steps * seconds > 3600 else "")


class Progress(Observer):
    """The bar, or the lines of a log, of the steps. On ranks that show none it is what their signs of life say."""

    every_rank = True

    def began(self, run: RunRecord) -> None:
        """The bar is there; of a run that was finished only its last line."""
        self._main, self._steps, self._samples = run.is_main, 0, 0
        devices = partial(look, run.plan, run.cluster) if progress.watched else None
        self._activity: Activity | None = Activity(
            "training", run.total_steps, done=run.told, lasting=True, shown=run.is_main, devices=devices
        ).__enter__()
        if run.told >= run.total_steps:
            self._close(None)

    def stepped(self, step: StepRecord) -> None:
        """One step more."""
        assert self._activity is not None
        self._steps, self._samples = self._steps + 1, self._samples + step.samples
        if self._main:
            self._activity.advance(_text(step, self._samples / self._steps))
        if step.step == self._activity.total:
            self._close(None)

    def ended(self, end: EndRecord) -> None:
        """No more steps."""
        self._close(RuntimeError if end.error is not None else None)

    def _close(self, kind: type[BaseException] | None) -> None:
        if self._activity is not None:
            self._activity.__exit__(kind, None, None)
            self._activity = None


def _text(step: StepRecord, batch: float) -> str:
    """Loss, throughput (of so many samples a step) and utilisation in a line."""
    parts = [f"loss {step.loss:.4f}"]
    if step.step_seconds is not None:
        parts.append(f"{step.step_seconds:.2f} s/step, {batch / step.step_seconds:.1f} samples/s")
    if step.utilisation:
        parts.append(f"busy {min(step.utilisation.values()):.0%} to {max(step.utilisation.values()):.0%}")
    return ", ".join(parts)
