"""Times the actions of a stage, for reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hetpipe.layers.device import MemoryMeter, Pacer, timing_event

COMPUTE = ("F", "B")  # the kinds of actions that a step consists of; what the optimizer does comes behind it


@dataclass
class Recorder:
    """Times every action of a stage (CUDA events on a GPU), and paces it where the device is emulated: `seconds(kind, size)`
    is how long an action is to last."""

    device: torch.device
    seconds: Callable[[str, int], float] | None = None
    pacer: Pacer = field(default_factory=Pacer)
    meter: MemoryMeter | None = None
    spans: list[tuple[str, int, float, float]] = field(default_factory=list)
    current: str = "between steps"
    waits: bool = False  # whether what is done now is to wait for other ranks
    _action: tuple[str, int] = ("", 0)  # kind and micro-batch of what is done now
    _has_state: bool = False  # whether the meter has counted what the optimizer keeps
    _pending: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _step: float = 0.0
    _began: float = 0.0
    _origin: torch.cuda.Event | None = None
    _first: torch.cuda.Event | None = None

    def begin_step(self) -> None:
        """All span times of the step count from here."""
        self.spans.clear()
        self._pending.clear()
        self._step = time.perf_counter()
        if self.device.type == "cuda":
            self._origin = self._event()

    def begin(self, action: str, kind: str, index: int, size: int) -> None:
        """Begin an action, of so many samples of a micro-batch."""
        self.current, self.waits, self._action = action, False, (kind, index)
        if self.seconds is not None:
            self.pacer.start(self.seconds(kind, size), kind)
        self._began = time.perf_counter()
        if self.device.type == "cuda":
            self._first = self._event()

    def note(self, what: str, *, waits: bool = True) -> None:
        """What is done now, between actions, for messages: this rank waits for others, unless it is said not to."""
        self.current, self.waits, self._began = what, waits, time.perf_counter()

    def finish(self) -> None:
        """End the action that began last: now, or when its emulated time is over."""
        if self.seconds is not None:
            self.pacer.finish()
        if self.device.type == "cuda":
            assert self._first is not None
            self._pending.append((*self._action, self._first, self._event()))
        else:
            self.spans.append((*self._action, self._began - self._step, time.perf_counter() - self._step))

    def hold_state(self, size: Callable[[], int]) -> None:
        """The optimizer has what it keeps, or has made a step: from the first one on an emulated device holds these bytes."""
        if not self._has_state and self.meter is not None and (found := size()):
            self._has_state = True
            self.meter.add(found, "optimizer state")

    def _event(self) -> torch.cuda.Event:
        """One that is over when what the device was given so far is: on the device's own stream, whichever is current."""
        event = timing_event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def end_step(self) -> list[tuple[str, int, float, float]]:
        """(kind, micro-batch, start, end) of each action, in seconds since `begin_step`."""
        if self.device.type == "cuda" and self._origin is not None:
            torch.cuda.synchronize(self.device)
            self.spans += [
                (kind, i, self._origin.elapsed_time(a) / 1e3, self._origin.elapsed_time(b) / 1e3)
                for kind, i, a, b in self._pending
            ]
            self._pending.clear()
        return list(self.spans)

    def computed(self) -> Callable[[], float | None]:
        """The seconds of all forwards and backwards of the step just done, as a function that waits for nothing: None as long as
        a GPU has not come to their end."""
        known = sum(end - start for kind, _, start, end in self.spans if kind in COMPUTE)
        events = [(first, last) for kind, _, first, last in self._pending if kind in COMPUTE]

        def seconds() -> float | None:
            if not all(last.query() for _, last in events):
                return None
            return known + sum(float(first.elapsed_time(last)) for first, last in events) / 1e3

        return seconds

    @property
    def began(self) -> float:
        """When the last action began."""
        return self._began

    @property
    def peak_bytes(self) -> int | None:
        """The most that the device held: metered, or what CUDA says; None on a CPU."""
        if self.meter is not None:
            return self.meter.peak
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


class GpipeRecorder(Recorder):
    """Times a stage of a library's pipeline. A backward begins with the first gradient of the stage's output, and ends with
    the last gradient that was made in it before the next one."""

    _open: tuple[int, float] | None = None
    _touched: float = 0.0
    _first_event: torch.cuda.Event | None = None
    _last_event: torch.cuda.Event | None = None

    def begin_step(self) -> None:
        """All span times of the step count from here."""
        self._open = None
        super().begin_step()

    def begin_backward(self, stage: int, i: int) -> None:
        """A gradient of the stage's output has come; the backward before has ended."""
        self.close()
        self.begin(f"{stage}B{i}", "B", i, 0)
        self._open = (i, self._began)
        if self.device.type == "cuda":
            self._first_event = self._first
        self.touch(None)

    def touch(self, _gradient: object) -> None:
        """A gradient was made."""
        if self._open is None:
            return
        if self.device.type == "cuda":
            self._last_event = self._event()
        else:
            self._touched = time.perf_counter()

    def close(self) -> None:
        """The backward under way has ended with the gradient made last."""
        if self._open is None:
            return
        (i, began), self._open = self._open, None
        if self._last_event is not None and self._first_event is not None:
            self._pending.append(("B", i, self._first_event, self._last_event))
        else:
            self.spans.append(("B", i, began - self._step, self._touched - self._step))
