"""metrics.jsonl in the log folder: a line every few steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetpipe.documents.sections.log import METRICS_FILE
from hetpipe.files.writing import append_line, write_bytes
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import DriftRecord, EvaluationRecord, RunRecord, StepRecord
from hetpipe.training.runlog import evaluation_keys, number


class JsonLines(Observer):
    """Writes them, where the job has a log."""

    def began(self, run: RunRecord) -> None:
        """What the log has of later steps than the run goes on from is void."""
        self._log, self._total, self._evaluates = run.job.log, run.total_steps, run.job.evaluate is not None
        if self._log is not None and not self._log.writes_lines:
            self._log = None
        if self._log is not None:
            self._file = Path(self._log.folder) / METRICS_FILE
            trim_metrics(self._file, run.told, evaluates_again=run.told >= run.total_steps)

    def stepped(self, step: StepRecord) -> None:
        """A line, where it is due."""
        if self._log is None or (step.step < self._total and step.step % self._log.every_steps):
            return
        line: dict[str, Any] = {
            "step": step.step,
            "epoch": step.epoch,
            "loss": number(step.loss),
            "learning_rate": step.learning_rate,
        }
        if step.loss_scale is not None:
            line["loss_scale"] = step.loss_scale
        if step.left_out:
            line["left_out"] = True
        if step.grad_norm is not None:
            line["grad_norm"] = number(step.grad_norm)
        if step.step_seconds is not None:
            line |= {"step_seconds": step.step_seconds, "samples_per_second": step.samples_per_second}
        if step.utilisation:
            line["utilisation"] = {device: round(share, 4) for device, share in step.utilisation.items()}
        append_line(self._file, json.dumps(line))

    def drifted(self, drift: DriftRecord) -> None:
        """A line of its own."""
        if self._log is not None:
            found = {key: value for key, value in asdict(drift).items() if key not in ("step", "told")}
            append_line(self._file, json.dumps({"step": drift.step, "drift": found}))

    def evaluated(self, evaluation: EvaluationRecord) -> None:
        """A line of its own, if the job says what is evaluated."""
        if self._log is not None and self._evaluates:
            append_line(self._file, json.dumps({"step": evaluation.step, **evaluation_keys(evaluation)}))


def trim_metrics(path: Path, step: int, *, evaluates_again: bool = False) -> None:
    """Leave in the log what was written up to `step`, from which the run goes on: an earlier run's other lines are void, and so
    is the evaluation of a run that had ended, which is done again (`evaluates_again`)."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        write_bytes(path, b"".join(line for line in lines if _stays(line, step, evaluates_again)))


def _stays(line: bytes, step: int, evaluates_again: bool) -> bool:
    try:
        found = json.loads(line)
        at = float(found["step"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return False  # cut off when the run was killed
    return at < step or (at == step and not (evaluates_again and "test_loss" in found))
