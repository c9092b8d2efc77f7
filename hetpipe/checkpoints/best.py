"""Which evaluation of a run was best, and how many have followed that were not: what the best checkpoint and an early end hang
on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetpipe.building.content import Content
from hetpipe.documents.sections.evaluate import EvaluateSection
from hetpipe.files.formats import Count, Name, Number, Strict
from hetpipe.files.messages import shown


class Measured(Strict):
    """What evaluations measure: the `metric`, as a job writes it, of so many `samples` of the data with this content (None: not
    known). Values of others are not compared."""

    metric: str
    samples: Count
    data: Content | None = None

    @classmethod
    def by(cls, section: EvaluateSection, samples: int, data: Content | None) -> Measured:
        """What such a section measures."""
        own = section.metric if isinstance(section.metric, str) else f"{section.metric.target}, {section.metric.better} is better"
        return cls(metric=own, samples=samples, data=data)

    def other(self, than: Measured) -> str:
        """Say what differs from before; nothing if both measure the same, as far as both say it."""
        told = [f"the metric was {shown(than.metric)}, is {shown(self.metric)}"] if self.metric != than.metric else []
        if self.samples != than.samples:
            told.append(f"{than.samples} samples were evaluated, and now {self.samples}")
        elif self.data is not None and than.data is not None and (data := self.data.other(than.data)):
            told.append(f"of the data that are evaluated, {data}")
        return ", and ".join(told)


class SavedBest(Strict):
    """The best evaluation so far, for a checkpoint. `metric`: what evaluations are compared by; `step` and `value`: of the best
    one, and how many have followed `since`; `last`: the step of the last one; `of`: what was measured (see `Measured`)."""

    metric: Name
    step: Count
    value: Number
    since: Count
    last: Count
    of: Measured


@dataclass
class Best:
    """The best of the evaluations so far, of which each measures the same; `saved` is None before the first that gave a
    number."""

    section: EvaluateSection
    measured: Measured
    saved: SavedBest | None = None

    def note(self, step: int, value: float | None) -> bool:
        """Take in what an evaluation after this step gave. Returns whether it is the best so far. One that is infinite, or no
        number, is worse than any other. That of a last step which is none of `every_steps` can be the best, but takes no
        patience: a run that is made longer has none there."""
        before = self.saved
        if value is not None and math.isfinite(value) and (before is None or self._is_better(value, before.value)):
            self.saved = SavedBest(metric=self.section.called, step=step, value=value, since=0, last=step, of=self.measured)
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

    def take_over(self, saved: SavedBest | None) -> str | None:
        """Go on from what was saved, if the same is measured. Returns what is to be said if it is not."""
        if saved is None:
            return None
        if not (told := self.measured.other(saved.of)):
            self.saved = saved
            return None
        return f"note: evaluations are not those of the checkpoint: {told}. Which one is best is counted anew"
