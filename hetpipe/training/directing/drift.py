"""Whether the devices of a plan compute as fast as they did before, and as the profile says: the statistic.

Compared are the seconds in which a device runs the forwards and backwards of a step, without any waiting, with what is predicted
of them (`computing_seconds`). The optimizer, which comes once a step, is left out, as are steps that are partial batches; a step
of other lengths is compared with its own prediction. The ratio of the two varies from step to step, is 1 only as far as the
profile is right, and what matters is whether it has changed for good. So, for each device:

- Its **level** is what is usual: the median of the first FIRST ratios since the run began, or since it changed, and again of the
  first BASE, if it has not changed by then.
- It has changed if SOON - ODD of the last SOON ratios are beyond FAR times the level, or if the median of the last LONG is beyond
  NEAR times the level, above or below.

A profile that is off from the start is part of the level, and no drift; it is said. A spike of some steps is none either, however
high: a change takes SOON - ODD slow steps, or half of LONG. A device that is twice as slow is found after 10 steps and told
within 20, even if ratios scatter by 20 %; one that is 1.3 times as slow after about 70. A device that gets slower little by
little is told each time that it has become 1.2 to 1.3 times as slow. Thresholds of an order statistic and a median need no
estimate of how much ratios scatter, of which a change, and spikes, would be part. When one device has changed, those of which
most of the last ratios are beyond FAR, too, are said with it: all devices of a busy host are one message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hetpipe.documents.plan import Plan
from hetpipe.documents.profiles.lengths import LengthFactor, length_factor
from hetpipe.runtime.plan_engine import PlanEngine

WARMUP = 2  # first steps of a leg, which allocate
FIRST, BASE, SOON, ODD, LONG = 20, 50, 12, 2, 100  # steps
FAR, NEAR = 1.3, 1.2
OFF = 1.08  # times what the profile says: a level beyond it is said
EVERY = 2  # steps from look to look


class Pace:
    """One device: its ratios, measured over predicted, and its level, which is None until it is known."""

    def __init__(self) -> None:
        self.level: float | None = None
        self._ratios, self._count = deque[float](maxlen=LONG), 0

    def add(self, ratio: float) -> None:
        """A step more."""
        self._ratios.append(ratio)
        self._count += 1
        if self._count in (FIRST, BASE):
            self.level = median(self._ratios)

    @property
    def change(self) -> int:
        """Of how many last steps the level is another, for good; 0 of none."""
        if self.level is None:
            return 0
        last = sorted(self._last(SOON))
        if last[ODD] > FAR * self.level or last[-1 - ODD] < self.level / FAR:
            return SOON - ODD
        if self._count >= LONG and is_beyond(median(self._ratios) / self.level, NEAR):
            return LONG // 2
        return 0

    @property
    def latest(self) -> float:
        """What the level would be if it had changed now; 0 as long as there is none."""
        return median(self._last(self.change or SOON - ODD)) if self.level is not None else 0.0

    def settle(self) -> None:
        """It has changed: the last steps are what is usual now."""
        kept = self._last(self.change or SOON - ODD)
        self.level, self._count = median(kept), len(kept)
        self._ratios.clear()
        self._ratios.extend(kept)

    def _last(self, count: int) -> list[float]:
        return list(self._ratios)[-count:]


def is_beyond(ratio: float, factor: float) -> bool:
    """Whether a ratio is above the factor, or below its inverse.

    >>> is_beyond(1.4, 1.3), is_beyond(0.7, 1.3), is_beyond(0.8, 1.3)
    (True, True, False)
    """
    return abs(math.log(max(ratio, 1e-9))) > math.log(factor)


class Drift(NamedTuple):
    """What is known after `step`, with so many steps `left`, of the devices of a plan, by their names. `changed`: those that are
    faster or slower, for good, than they were; `from_start`: than the profile says, which this is the first look at. `off`: how
    many times as long as the profile says they computed from the start (1 where that was beyond NEAR, which is a change).
    `factors`: how many times as long as that they compute. `predicted_seconds`: in which they compute a step by the profile."""

    step: int
    left: int
    plan: Plan
    factors: dict[str, float]
    off: dict[str, float]
    predicted_seconds: dict[str, float]
    changed: tuple[str, ...] = ()
    from_start: bool = False

    def measured_seconds(self, device: str) -> float:
        """In which the device computes a step."""
        return self.predicted_seconds[device] * self.factors[device] * self.off[device]


class _Row(NamedTuple):
    """What the rank of a device tells of it; zeros where it is not known, or another rank's."""

    level: float = 0.0
    latest: float = 0.0
    has_changed: float = 0.0


