"""From a model to a chain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.names import names_in
from hetpipe.layers.replay.anatomy import anatomy_of
from hetpipe.layers.replay.compare import check_alike
from hetpipe.layers.replay.given import Given
from hetpipe.layers.replay.layers import Replayed
from hetpipe.layers.replay.skeleton import Skeleton


def chain(
    model: nn.Module, inputs: Mapping[str, Any], alone: Sequence[str] = ()
) -> tuple[nn.Sequential, Callable[[Mapping[str, Any]], tuple[Tensor, ...]]]:
    """A model as a chain of layers, for `wrap` and `auto`: its blocks (the members of its nn.ModuleLists), one after the other,
    "embed" before them and "head" behind. Each layer holds the model's own modules, and runs the model's own forward with the
    other modules left out, so outputs and gradients are the model's own.

    Args:
        model: one whose forward calls each block once. Its samples are in the first dimension of all that modules return.
        inputs: its arguments by name, of a few samples: the model runs with them, forward and backward, and so does the chain.
            Tensors [samples, …], lists with an entry for each sample, and other values, which stay the same in all calls.
        alone: names of tensors that have no samples, though their first dimension is as long as a sample's.

    Returns:
        the chain, which takes a tuple of tensors [samples, …] and gives the tensors that the model returns; and a function that
        makes this tuple of arguments like `inputs`.

    Raises:
        InputError: the model is no chain, and why; or the chain computes something else.
    """
    layers, given = chain_of(model, inputs, alone)
    check_alike(model, layers, inputs, given.tensors(inputs))
    return layers, given.tensors


def chain_of(model: nn.Module, inputs: Mapping[str, Any], alone: Sequence[str] = ()) -> tuple[nn.Sequential, Given]:
    """A model as a chain, and how the chain's tensors are made of what the model is called with. The layers hold the model's own
    modules. `inputs`: of a few samples, by which its forward is looked at; `alone`: those of them that have no samples.
    InputError says why it is no chain."""
    samples = _samples(inputs, alone)
    given = Given(inputs, samples, alone)
    tensors = given.tensors(inputs)
    more = tuple(torch.cat([tensor, tensor[:1]]) for tensor in tensors)
    anatomy = anatomy_of(model, [_run_of(given, each) for each in (tensors, more)])
    skeleton = Skeleton(model, list(anatomy.lists))
    layers = OrderedDict[str, nn.Module](
        (name, Replayed(model, skeleton, anatomy, given, at)) for at, name in enumerate(anatomy.names)
    )
    names = names_in(model)
    for layer in layers.values():
        layer.library_names = names(layer)  # type: ignore[assignment]
    found = nn.Sequential(layers)
    held = {id(parameter) for parameter in found.parameters()}
    idle = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if idle:
        raise InputError(f"{type(model).__name__} cannot be cut into layers: nothing is computed of {idle[0]!r}")
    return found, given


def _run_of(given: Given, tensors: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors, and a call with these very tensors."""
    own = [tensor.clone() for tensor in tensors]
    return own, given.arguments(own)


def _samples(inputs: Mapping[str, Any], alone: Sequence[str]) -> int:
    sizes = [len(value) for name, value in inputs.items() if name not in alone and isinstance(value, Tensor | list)]
    if not sizes:
        raise InputError("none of the inputs has samples: give tensors [samples, …]")
    return sizes[0]
