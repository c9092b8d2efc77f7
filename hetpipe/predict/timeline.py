"""A Timeline: what ran (or would run) when, on which device; from the simulator or measured by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, overload

SpanKind = Literal["F", "B", "send", "sync", "optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One interval on one device: `kind` F, B, send (with `microbatch`), sync, optimizer. Seconds since the step began."""

    device: str
    replica: int
    stage: int
    kind: SpanKind
    start: float
    end: float
    microbatch: int | None = None


class LazySpans(Sequence[Span]):
    """Spans that are built when they are first read: whoever asks for the step time alone does not pay for them."""

    def __init__(self, build: Callable[[], Sequence[Span]]) -> None:
        self._build = build

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return tuple(self._build())

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...

    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._spans == tuple(other)

    def __hash__(self) -> int:
        return hash(self._spans)

    def __repr__(self) -> str:
        return repr(self._spans)

    def __reduce__(self) -> tuple[type[tuple[Span, ...]], tuple[tuple[Span, ...]]]:
        return tuple, (self._spans,)  # what leaves the process is built


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All spans of one step. A predicted one begins with the optimizers of the step before, and ends with the gradient sums; a
    measured one ends with its own optimizers. Of `step_seconds` the replica whose last backward ends last takes
    `pipeline_seconds`, and `optimizer_seconds` for its longest optimizer; `sync_seconds` is what gradient sums add. `host_bytes`:
    the most of each node's host memory that stages offload to, where a plan is predicted. `memory`,
    where it was asked for, has per device the (seconds, bytes) at which the bytes in use change."""

    spans: Sequence[Span]
    step_seconds: float
    pipeline_seconds: float
    sync_seconds: float
    optimizer_seconds: float
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    memory: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)

    def busy_seconds(self) -> dict[str, float]:
        """Seconds of forward, backward and optimizer work per device."""
        busy: dict[str, float] = {}
        for span in self.spans:
            if span.kind in ("F", "B", "optimizer"):
                busy[span.device] = busy.get(span.device, 0.0) + span.end - span.start
        return busy

    def bubble_fraction(self) -> dict[str, float]:
        """Per device: the fraction of the step in which it does not compute."""
        if self.step_seconds <= 0:
            return dict.fromkeys(self.busy_seconds(), 0.0)
        return {device: max(0.0, 1 - busy / self.step_seconds) for device, busy in self.busy_seconds().items()}
