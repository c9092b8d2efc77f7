"""Any nn.Module as a model of one layer, which data parallelism needs to be: the whole of it is on every device."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.schedule import state_differences
from hetpipe.files.limits import MOST_COUNT
from hetpipe.files.messages import InputError, cut, listed, reason, shown
from hetpipe.layers.model import Tensors, as_tuple
from hetpipe.layers.weights import load_state, materialise
from hetpipe.planning import registry


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
    target: str, arguments: Sequence[Any] = (), input_names: Sequence[str] | None = None, weights: str | None = None
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
        put_weights(module, read_checkpoint(weights), weights)
    return as_one_layer(module, input_names)


def read_checkpoint(path: str) -> dict[str, Any]:
    """A file that FastSpeed saved: `epoch`, `model` and `optimizer`, read as tensors and plain values only."""
    try:
        file = open(path, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise InputError(cut(f"cannot read the checkpoint {path}: {reason(error)}")) from None
    try:
        with file, warnings.catch_warnings(action="ignore"):  # of torch's, about formats that it then refuses
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file, or one with code in it, comes to
        raise InputError(
            f"cannot read the checkpoint {cut(path, 200)}: it is damaged, or it holds more than tensors and plain values "
            "(such files could run code, so they are not read)"
        ) from error
    missing = [key for key in ("epoch", "model", "optimizer") if not isinstance(state, dict) or key not in state]
    if missing:
        raise InputError(f"{path} is no checkpoint of FastSpeed: it has no {', '.join(map(repr, missing))}")
    _check(state, path)
    found: dict[str, Any] = state
    return found


def _check(state: dict[Any, Any], path: str) -> None:
    epoch, model, optimizer = state["epoch"], state["model"], state["optimizer"]
    faults = []
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= MOST_COUNT:
        faults.append(f"epoch: {shown(epoch)} is no number of epochs")
    if not isinstance(model, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in model.items()):
        faults.append("model: it is no mapping of names to tensors")
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        faults.append("optimizer: it is no mapping with 'state' and 'param_groups'")
    if faults:
        raise InputError(f"{path}: {len(faults)} fault(s) in this checkpoint of FastSpeed\n{listed(faults)}")


def put_weights(module: nn.Module, state: dict[str, Any], path: str) -> None:
    """Put a checkpoint's weights into the module; InputError where they are another model's."""
    try:
        load_state(module, state["model"])
    except RuntimeError as error:
        raise InputError(cut(f"{path} holds the weights of another model: {' '.join(str(error).split())}", 600)) from error


def load_optimizer(optimizer: torch.optim.Adam, state: dict[str, Any], path: str) -> None:
    """Put a checkpoint's optimizer state into the optimizer; InputError where it is another one's."""
    own = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # torch counts groups and parameters, and trusts the rest
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError(cut(f"{path}: optimizer: it is not the state of this model's Adam: {text}", 600)) from error
    faults = [
        fault
        for i, (group, before) in enumerate(zip(optimizer.param_groups, own, strict=True))
        for key in before
        for fault in state_differences(group.get(key), before[key], f"optimizer.param_groups.{i}.{key}")
    ]
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        values = optimizer.state.get(parameter, {})
        shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor) and value.dim()}
        wrong = {name: shape for name, shape in shapes.items() if shape != tuple(parameter.shape)}
        if wrong or (values and not {"step", "exp_avg", "exp_avg_sq"} <= values.keys()):
            faults.append(f"optimizer.state.{i}: {shown(wrong or list(values))}, the parameter has {tuple(parameter.shape)}")
    if faults:
        raise InputError(f"{path}: {len(faults)} fault(s) in this checkpoint of FastSpeed\n{listed(faults)}")
