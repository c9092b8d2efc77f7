"""What modules keep, put back: layers that are run only to look at them must be afterwards what they were. A table that a layer
makes in its first forward and keeps would else be one of fake tensors, of another device, or of another batch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def remember(module: nn.Module) -> Callable[[], None]:
    """A function that puts back what the module holds now; it may be called several times."""
    undo: list[Callable[[], None]] = []
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
    elif isinstance(value, torch.Generator):
        state = value.get_state()
        undo.append(lambda: value.set_state(state) and None)  # type: ignore[func-returns-value]
    elif isinstance(value, np.random.Generator):
        numbers = value.bit_generator.state
        undo.append(lambda: setattr(value.bit_generator, "state", numbers))
    elif isinstance(value, random.Random):
        place = value.getstate()
        undo.append(lambda: value.setstate(place))
    elif isinstance(value, nn.Module):
        _contents(vars(value), undo, seen, 0)
    elif _is_plain(value):
        _contents(vars(value), undo, seen, depth + 1)


def _tensor(tensor: Tensor) -> Callable[[], None]:
    before, version = tensor.detach().clone(), tensor._version

    def put_back() -> None:
        nonlocal version
        if tensor._version != version:
            tensor.detach().copy_(before)
            version = tensor._version

    return put_back


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
