"""What becomes of a step whose numbers are not all finite, and where the first of these comes from: which layer, on which
device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

from hetpipe.layers.model import Tensors, as_tuple, named_layers
from hetpipe.processes.progress import warn
from hetpipe.processes.stopping import RunError
from hetpipe.runtime.gradients import is_finite

if TYPE_CHECKING:
    from hetpipe.runtime.plan_engine import PlanEngine


Otherwise = Literal["stop", "skip", "ignore"]
LEAST_SCALE = 1.0  # of a loss: where gradients overflow at less, no scale is at fault


class NonFiniteError(RunError):
    """A loss or a gradient is infinite or no number."""


def goes_on(
    engine: PlanEngine, step: int, loss: float, inputs: Tensors | None, targets: Tensors | None, otherwise: Otherwise
) -> bool:
    """Whether the optimizer takes the step just done. `otherwise`: what the job says of one that is not finite. NonFiniteError
    where the run is to stop. The same on all ranks."""
    if engine.finite or (otherwise == "ignore" and not engine.overflowed):
        return True
    if engine.overflowed and _overflow(engine, step, loss, otherwise):
        return False
    what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
    if otherwise == "skip":
        if engine.world.is_main:
            warn(f"note: step {step} is left out: {what}")
        return False
    raise NonFiniteError(
        f"step {step}: {what}; the first number that is not finite is in {origin(engine, inputs, targets)}; a smaller "
        "train.optimizer.lr or train.clip_norm may help; train.on_nonfinite: skip leaves such a step out"
    )


def _overflow(engine: PlanEngine, step: int, loss: float, otherwise: Otherwise) -> bool:
    """Say that gradients have overflowed, whose loss was scaled; whether a smaller scale may help."""
    scale = engine.loss_scale.scale
    if otherwise == "stop" and (scale < LEAST_SCALE or not math.isfinite(loss)):
        return False
    if engine.world.is_main:
        warn(f"note: step {step} is left out: gradients overflow in float16; the loss scale is now {scale:g}")
    return True


class _Finding(NamedTuple):
    """`kind`: the order in which findings explain each other; then the layers' order. `text` is what is said."""

    kind: int
    layer: int
    text: str


def origin(engine: PlanEngine, inputs: Tensors | None, targets: Tensors | None) -> str:
    """Where the first number of the step just done that is not finite comes from: parameters, a layer's output (all forwards are
    run once more), the loss, or a gradient. Collective."""
    found = [*_of_parameters(engine), *_of_inputs(engine, inputs), *_of_forward(engine, inputs, targets), *_of_gradients(engine)]
    everywhere = sorted(finding for part in engine.world.gather(found) for finding in part)
    return everywhere[0].text if everywhere else "the loss itself, of outputs that are finite"


def _layers(engine: PlanEngine) -> list[tuple[int, str, nn.Module]]:
    numbers = {name: index for index, (name, _) in enumerate(named_layers(engine.layers))}
    return [
        (numbers[name], f"layer {numbers[name]} ({name!r}) of {engine.name}", layer) for name, layer in named_layers(engine.stage)
    ]


def _of_parameters(engine: PlanEngine) -> list[_Finding]:
    return [
        _Finding(0, index, f"the parameters of {name}, already before the step")
        for index, name, layer in _layers(engine)
        if not is_finite(*(p.detach() for p in layer.parameters()))
    ][:1]


def _of_inputs(engine: PlanEngine, inputs: Tensors | None) -> list[_Finding]:
    if inputs is None or not engine.is_first or is_finite(*as_tuple(inputs)):
        return []
    return [_Finding(1, 0, f"the inputs of {engine.name}: look at the data")]


def _of_forward(engine: PlanEngine, inputs: Tensors | None, targets: Tensors | None) -> list[_Finding]:
    found: list[_Finding] = []

    def watch(index: int, name: str) -> Callable[..., None]:
        def look(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            entered, left = [t for value in given for t in as_tuple(value)], as_tuple(output)
            traced = any(type(t) is not Tensor for t in left)  # fake tensors, which have no numbers
            if not traced and is_finite(*entered) and not is_finite(*left):
                found.append(_Finding(2, index, f"the output of {name}, whose inputs are finite"))

        return look

    handles = [layer.register_forward_hook(watch(index, name)) for index, name, layer in _layers(engine)]
    try:
        engine.forward_only(inputs, targets)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(found)[:1]


def _of_gradients(engine: PlanEngine) -> list[_Finding]:
    """Backward goes from the last layer to the first: the last layer is where it began."""
    return [
        _Finding(3, -index, f"the gradients of {name}")
        for index, name, layer in reversed(_layers(engine))
        if not is_finite(*(p.grad for p in layer.parameters() if p.grad is not None))
    ][:1]
