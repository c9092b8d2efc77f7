"""An optimizer of a split stage is given shards of parameters. It must do to each number what it would do in the whole parameter:
one that looks at rows, columns or norms (Adafactor, LAMB, Muon) would train something else without a word."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError

ROWS, COLUMNS, STEPS, ALIKE = 4, 6, 2, 1e-12


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """InputError if an optimizer of this class, with these options, does something else to halves of a matrix than to the matrix,
    or if that cannot be tried."""
    name = type(optimizer).__name__
    try:
        whole = _stepped(optimizer, None)
        off = max(float((_stepped(optimizer, dimension) - whole).abs().max()) for dimension in (0, 1))
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


def _stepped(like: torch.optim.Optimizer, dimension: int | None) -> Tensor:
    """A small matrix after some steps, whole or in halves along a dimension."""
    draw = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(ROWS, COLUMNS, generator=draw, dtype=torch.float64) for _ in range(1 + STEPS))
    parts = [values] if dimension is None else list(values.chunk(2, dimension))
    parameters = [nn.Parameter(part.clone(memory_format=torch.contiguous_format)) for part in parts]
    takes = inspect.signature(type(like)).parameters
    options = {key: value for key, value in like.defaults.items() if key in takes}
    options |= {key: float(value) for key, value in options.items() if isinstance(value, Tensor)}
    optimizer: Any = type(like)
    optimizer = optimizer(parameters, **options | ({"capturable": False} if "capturable" in options else {}))
    for gradient in gradients:
        for parameter, part in zip(parameters, [gradient] if dimension is None else gradient.chunk(2, dimension), strict=True):
            parameter.grad = part.clone(memory_format=torch.contiguous_format)
        optimizer.step()
    return torch.cat([p.detach() for p in parameters], dimension or 0)
