"""One layer by itself, forward and backward, to be timed; and how that lasts on a device that works without a pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hetpipe.device import Stopwatch
from hetpipe.model import Model, Tensors, as_tuple, as_value, move, named_layers
from hetpipe.profiles import Measurement
from hetpipe.split import TensorSpec
from hetpipe.weights import placed

DIFFERENT = 0.15  # a time that is off by more is another
WINDOW_SECONDS, WINDOWS = 0.15, 3  # Linux deals out CPU quotas every 0.1 s


def leaves(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same values, as what enters a layer from elsewhere."""
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


@dataclass(frozen=True)
class LayerRun:
    """Forward and backward of one layer (the last with the loss) as actions that can be timed."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Tensors], Tensor] | None
    received: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def receive(self) -> None:
        """Fresh inputs (a layer may work in place)."""
        self.received[:] = [t.clone() for t in self.inputs]

    def forward(self) -> None:
        output = self.layer(as_value(self.received))
        self.outputs[:] = (
            [self.loss(output)] if self.loss is not None else [t for t in as_tuple(output) if t.requires_grad]
        )

    def backward(self) -> None:
        differentiable = [t for t in self.outputs if t.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, self.gradients(differentiable))
        for tensor in self.inputs:
            tensor.grad = None

    def gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones_like(t) for t in outputs]


def loss_of(model: Model, targets: Tensors) -> Callable[[Tensors], Tensor]:
    """The loss of the last layer's output for these targets."""
    count = model.loss.count(targets) or 1.0
    return lambda output: model.loss.share(output, targets, count)


@contextmanager
def layer_alone(
    model: Model, specs: Sequence[Sequence[TensorSpec]], index: int, size: int, device: torch.device
) -> Iterator[LayerRun]:
    """Layer `index` with its values on the device, and inputs of `size` samples. `specs` are those of `trace_boundaries`."""
    inputs, targets = model.sample(size)
    layers = named_layers(model.layers)
    given = as_tuple(inputs) if index == 0 else tuple(spec.filled() for spec in specs[index])
    last = loss_of(model, move(targets, device)) if index == len(layers) - 1 else None
    with placed(model.layers, layers[index][1], device):
        yield LayerRun(layers[index][1], leaves([t.to(device) for t in given]), last)


def without_pause(run: LayerRun, device: torch.device, seconds: float) -> list[float]:
    """Mean seconds of forward and backward in each of a few windows (one, where a turn of about `seconds` is longer than that),
    after one that warms up. A quota, which a device under steady work uses up, shows in all of them; other work of a moment
    does not."""
    watch, means = Stopwatch(device), list[float]()
    for _ in range(1 + (WINDOWS if seconds < WINDOW_SECONDS else 1)):
        total, count, began = 0.0, 0, time.monotonic()
        while count == 0 or time.monotonic() - began < WINDOW_SECONDS:
            run.receive()
            total += watch.measure(run.forward) + watch.measure(run.backward)
            count += 1
        means.append(total / count)
    for parameter in run.layer.parameters():
        parameter.grad = None
    return means[1:]


def middle_times(measurement: Measurement) -> tuple[int, list[float]]:
    """A middle one of the measured micro-batch sizes, and the seconds of forward and backward of each layer."""
    size = measurement.microbatch_sizes[len(measurement.microbatch_sizes) // 2]
    return size, [float(f + b) for f, b in zip(*measurement.times(size), strict=True)]


def busy_factor(run: LayerRun, seconds: float, device: torch.device) -> float:
    """How many times as long as `seconds`, which they took with pauses, forward and backward take on a device that works without:
    1, unless it is more than 15 % longer (a CPU quota, heat, other work)."""
    factor = min(without_pause(run, device, seconds)) / max(seconds, 1e-9)
    return factor if factor > 1 + DIFFERENT else 1.0
