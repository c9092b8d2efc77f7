"""By what clock layers are timed, and how much longer work lasts on a processor that a thread does not have all the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hetpipe.layers.device import Emulation, Pacer, Stopwatch
from hetpipe.measuring.layer_run import DIFFERENT, WINDOW_SECONDS, WINDOWS, steady_seconds

IDLE_SECONDS = 0.002
LEFT_OVER = 0.05  # by which a window right after a pause may be longer than the processor had: its first quota is left over
STEADY_SECONDS = 0.5  # of a window by which a quota is measured: what a period gives too much is little beside the others


@dataclass
class Clock:
    """Times one action (layer, kind, size): on a real device as it is; on an emulated one it lasts as long as it would there.
    With a `stretch`, an action lasts so many times this thread's own processor seconds (one thread computes, forward and
    backward): what stops the thread then does not distort what is measured, wherever it falls."""

    device: torch.device
    emulation: Emulation | None = None
    stretch: float | None = None
    pacer: Pacer = field(default_factory=Pacer)

    def measure(self, action: Callable[[], object], kind: str, layer: int, size: int) -> float:
        """Seconds of the action, which on a card is done several times."""
        if self.device.type == "cuda":
            return steady_seconds(Stopwatch(self.device), action)
        time.sleep(IDLE_SECONDS)
        if self.stretch is not None:
            began = time.thread_time()
            action()
            return self.stretch * (time.thread_time() - began)
        if self.emulation is None:
            return Stopwatch(self.device).measure(action)
        seconds = self.emulation.seconds(kind, layer, layer + 1, size)
        return Stopwatch(self.device).measure(lambda: self._paced(action, seconds, f"{kind} of layer {layer}"))

    def _paced(self, action: Callable[[], object], seconds: float, kind: str) -> None:
        self.pacer.start(seconds, kind)
        action()
        self.pacer.finish()


def stretch_of(device: torch.device) -> float | None:
    """How many times as long as its own processor seconds a thread takes that works here without a pause; None where that is at
    most 15 % longer, and on a card. Such work uses up a container's quota within each of its periods, of 0.1 s, at whose
    beginning a single layer is as fast as without a quota. The quota of a group that cannot be seen from inside is found, too.
    A short window shows at once where there is no quota, and uses up what is left over. Then the least of a few windows of
    several periods counts, since other work of a moment is not in all of them."""
    if device.type != "cpu" or _window(WINDOW_SECONDS) <= 1 + LEFT_OVER:
        return None
    least = math.inf
    for _ in range(WINDOWS):
        least = min(least, _window(STEADY_SECONDS))
        if least <= 1 + DIFFERENT:
            return None
    return least


def _window(seconds: float) -> float:
    """Seconds over processor seconds of a while of work."""
    began, processor = time.monotonic(), time.thread_time()
    while True:
        now = time.monotonic()
        if now - began >= seconds:
            return (now - began) / max(time.thread_time() - processor, 1e-9)
