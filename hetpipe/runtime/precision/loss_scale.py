"""By what losses are divided before backward, and what makes gradients of that afterwards. In half precision that number is part
of the arithmetic: one that is no power of two rounds every gradient anew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hetpipe.documents.number_types import GROWTH_INTERVAL, INITIAL_SCALE
from hetpipe.files.messages import InputError

GROWTH, BACKOFF = 2.0, 0.5  # powers of two: scaling rounds nothing
LEAST, LARGEST = 2.0**-126, 2.0**127  # of a scale: powers of two of float32


class Divisor(NamedTuple):
    """Of the losses of one step. `whole`: what all targets weigh that its gradients are the mean over. `divisor`: what losses are
    divided by instead. `scaled`: that has the loss scale in it."""

    whole: float
    divisor: float
    scaled: bool = False

    @property
    def correction(self) -> float:
        """By what the gradients are multiplied once they are summed, in the type of the parameters."""
        return self.divisor / self.whole

    @classmethod
    def of(cls, whole: float, *, casts: bool, scale: float | None) -> Divisor:
        """Where a device of the plan `casts`, the next power of two below; there is a loss `scale` where one computes in float16.

        >>> Divisor.of(12.0, casts=False, scale=None)
        Divisor(whole=12.0, divisor=12.0, scaled=False)
        >>> Divisor.of(12.0, casts=True, scale=64.0)
        Divisor(whole=12.0, divisor=0.125, scaled=True)
        """
        if not casts:
            return cls(whole, whole)
        _, exponent = math.frexp(whole)
        return cls(whole, math.ldexp(1.0, exponent - 1) / (scale or 1.0), scale is not None)


class LossScale:
    """By what losses are multiplied where a device computes in float16, in which small gradients vanish (Micikevicius et al.
    2018, Mixed Precision Training, section 3.2), by the rule of torch.amp.GradScaler: half as much after a step whose gradients
    overflow, twice as much after `growth_interval` steps in a row without one. It is the same on all ranks."""

    def __init__(self, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        if growth_interval < 1:
            raise InputError(f"the loss scale's growth_interval is {growth_interval}; give at least 1 step")
        self.scale, self.growth_interval = initial, growth_interval
        self.good = 0  # steps without an overflow, in a row
        self.used = False  # whether a loss was scaled so far

    @property
    def scale(self) -> float:
        """By what the next loss is multiplied. InputError where it is set to what is no power of two."""
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        if not (math.isfinite(scale) and LEAST <= scale <= LARGEST and math.frexp(scale)[0] == 0.5):
            raise InputError(
                f"the loss scale is {scale:g}; give a power of two from 2^-126 to 2^127, so that scaling rounds nothing"
            )
        self._scale = float(scale)

    @property
    def exponent(self) -> int:
        """Of two, which is the scale."""
        return math.frexp(self._scale)[1] - 1

    def update(self, *, overflow: bool) -> None:
        """A step is over."""
        self.used = True
        if overflow:
            self.scale, self.good = max(self.scale * BACKOFF, LEAST), 0
            return
        self.good += 1
        if self.good >= self.growth_interval:
            self.good = 0
            if self.scale * GROWTH <= LARGEST:
                self.scale *= GROWTH

    def state_dict(self) -> dict[str, float] | None:
        """What goes on from step to step, as plain values; None before the first scaled loss."""
        return {"scale": self.scale, "good_steps": self.good} if self.used else None

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from it."""
        self.scale, self.good, self.used = float(state["scale"]), int(state["good_steps"]), True
