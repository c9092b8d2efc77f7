"""Runs one layer by itself, forward and backward; and how much longer that takes on a device that works without a pause. What is
run, and how often, the profiler decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import Tensor, nn

from hetpipe.layers.device import Stopwatch
from hetpipe.layers.model import Model, Tensors, as_tuple, as_value
from hetpipe.layers.numbers import without_autocast
from hetpipe.layers.shards.split import split_of

DIFFERENT = 0.15  # a time that is off by more is another
SPLIT_TURNS = 8  # of a layer that is split over several devices
TURNS_SECONDS, MOST_TURNS = 0.005, 50  # of one reading of a card
WINDOW_SECONDS, WINDOWS = 0.2, 3  # Linux gives CPU quotas anew every 0.1 s: whole periods have whole quotas


def without_history(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """These values as what enters a layer from elsewhere: with no history."""
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
        self.received[:] = [t.clone() for t in without_history(self.inputs)]

    def forward(self) -> None:
        output = self.layer(as_value(self.received))
        ends = [self.loss(output)] if self.loss is not None else as_tuple(output)
        self.outputs.extend(t for t in ends if t.requires_grad)

    def look(self) -> None:
        """A forward of which nothing is left."""
        self.receive()
        self.layer(as_value(self.received))

    def backward(self) -> None:
        """Of all forwards since the last one, at once."""
        outputs = list(self.outputs)
        self.outputs.clear()
        if outputs:
            with without_autocast(outputs[0].device):
                torch.autograd.backward(outputs, self.gradients(outputs))

    def gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [torch.ones_like(t) for t in outputs]


def loss_of(model: Model, targets: Tensors) -> Callable[[Tensors], Tensor]:
    """The loss of the last layer's output for these targets."""
    count = model.loss.count(targets) or 1.0
    return lambda output: model.loss.share(output, targets, count)


def turn_seconds(run: LayerRun, device: torch.device) -> tuple[float, float]:
    """(forward, backward) seconds of the layer. On a card: of several forwards and then their backwards in one, as those of a
    stage's layers are in training, where the host runs ahead. Waited for one by one, small layers took three times as long. What
    fresh inputs take is subtracted. Under autocast forwards use the copies of weights that there are; but those whose backward is
    timed make their own, since several with one copy add up its gradient in its own precision, and cast the sum: in training
    each backward casts its gradient."""
    watch = Stopwatch(device)
    if device.type != "cuda":
        run.receive()
        return watch.measure(run.forward), watch.measure(run.backward)

    def turns(count: int, *, forward: bool = True, backward: bool = True, anew: bool = False) -> float:
        def work() -> None:
            for _ in range(count):
                run.receive()
                if anew:
                    torch.clear_autocast_cache()
                if forward:
                    run.forward()
            if backward:
                run.backward()

        seconds = watch.measure(work)
        run.outputs.clear()
        return seconds / count

    count = turns_for(turns(1)) if split_of(run.layer) is None else SPLIT_TURNS  # its devices must take as many
    receiving, forward = turns(count, forward=False, backward=False), turns(count, backward=False)
    casts = torch.is_autocast_enabled(device.type)
    before = turns(count, backward=False, anew=True) if casts else forward
    return max(forward - receiving, 0.0), max(turns(count, anew=casts) - before, 0.0)


def steady_seconds(watch: Stopwatch, action: Callable[[], object]) -> float:
    """Mean seconds of the action, done again and again without a pause."""
    count = turns_for(watch.measure(action))

    def turns() -> None:
        for _ in range(count):
            action()

    return watch.measure(turns) / count


def turns_for(seconds: float) -> int:
    """How many turns of so many seconds make a reading; what they leave for backward is what a card writes in such a time."""
    return min(MOST_TURNS, max(1, round(TURNS_SECONDS / max(seconds, 1e-9))))


def busy_factor(run: LayerRun, seconds: float, device: torch.device) -> float:
    """How many times as long as `seconds`, which they took with pauses, forward and backward take on a device that works without:
    1, unless it is more than 15 % longer (a CPU quota, heat, other work). Their usual time counts, as much longer as the mean
    turn is than the usual one: what holds a device back now and then hits any part of a turn, not only what is timed. The least
    of a few windows, after one that warms up: a quota, which steady work uses up, shows in all of them, other work of a moment
    does not. A turn of a window's length uses it up by itself."""
    if seconds >= WINDOW_SECONDS:
        return 1.0
    _window(run, device)
    least = math.inf
    for _ in range(WINDOWS):
        timed, turn, usual_turn = _window(run, device)
        least = min(least, timed / max(seconds, 1e-9) * turn / max(usual_turn, 1e-9))
        if least <= 1 + DIFFERENT:
            break
    for parameter in run.layer.parameters():
        parameter.grad = None
    return least if least > 1 + DIFFERENT else 1.0


def _window(run: LayerRun, device: torch.device) -> tuple[float, float, float]:
    """Of turns without a pause, for a while: their usual seconds of forward and backward, and mean and usual seconds in all."""
    timed, turns, began = list[float](), list[float](), time.monotonic()
    while not turns or sum(turns) < WINDOW_SECONDS:
        timed.append(sum(turn_seconds(run, device)))
        now = time.monotonic()
        turns.append(now - began)
        began = now
    return median(timed), fmean(turns), median(turns)
