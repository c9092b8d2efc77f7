"""Which evaluation of a run was best, and how many have followed that were not: what the best checkpoint and an early end hang
on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetpipe.documents.sections.evaluate import EvaluateSection
from hetpipe.files.formats import Count, Name, Number, Strict


class SavedBest(Strict):
    """As it stands in a checkpoint. `metric`: by which evaluations were compared; `step` and `value`: of the best one, `since`:
    how many have followed; `last`: the step of the last one; `samples`: how many samples each measured."""

    metric: Name
    step: Count
    value: Number
    since: Count
    last: Count
    samples: Count


@dataclass
class Best:
    """What of the evaluations so far counts; `saved` is None before the first that gave a number."""

    section: EvaluateSection
    saved: SavedBest | None = None

    def note(self, step: int, value: float | None, samples: int) -> bool:
        """An evaluation after this step gave this value; whether it is the best so far. One that is infinite, or no number, is
        worse than any other. That of a last step which is none of `every_steps` can be the best, but takes no patience: a run
        that is made longer has none there."""
        before = self.saved
        if value is not None and math.isfinite(value) and (before is None or self._is_better(value, before.value)):
            self.saved = SavedBest(metric=self.section.called, step=step, value=value, since=0, last=step, samples=samples)
            return True
        if before is not None:
            self.saved = before.model_copy(update={"since": before.since + self._is_regular(step), "last": step})
        return False

    def _is_regular(self, step: int) -> bool:
        return self.section.every_steps is not None and step % self.section.every_steps == 0

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self.section.higher_is_better else value < than

    @property
    def is_over(self) -> bool:
        """Whether as many evaluations as the job has patience for have not been better."""
        return self.saved is not None and self.section.patience is not None and self.saved.since >= self.section.patience

    @property
    def told(self) -> str:
        """`3 evaluations without a better loss than 1.234, of step 90`."""
        assert self.saved is not None
        counted = "1 evaluation" if self.saved.since == 1 else f"{self.saved.since} evaluations"
        return f"{counted} without a better {self.saved.metric} than {self.saved.value:.4g}, that of step {self.saved.step}"

    def state_dict(self) -> dict[str, Any] | None:
        """For a checkpoint; None before there is anything."""
        return self.saved.model_dump() if self.saved is not None else None

    def take_over(self, saved: SavedBest | None, samples: int) -> str | None:
        """Go on from what was saved, where the same is measured; else what is to be said."""
        if saved is None:
            return None
        own = (self.section.called, samples)
        if (saved.metric, saved.samples) == own:
            self.saved = saved
            return None
        return (
            f"note: evaluations are now of the {own[0]} of {own[1]} samples, and were of the {saved.metric} of {saved.samples}: "
            "which one was best is counted anew"
        )
