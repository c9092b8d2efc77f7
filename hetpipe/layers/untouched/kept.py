"""What modules keep, put back: layers that are run only to look at them must be afterwards what they were. A table that a layer
makes in its first forward and keeps would else be one of fake tensors, of another device, or of another batch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 5  # of what a module holds that is no module
MOST_ITEMS = 10_000  # of a container


@contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Afterwards the module, and all in it, has the attributes, and its buffers and other tensors have the values, that they had;
    parameters are the same objects, of which the values are left alone."""
    put_back = remember(module)
    try:
        yield
    finally:
        put_back()


def remember(module: nn.Module, *, parameters: bool = False) -> Callable[[], None]:
    """A function that puts back what the module holds now (and, with `parameters`, their values); it may be called again."""
    undo = [_tensor(p) for p in module.parameters() if not p.is_meta] if parameters else list[Callable[[], None]]()
    _remember(module, undo, {}, 0)

    def put_back() -> None:
        with torch.no_grad():
            for action in undo:
                action()

    return put_back


def _remember(value: Any, undo: list[Callable[[], None]], seen: dict[int, Any], depth: int) -> None:
    if isinstance(value, nn.Parameter) or id(value) in seen or depth > DEPTH:
        return
    seen[id(value)] = value  # alive, so that its id is no other's
    if isinstance(value, Tensor):
        if not value.is_meta:
            undo.append(_tensor(value))
    elif isinstance(value, dict | list | set | deque):
        if len(value) <= MOST_ITEMS:
            _contents(value, undo, seen, depth)
    elif isinstance(value, torch.Generator | np.random.Generator | random.Random):
        undo.append(_generator(value))
    elif isinstance(value, nn.Module):
        _contents(vars(value), undo, seen, 0)
    elif _is_plain(value):
        _contents(vars(value), undo, seen, depth + 1)


def _tensor(tensor: Tensor) -> Callable[[], None]:
    before = tensor.detach().clone()

    def put_back() -> None:  # no version tells: torch's batch norm changes its statistics without another
        if not _same(tensor, before):
            tensor.detach().copy_(before)

    return put_back


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, where no number is a number, too."""
    if torch.equal(a, b) or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _generator(generator: torch.Generator | np.random.Generator | random.Random) -> Callable[[], None]:
    if isinstance(generator, torch.Generator):
        return partial(_set, generator.set_state, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.setstate, generator.getstate())


def _set(function: Callable[[Tensor], object], state: Tensor) -> None:
    function(state)


def _contents(held: Any, undo: list[Callable[[], None]], seen: dict[int, Any], depth: int) -> None:
    before = held.copy()

    def put_back() -> None:
        held.clear()
        if isinstance(held, dict | set):
            held.update(before)
        else:
            held.extend(before)

    undo.append(put_back)
    for item in list(before.values() if isinstance(before, dict) else before):
        _remember(item, undo, seen, depth + 1)


def _is_plain(value: Any) -> bool:
    """An object with attributes of its own; no class, function or module, and nothing of torch's or numpy's own."""
    home = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(getattr(value, "__get__", None)) and not isinstance(value, type) and (
        home not in ("torch", "numpy", "builtins", "types", "functools", "importlib", "logging", "threading")
    )  # fmt: skip
