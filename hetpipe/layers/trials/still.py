"""Layers that draw (Dropout, noise, sampling) run as if every draw came out alike, so that two runs of them can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHANCE = ("dropout_p", "dropout")  # arguments of operations that draw inside


class Still(TorchDispatchMode):
    """In here what is drawn from torch's generators is the same number everywhere: 1 for a choice, the least for a whole number,
    0.5 for any other; a permutation changes nothing, and kernels that draw inside (of attention, of RNNs) do without. Dropout
    thus keeps all, times a constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        name = func._schema.name.partition("::")[2].rstrip("_")
        if torch.Tag.nondeterministic_seeded not in func.tags and name != "random":
            return func(*args, **kwargs)
        inside = _without_chance(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in ("native_dropout", "_fused_dropout"):
            return args[0].clone(), torch.ones_like(result[1])
        if inside or not isinstance(result, Tensor):
            return result
        if name == "randperm":
            return result.copy_(torch.arange(len(result), device=result.device))
        return result.fill_(_number(name, args, result))


def _without_chance(func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation draws inside, which these arguments then keep it from."""
    found = False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _CHANCE:
            found = True
            if place < len(args):
                args[place] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    if func._schema.name.startswith("aten::rrelu"):  # (input, noise, lower, upper, …)
        found, args[2:4] = True, [sum(args[2:4]) / 2] * 2
    return found


def _number(name: str, args: list[Any], result: Tensor) -> float:
    """What a draw comes out as."""
    if name == "bernoulli":
        return 1.0
    if name in ("randint", "randint_like", "random"):
        return float(args[name != "randint"]) if len(args) > 2 else 0.0  # (low, high, size), (tensor, low, high): else from 0 on
    return 0.5 if result.is_floating_point() or result.is_complex() else 0.0
