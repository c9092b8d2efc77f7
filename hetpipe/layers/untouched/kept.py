"""What modules keep, put back: layers that are run only to look at them must be afterwards what they were. A table that a layer
makes in its first forward and keeps would else be one of fake tensors, of another device, or of another batch."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 5  # of what a module holds that is no module
MOST_ITEMS = 10_000  # of a container
# Containers are read, and written, by what Python's own have for it: the methods of somebody's class may refuse, or do more.
KINDS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
OWN = frozenset(KINDS)
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))  # nothing in them changes
Generator: Any = torch.Generator | np.random.Generator | random.Random


class Fixed:
    """What no forward changes, by its class: nothing in an object of it is looked at, nor put back."""


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
    walk = _Walk()
    if parameters:
        walk.undo += [_tensor(p) for p in module.parameters() if not p.is_meta]
    walk.remember(module, 0)

    def put_back() -> None:
        with torch.no_grad():
            for action in walk.undo:
                action()
        if any(walk.empty):
            for held in walk.empty:
                held.clear()

    return put_back


class _Walk:
    """What is reached from a module, each once: how it is put back, and the containers in which nothing was, of Python's own
    classes: most of what a module holds."""

    def __init__(self) -> None:
        self.undo, self.empty, self._seen = list[Callable[[], None]](), list[Any](), dict[int, Any]()

    def remember(self, value: Any, depth: int) -> None:
        """Walk from here."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen or depth > DEPTH:
            return
        what = _what(kind)  # type: ignore[arg-type]
        if what is Fixed:
            return
        self._seen[id(value)] = value  # alive, so that its id is no other's
        if what is Tensor:
            if not value.is_meta and not isinstance(value, nn.Parameter):
                self.undo.append(_tensor(value))
        elif what in KINDS:
            count = what.__len__(value)
            if count <= MOST_ITEMS:
                self._contents(value, what, depth)
            if count or kind not in OWN:
                self._attributes(value, depth + 1)
        elif what is Generator:
            self.undo.append(_generator(value))
        elif what is nn.Module:
            self._attributes(value, 0)
        elif _is_plain(value):
            self._attributes(value, depth + 1)

    def _attributes(self, value: Any, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if own is not value and issubclass(type(own), dict):
            self._contents(own, dict, depth)

    def _contents(self, held: Any, kind: Any, depth: int) -> None:
        if not kind.__len__(held) and type(held) in OWN:
            self.empty.append(held)
            return
        items = tuple(kind.values(held) if issubclass(kind, dict) else kind.__iter__(held))
        if issubclass(kind, dict):
            self.undo.append(partial(_put_back_mapping, kind, held, tuple(kind.keys(held)), items))
        else:
            self.undo.append(partial(PUT_BACK[kind], held, items))
        for item in items:
            self.remember(item, depth + 1)


@cache
def _what(kind: type) -> Any:
    """Which of these an object of this class is; None: of none."""
    return next((known for known in (Fixed, Tensor, *KINDS, Generator, nn.Module) if issubclass(kind, known)), None)


def _tensor(tensor: Tensor) -> Callable[[], None]:
    before = tensor.detach().clone()

    def put_back() -> None:  # no version tells: torch's batch norm changes its statistics without another
        if tensor.layout != torch.strided or not _same(tensor, before):  # torch compares no sparse ones
            tensor.detach().copy_(before)

    return put_back


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, where no number is a number, too."""
    if a.element_size() == 1:  # of float8 torch compares no such
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if torch.equal(a, b) or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _generator(generator: Any) -> Callable[[], None]:
    if isinstance(generator, torch.Generator):
        return partial(_set, generator.set_state, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.setstate, generator.getstate())


def _set(function: Callable[[Tensor], object], state: Tensor) -> None:
    function(state)


def _put_back_mapping(kind: Any, held: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    """What changed only, and where keys did, all in their order."""
    now = tuple(kind.keys(held))
    if _are(now, keys):
        found = tuple(kind.values(held))
        if not _are(found, values):
            for key, value, other in zip(keys, values, found, strict=True):
                if other is not value:
                    kind.__setitem__(held, key, value)
        return
    own = set(map(id, keys))
    for key in now:
        if id(key) not in own:
            kind.__delitem__(held, key)
    for key, value in zip(keys, values, strict=True):
        if kind.__contains__(held, key):
            kind.__delitem__(held, key)
        kind.__setitem__(held, key, value)


def _put_back_list(held: Any, items: Sequence[Any]) -> None:
    if not _are(tuple(list.__iter__(held)), items):
        list.__setitem__(held, slice(None), items)


def _put_back_set(held: Any, items: Sequence[Any]) -> None:
    now = tuple(set.__iter__(held))
    if not _are(now, items):
        own = set(items)
        set.difference_update(held, [item for item in now if item not in own])
        set.update(held, own)


def _put_back_deque(held: Any, items: Sequence[Any]) -> None:
    if not _are(tuple(deque.__iter__(held)), items):
        deque.extend(held, items)  # what is too much for its greatest length leaves it at the other end
        while deque.__len__(held) > len(items):
            deque.popleft(held)


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """The same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


PUT_BACK: dict[Any, Callable[[Any, Sequence[Any]], None]] = {list: _put_back_list, set: _put_back_set, deque: _put_back_deque}


def _is_plain(value: Any) -> bool:
    """An object with attributes of its own; no class, function or module, and nothing of torch's or numpy's own."""
    home = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not callable(getattr(value, "__get__", None))
        and not isinstance(value, type)
        and (home not in ("torch", "numpy", "builtins", "types", "functools", "importlib", "logging", "threading"))
    )
