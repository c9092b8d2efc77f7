"""What was measured of all layers on one device type."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hetpipe.documents.number_types import Precision
from hetpipe.files.formats import Bytes, DeviceCount, Name, Samples, Strict
from hetpipe.files.limits import MOST_SECONDS
from hetpipe.files.messages import shown

Times = tuple[Annotated[float, Field(strict=True, ge=0, le=MOST_SECONDS)], ...]
Array = NDArray[np.float64]
OWN_BYTES = (
    "parameter_bytes",
    "trained_bytes",
    "buffer_bytes",
    "saved_bytes_per_sample",
    "first_saved_bytes_per_sample",
    "output_bytes_per_sample",
    "cast_bytes",
)  # of a measurement


class Measurement(Strict):
    """Seconds of all L layers on one device type: one row per micro-batch size. The last layer's times include the loss.
    A tensor-parallel degree above 1 carries its own parameter, buffer and saved bytes per device. `trained_bytes`: those of these
    parameters that train; where they are left out, as large a part as of the whole layer's.

    `precision`: what matrix products are computed in, by torch's autocast where that is not fp32; parameters are of float32.
    Below fp32 a measurement has bytes of its own. `saved_bytes_per_sample`: what a sample leaves for backward, and
    `first_saved_bytes_per_sample` where the layer is the first of a stage. `output_bytes_per_sample`: what leaves each layer.
    `cast_bytes`: the copies of parameters in that precision, which autocast makes once a step and keeps until its end, however
    many samples are in flight; the seconds of making them are part of `optimizer_seconds`, which hold what a layer takes once a
    step."""

    device_type: Name
    tensor_parallel: DeviceCount = 1
    precision: Precision | None = None
    microbatch_sizes: Annotated[tuple[Samples, ...], Field(min_length=1)]
    forward_seconds: tuple[Times, ...]
    backward_seconds: tuple[Times, ...]
    optimizer_seconds: Times
    parameter_bytes: tuple[Bytes, ...] | None = None
    trained_bytes: tuple[Bytes, ...] | None = None
    buffer_bytes: tuple[Bytes, ...] | None = None
    saved_bytes_per_sample: tuple[Bytes, ...] | None = None
    first_saved_bytes_per_sample: tuple[Bytes, ...] | None = None
    output_bytes_per_sample: tuple[Bytes, ...] | None = None
    cast_bytes: tuple[Bytes, ...] | None = None

    @model_validator(mode="after")
    def _rectangular(self) -> Self:
        rows = len(self.microbatch_sizes)
        if any(b <= a for a, b in zip(self.microbatch_sizes, self.microbatch_sizes[1:], strict=False)):
            raise ValueError(f"microbatch_sizes must increase, got {shown(list(self.microbatch_sizes))}")
        for name in ("forward_seconds", "backward_seconds"):
            if len(getattr(self, name)) != rows:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows for {rows} microbatch_sizes")
        return self

    @cached_property
    def forward(self) -> Array:
        """Forward seconds, [S sizes, L layers]."""
        return np.array(self.forward_seconds, dtype=np.float64)

    @cached_property
    def backward(self) -> Array:
        """Backward seconds, [S sizes, L layers]."""
        return np.array(self.backward_seconds, dtype=np.float64)

    def slower(self, factor: float) -> Measurement:
        """With all seconds so many times as long."""

        def longer(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(t * factor for t in times)

        return self.model_copy(
            update={
                "forward_seconds": tuple(map(longer, self.forward_seconds)),
                "backward_seconds": tuple(map(longer, self.backward_seconds)),
                "optimizer_seconds": longer(self.optimizer_seconds),
            }
        )

    def without_backward(self, first: int) -> Measurement:
        """With no backward of the `first` layers, whatever noise was measured there."""
        rows = tuple((0.0,) * first + row[first:] for row in self.backward_seconds)
        return self if rows == self.backward_seconds else self.model_copy(update={"backward_seconds": rows})

    def times(self, size: int) -> tuple[Array, Array]:
        """Forward and backward seconds of each layer, [L] and [L], for a micro-batch of `size` samples: linear between
        the measured sizes, and on the last (first) slope beyond them, never below zero."""
        sizes = self.microbatch_sizes
        if size <= 0:
            return np.zeros(len(self.optimizer_seconds)), np.zeros(len(self.optimizer_seconds))
        if len(sizes) == 1:
            scale = size / sizes[0]
            return self.forward[0] * scale, self.backward[0] * scale
        right = min(max(int(np.searchsorted(sizes, size)), 1), len(sizes) - 1)
        part = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return tuple(np.maximum(t[right - 1] + part * (t[right] - t[right - 1]), 0.0) for t in (self.forward, self.backward))
