"""Whether a chain computes what its model does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import as_value
from hetpipe.layers.replay.anatomy import Anatomy
from hetpipe.layers.replay.flow import tensors_in
from hetpipe.layers.replay.given import Given
from hetpipe.layers.replay.layers import layers_of, outputs_in
from hetpipe.layers.replay.numbered import Numbered
from hetpipe.layers.replay.skeleton import Skeleton, fill, without_values
from hetpipe.layers.untouched.fakes import fake_tensors


def check_alike(model: nn.Module, anatomy: Anatomy, given: Given, tensors: Sequence[Tensor]) -> None:
    """InputError unless the chain's outputs are computed of its inputs, tensors [samples, …] of these shapes, and of the model's
    parameters by the very operations of the model's forward, in training. Around the modules of its layers the chain always runs
    the forward as in evaluation, so both then do the same in evaluation, too. Only shapes are computed, whatever the model's
    size."""
    copied = without_values(model)
    skeleton, kind = Skeleton(copied, list(anatomy.lists)), type(model).__name__
    with fake_tensors(), torch.no_grad():
        fill(copied)
        layers = layers_of(copied, skeleton, anatomy, given)

        def names(run: Callable[[list[Tensor]], Any]) -> list[str]:
            """Return those of what a run gives, which may write into its inputs, and draw."""
            with Numbered() as numbered:
                for each in (copied, skeleton.model):
                    for name, buffer in each.named_buffers():
                        numbered.begins(buffer, name)
                for name, parameter in copied.named_parameters():
                    numbered.begins(parameter, name)
                inputs = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
                for number, tensor in enumerate(inputs):
                    numbered.begins(tensor, number)
                return [numbered.name(tensor) for tensor in tensors_in(run(inputs))]

        def both(*, training: bool) -> tuple[list[str], list[str]]:
            wanted = names(lambda inputs: outputs_in(copied.train(training)(**given.arguments(inputs)), anatomy))
            return wanted, names(lambda inputs: layers.train(training)(as_value(inputs)))

        wanted, found = both(training=True)
        if wanted == found:
            return
        wanted, found = both(training=False)
    if wanted == found:
        raise InputError(
            f"{kind} cannot be cut into layers: in training its forward does something between its blocks that it leaves out in "
            "evaluation, such as torch.nn.functional.dropout. Set that to nothing, or use nn.Dropout, a module, which can be cut"
        )
    if len(wanted) != len(found):
        raise InputError(f"{kind} gives {len(wanted)} tensors, and cut into layers {len(found)}")
    at = next(number for number, (own, its) in enumerate(zip(wanted, found, strict=True)) if own != its)
    raise InputError(f"{kind} cannot be cut into layers: output {at} would be computed by other operations")
