"""Makes a chain of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hetpipe.files.messages import InputError, one_line
from hetpipe.layers.replay.anatomy import Anatomy, anatomy_of
from hetpipe.layers.replay.compare import check_alike
from hetpipe.layers.replay.given import Given
from hetpipe.layers.replay.layers import layers_of
from hetpipe.layers.replay.skeleton import Skeleton, fill, without_values
from hetpipe.layers.replay.values import Stored, Values, files_of
from hetpipe.layers.untouched.fakes import fake_tensors


def chain(
    model: nn.Module,
    inputs: Mapping[str, Any],
    alone: Sequence[str] = (),
    sizes: Sequence[str] = (),
    weights: str | Path | None = None,
) -> tuple[nn.Sequential, Callable[[Mapping[str, Any]], tuple[Tensor, ...]]]:
    """A model as a chain of layers, for `wrap` and `auto`: its blocks (the members of its nn.ModuleLists), one after the other,
    "embed" before them and "head" behind. Each layer holds the model's own modules, and runs the model's own forward with the
    other modules left out, so outputs and gradients are the model's own.

    Args:
        model: one whose forward calls each block once. Its samples are in the first dimension of all that modules return.
        inputs: its arguments by name, of a few samples: tensors [samples, …], lists with an entry for each sample, and other
            values, which stay the same in all calls. Only types and shapes count: by tensors without values it is seen that
            the chain's outputs are computed by the operations of the model's own forward.
        alone: names of tensors that have no samples, though their first dimension is as long as the batch.
        sizes: names of arguments that hold whole numbers, such as the height of pictures, which may be others in other calls.
        weights: a folder of safetensors with the model's own names, such as diffusers' `save_pretrained` writes. Parameters on
            the meta device are read from there, by each rank those of its own layers.

    Returns:
        the chain, which takes a tuple of tensors [samples, …] and gives the tensors that the model returns; and a function that
        makes this tuple of arguments like `inputs`.

    Raises:
        InputError: the model is no chain, and why; or the chain computes something else.
    """
    empty = {parameter.is_meta for parameter in model.parameters()}
    if empty != {weights is not None}:
        said = "has no weights, so name their folder" if weights is None else "has weights, so leave the folder out"
        raise InputError(f"{type(model).__name__} {said} (weights=…), or build all of it on the meta device and name the folder")
    source = Stored(files_of(model, Path(weights))) if weights is not None else None
    layers, given = chain_of(model, inputs, alone, sizes, source)
    return layers, given.tensors


def chain_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    alone: Sequence[str] = (),
    sizes: Sequence[str] = (),
    source: Values | None = None,
) -> tuple[nn.Sequential, Given]:
    """A model as a chain, and how the chain's tensors are made of what the model is called with. The layers hold the model's own
    modules. `source`: of values, where the model has none. InputError says why it is no chain."""
    given = Given(inputs, _samples(inputs, alone, sizes), alone, sizes)
    tensors = given.tensors(inputs)
    with _told(model, inputs):
        anatomy = _looked_at(model, given, tensors)
        check_alike(model, anatomy, given, tensors)
    found = layers_of(model, Skeleton(model, list(anatomy.lists)), anatomy, given, source)
    held = {id(parameter) for parameter in found.parameters()}
    idle = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if idle:
        raise InputError(f"{type(model).__name__} cannot be cut into layers: nothing is computed of {idle[0]!r}")
    return found, given


def _looked_at(model: nn.Module, given: Given, tensors: Sequence[Tensor]) -> Anatomy:
    """The model's anatomy, by its forward on tensors without values, of as many samples and of one more."""
    copied = without_values(model)
    with fake_tensors():
        fill(copied)
        runs = []
        for count in (len(tensors[0]), len(tensors[0]) + 1):
            own = [torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in tensors]
            runs.append((own, given.arguments(own)))
        return anatomy_of(copied, runs)


@contextmanager
def _told(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Whatever a model says when it runs with these, as an InputError."""
    kind = type(model).__name__
    try:
        yield
    except InputError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise InputError(
            f"{kind} cannot be cut into layers: its forward asks for the values of tensors, by which it chooses shapes, or what "
            "to do"
        ) from None
    except Exception as error:
        given = [f"{name} {list(value.shape)}" for name, value in inputs.items() if isinstance(value, Tensor)]
        takes = [name for name in inspect.signature(inspect.unwrap(model.forward)).parameters if name not in ("self", *inputs)]
        raise InputError(
            f"{kind} does not run with such inputs: {one_line(error).rstrip('.')}. It is given {', '.join(given)}, and without "
            f"{', '.join(takes) or 'nothing'}"
        ) from error


def _samples(inputs: Mapping[str, Any], alone: Sequence[str], sizes: Sequence[str]) -> int:
    others = {*alone, *sizes}
    found = [len(value) for name, value in inputs.items() if name not in others and isinstance(value, Tensor | list)]
    if not found:
        raise InputError("none of the inputs has samples: give tensors [samples, …]")
    return found[0]
