"""What an observer of a run is."""

from __future__ import annotations

from typing import ClassVar

from hetpipe.training.observers.records import CheckpointRecord, DriftRecord, EndRecord, EvaluationRecord, RunRecord, StepRecord


class Observer:
    """Is told of a run as it goes on; what it does not care for it leaves as it is here. One is made for each run, without
    arguments, on the main rank; on every rank if the class says `every_rank = True`. While it is told something the run waits for
    it, and that is no part of a step's time. What it raises ends the run."""

    every_rank: ClassVar[bool] = False

    def began(self, run: RunRecord) -> None:
        """The run begins; its checkpoint, if there was one, is loaded."""

    def stepped(self, step: StepRecord) -> None:
        """A step is over."""

    def drifted(self, drift: DriftRecord) -> None:
        """Devices have become slower or faster."""

    def saved(self, checkpoint: CheckpointRecord) -> None:
        """A checkpoint is complete."""

    def evaluated(self, evaluation: EvaluationRecord) -> None:
        """Samples that do not train were evaluated: after the last step, and before, if the job says so."""

    def ended(self, end: EndRecord) -> None:
        """The run ends, well or not. Whoever was told that it began is told this."""
