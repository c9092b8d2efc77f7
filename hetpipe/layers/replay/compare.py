"""Whether a chain computes what its model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import evaluating
from hetpipe.layers.replay.flow import tensors_in

TOLERANCE = 1e-5  # of the largest number, by which sums in another order may differ in float32


def check_alike(model: nn.Module, layers: nn.Sequential, inputs: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """InputError where outputs, or gradients of what trains, are others than the model's own, in evaluation."""
    with evaluating(model), evaluating(layers), torch.enable_grad():
        wanted, found = _computed(model, model(**inputs)), _computed(model, layers(tuple(tensors)))
    if len(wanted) != len(found):
        raise InputError(f"{type(model).__name__} gives {len(wanted)} tensors, and cut into layers {len(found)}")
    for name, own in wanted.items():
        its = found.get(name)
        off = float("inf") if its is None or its.shape != own.shape else float((its - own).abs().max())
        if not off <= TOLERANCE * float(own.abs().max()):
            raise InputError(
                f"{type(model).__name__} cannot be cut into layers: {name} would differ by {off:.1e}, of numbers up to "
                f"{float(own.abs().max()):.1e}"
            )


def _computed(model: nn.Module, value: Any) -> dict[str, Tensor]:
    """Outputs, and the gradients of their squares."""
    outputs = [output for output in tensors_in(value) if output.is_floating_point()]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
    if trained:
        total = torch.stack([(output.float() ** 2).mean() for output in outputs]).sum()
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        found |= {f"the gradient of {name}": g for name, g in zip(trained, gradients, strict=True) if g is not None}
    return found
