"""Any nn.Module as a model of one layer, which data parallelism needs to be: the whole of it is on every device."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetpipe import registry
from hetpipe.formats import InputError
from hetpipe.model import Tensors, as_tuple
from hetpipe.weights import materialise


class TakesDict(nn.Module):
    """A module whose forward takes a dict, called with a tuple of tensors: `names` are their keys, in order."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, value: Tensors) -> Any:
        """The module's output for the dict."""
        return self.module(dict(zip(self.names, as_tuple(value), strict=True)))


def as_one_layer(module: nn.Module, input_names: Sequence[str] | None = None) -> nn.Sequential:
    """An nn.Sequential whose only child, `model`, is the module."""
    layer = module if input_names is None else TakesDict(module, input_names)
    return nn.Sequential(OrderedDict(model=layer))


def one_layer(
    target: str,
    arguments: Sequence[Any] = (),
    input_names: Sequence[str] | None = None,
    weights: str | None = None,
) -> nn.Sequential:
    """The model of a converted job: what `target` (`package.module:Class`) returns for the positional `arguments`, as one layer.

    Args:
        target: a class of modules, or a function that returns one.
        arguments: FastSpeed's model_args.
        input_names: for a module whose forward takes a dict: the keys of the tensors of a sample's inputs, in order.
        weights: a checkpoint file of FastSpeed's, whose weights the module begins with.
    """
    module = registry.load_target(target)(*arguments)
    if not isinstance(module, nn.Module):
        raise InputError(f"{target} returns {type(module).__name__}, expected an nn.Module")
    if isinstance(module, nn.Sequential):
        materialise(module)  # a model of the zoo may wait for its values
    if weights is not None:
        load_weights(module, read_checkpoint(weights), weights)
    return as_one_layer(module, input_names)


def read_checkpoint(path: str) -> dict[str, Any]:
    """A file that FastSpeed saved: `epoch`, `model` and `optimizer`, read as tensors and plain values only."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError)
            else "it is no file of tensors and plain values alone"
        )
        raise InputError(f"cannot read the checkpoint {path}: {reason}") from error
    missing = [
        key for key in ("epoch", "model", "optimizer") if not isinstance(state, dict) or key not in state
    ]
    if missing:
        raise InputError(f"{path} is no checkpoint of FastSpeed: it has no {', '.join(map(repr, missing))}")
    found: dict[str, Any] = state
    return found


def load_weights(module: nn.Module, state: dict[str, Any], path: str) -> None:
    """Put a checkpoint's weights into the module; InputError where they are another model's."""
    try:
        module.load_state_dict(state["model"])
    except RuntimeError as error:
        raise InputError(f"{path} holds the weights of another model: {error}") from error
