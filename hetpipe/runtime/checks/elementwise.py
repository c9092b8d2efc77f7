"""An optimizer of a split stage is given shards of parameters. It must do to each number what it would do in the whole parameter:
one that looks at rows, columns or norms (Adafactor, LAMB, Muon) would train something else without a word."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError

SHAPES, STEPS, ALIKE = ((4, 6), (128, 64)), 2, 1e-12  # of matrices; some rules begin at a size


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """InputError if an optimizer of this class, with the options of one of its groups, does something else to halves of a matrix,
    each by an optimizer of its own, than to the matrix, or if that cannot be tried."""
    name, off = type(optimizer).__name__, 0.0
    try:
        for options in _options(optimizer):
            for shape in SHAPES:
                whole = _stepped(optimizer, options, shape, None)
                halves = [_stepped(optimizer, options, shape, dimension) for dimension in (0, 1)]
                off = max(off, *(float((half - whole).abs().max()) for half in halves))
    except Exception as error:
        raise InputError(
            f"whether the optimizer {name!r} works on parts of parameters, as a stage that is split over several devices has "
            f"them, could not be tried ({type(error).__name__}: {error}). Use one of torch.optim, such as AdamW, or plan without "
            "split stages"
        ) from error
    if not off <= ALIKE:
        raise InputError(
            f"the optimizer {name!r} does not treat each number of a parameter by itself (the halves of a matrix come out "
            f"{off:.1e} away from the whole one), so it cannot train a stage that is split over several devices, each of which "
            "has parts of parameters only. Use AdamW or SGD, for example, or plan without split stages"
        )


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Those of each group that has others."""
    found = list[dict[str, Any]]()
    for group in optimizer.param_groups:
        own = {key: float(v) if isinstance(v, Tensor) else v for key, v in group.items() if key not in ("params", "param_names")}
        own |= {"capturable": False} if "capturable" in own else {}
        if own not in found:
            found.append(own)
    return found


def _stepped(like: torch.optim.Optimizer, options: dict[str, Any], shape: tuple[int, int], dimension: int | None) -> Tensor:
    """A matrix after some steps, whole or in halves along a dimension."""
    draw = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(1 + STEPS))
    takes, of_class = inspect.signature(type(like)).parameters, cast("Any", type(like))
    defaults = {key: options.get(key, value) for key, value in like.defaults.items() if key in takes}
    found = list[Tensor]()
    for number in (0,) if dimension is None else (0, 1):
        value, *own = (t if dimension is None else t.chunk(2, dimension)[number] for t in (values, *gradients))
        parameter = nn.Parameter(value.clone(memory_format=torch.contiguous_format))
        optimizer = of_class([{**options, "params": [parameter]}], **defaults)
        for gradient in own:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        found.append(parameter.detach())
    return torch.cat(found, dimension or 0)