class Drifts:
    """All devices of a leg, each as its rank measures it. Ranks tell each other every few steps, in a sum for which none waits,
    so that all know the same."""

    def __init__(self, engine: PlanEngine, predicted: Mapping[str, float], lengths: Sequence[LengthFactor]) -> None:
        self.engine, self.lengths = engine, lengths
        self.predicted = {device: seconds for device, seconds in predicted.items() if seconds > 0}
        self._paces = {seat.device: Pace() for seat in engine.seats if seat.device in self.predicted}
        self._measured = deque[
            tuple[str, float, Callable[[], float | None]]
        ]()  # steps that a GPU may not have come to the end of
        self._sum: Callable[[], list[float]] | None = None
        self._whole = 0  # steps
        self._start: dict[str, float] | None = None  # levels
        self._settled = False  # whether these stay what they are
        self.again: int | None = None  # after which step to tell what is known whether or not it has changed

    def stepped(self, *, whole: bool) -> None:
        """A step is over, of a `whole` batch or of a part."""
        if whole:
            self._whole += 1
            if self._whole > WARMUP:
                factor, computed = length_factor(self.lengths, self.engine.numbers), self.engine.computed()
                self._measured.extend((d, factor * self.predicted[d], computed[d]) for d in self._paces)
        while self._measured and (seconds := self._measured[0][2]()) is not None:
            device, predicted, _ = self._measured.popleft()
            self._paces[device].add(seconds / predicted)

    def look(self, step: int, left: int) -> Drift | None:
        """What there is to tell after this step, the same on all ranks of the plan; each calls it after every step."""
        found = None
        if self._sum is not None:
            numbers = self._sum()
            rows = dict(
                zip(self.engine.plan.device_ids, (_Row(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)), strict=True)
            )
            found = self._told({device: rows[device] for device in self.predicted}, step, left)
        self._sum = None
        if step % EVERY == 0:
            own = [self._row(device) for device in self.engine.plan.device_ids]
            self._sum = self.engine.world.sum_later([number for row in own for number in row])
        return found

    def close(self) -> None:
        """The leg is over."""
        if self._sum is not None:
            self._sum()

    def _row(self, device: str) -> _Row:
        pace = self._paces.get(device)
        if pace is None or pace.level is None:
            return _Row()
        return _Row(pace.level, pace.latest, float(pace.change > 0))

    def _told(self, rows: Mapping[str, _Row], step: int, left: int) -> Drift | None:
        if any(row.level == 0.0 for row in rows.values()):
            return None
        levels = {device: row.level for device, row in rows.items()}
        if self._start is None:
            self._start = levels
            changed = tuple(device for device, level in levels.items() if is_beyond(level, NEAR))
            return self._drift(levels, step, left)._replace(changed=changed, from_start=True) if changed else None
        if any(row.has_changed for row in rows.values()):
            self._settled, self.again = True, None
            changed = tuple(d for d, row in rows.items() if row.has_changed or is_beyond(row.latest / row.level, FAR))
            for device in self._paces.keys() & set(changed):
                self._paces[device].settle()
            return self._drift(levels | {d: rows[d].latest for d in changed}, step, left)._replace(changed=changed)
        if not self._settled and self._whole > WARMUP + BASE + EVERY:
            self._settled, self._start = True, levels
            if any(is_beyond(level, OFF) for level in self._off().values()):
                return self._drift(levels, step, left)._replace(from_start=True)
        if self.again is not None and step >= self.again:
            self.again = None
            return self._drift(levels, step, left)
        return None

    def _off(self) -> dict[str, float]:
        assert self._start is not None
        return {device: 1.0 if is_beyond(level, NEAR) else level for device, level in self._start.items()}

    def _drift(self, levels: Mapping[str, float], step: int, left: int) -> Drift:
        off = self._off()
        factors = {device: level / off[device] for device, level in levels.items()}
        return Drift(step, left, self.engine.plan, factors, off, self.predicted)
