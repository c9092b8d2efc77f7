"""What `wrap` and `auto` are given, in words that the ranks compare: a loss or a choice that is another on one would train
something else there, or let the others wait."""

from __future__ import annotations

import dis
import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from hetpipe.documents.cluster import Cluster
from hetpipe.files.messages import InputError
from hetpipe.processes.arithmetic import arithmetic
from hetpipe.runtime.checks.trained import modes

_PLAIN = (bool, int, float, str)
_NUMBERS, _NAMES = ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"), ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")


def arguments(
    model: nn.Module, loss_fn: Callable[..., Any], loss_weight: Any, cluster: Cluster | None, **plain: Any
) -> dict[str, Any]:
    """By their names, as values that can be sent and shown; `plain` ones as they are. InputError if the loss is scaled."""
    if any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in _used(loss_fn)):
        raise InputError(SCALED)
    told = {"loss_fn": called(loss_fn), "the content of loss_fn": content(loss_fn), **plain}
    told["loss_weight"] = called(loss_weight) if callable(loss_weight) else loss_weight
    told |= {f"torch.backends.{name}": value for name, value in arithmetic().items()}
    if callable(loss_weight):
        told["the content of loss_weight"] = content(loss_weight)
    if cluster is not None:
        told["the content of the cluster"] = hashlib.sha256(cluster.to_json().encode()).hexdigest()[:16]
    if isinstance(model, nn.Module):
        told["the mode of the model's modules"] = modes(model)
    return told


SCALED = (
    "loss_fn uses a torch.amp.GradScaler, by which each rank would leave out other steps: give the plain loss. Where a device "
    "computes in fp16 (precision=), the engine scales the loss itself, for all ranks alike (engine.loss_scale), gives gradients "
    "that are not scaled, and leaves a step out whose gradients overflow: call engine.step and optimizer.step, and no scaler"
)


def _used(function: Any) -> Iterator[Any]:
    """What a function refers to by name, closes over or is bound to, and what an object holds that is called as one."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values(), *_used(function.func))
    elif isinstance(function, MethodType):
        yield from (*_used(function.__func__), *vars(function.__self__).values())
    elif isinstance(function, FunctionType):
        found = inspect.getclosurevars(function)
        yield from (*found.nonlocals.values(), *found.globals.values())
    else:
        yield from getattr(function, "__dict__", {}).values()


def called(function: Any) -> str:
    """Where a function is defined, or of which type an object is."""
    if isinstance(function, partial):
        return f"a partial of {called(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def content(function: Any) -> str:
    """The names and numbers that a function uses, and what it or a loss of torch's is given as plain values. (Not what it closes
    over, such as the number of a rank's device.)"""
    if isinstance(function, partial):
        given = [*((str(k), v) for k, v in enumerate(function.args)), *function.keywords.items()]
        return ", ".join([content(function.func), *(f"{k}={v!r}" for k, v in given if isinstance(v, (*_PLAIN, tuple)))])
    if isinstance(function, FunctionType) and not function.__module__.startswith("torch."):  # whose releases may differ
        steps = [(step.opname, step.argval) for step in dis.get_instructions(function)]
        return ", ".join(str(value) for name, value in steps if isinstance(value, _PLAIN) and name in (*_NUMBERS, *_NAMES))
    if type(function).__module__.startswith("torch.nn."):
        return ", ".join(f"{k}={v!r}" for k, v in vars(function).items() if isinstance(v, _PLAIN) and k != "training")
    return ""
