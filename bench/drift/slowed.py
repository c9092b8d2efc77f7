"""Emulated devices that change their speed in a run: nothing that hetpipe offers, but what a throttling card does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hetpipe.layers.device import Emulation
from hetpipe.runtime.stages.engine import TorchEngine


class Slower(NamedTuple):
    """A device whose actions last `factor` times as long in the steps from `first` to `last` (None: to the end of the run), the
    first being step 1; reached step by step over so many steps (0: at once)."""

    device: str
    factor: float
    first: int
    last: int | None = None
    ramp: int = 0

    def at(self, step: int) -> float:
        """How many times as long they last in this step."""
        if step < self.first or (self.last is not None and step > self.last):
            return 1.0
        return 1.0 + (self.factor - 1.0) * min(1.0, (step - self.first + 1) / (self.ramp or 1))


@contextmanager
def slowed(changes: Sequence[Slower]) -> Iterator[None]:
    """In here engines pace emulated devices so."""
    plain = TorchEngine._pace

    def pace(engine: TorchEngine, emulation: Emulation) -> None:
        plain(engine, emulation)
        own, seconds = [change for change in changes if change.device == engine.world.device_id], engine.recorder.seconds
        assert seconds is not None

        def paced(kind: str, size: int) -> float:
            factor = 1.0
            for change in own:
                factor *= change.at(engine.steps)
            return factor * seconds(kind, size)

        engine.recorder.seconds = paced

    TorchEngine._pace = pace  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TorchEngine._pace = plain  # type: ignore[method-assign]
