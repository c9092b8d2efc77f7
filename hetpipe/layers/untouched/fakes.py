"""Tensors without values, by which shapes are found without arithmetic; and that none of them is left behind."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from hetpipe.files.messages import InputError
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.kinds import circumstances, likeness
from hetpipe.layers.untouched.randomness import drawing

_CACHE, _ITEM = type(functools.lru_cache(lambda: None)), "_lru_list_elem"


class Fakes(TorchFunctionMode):
    """What is made while fake tensors are in use, by what was said to be at work. They let a linear layer mix types, which real
    ones do not. While `calls` is a list, it is told which functions are called, with what."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode, self.at_work = mode, "the model"
        self.calls: list[Hashable] | None = None
        self._made: list[tuple[weakref.ref[Tensor], str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs:
            given, weight = args[:2]
            if given.dtype != weight.dtype and not torch.is_autocast_enabled(given.device.type):
                names = [str(t.dtype).removeprefix("torch.") for t in (given, weight)]
                raise InputError(f"its input is {names[0]}, and its weight {names[1]}")
        if self.calls is not None:
            self.calls.append((func, likeness(args), likeness(kwargs), circumstances()))
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, FakeTensor):
                self._made.append((weakref.ref(item), self.at_work))
        return result

    def refuse_what_is_left(self) -> None:
        """InputError if a tensor that was made is kept by something that is no module of the model, whose attributes are put
        back: a real forward would find it there. (Function caches, in which it is an entry like any other, are emptied.)"""
        if self._left():
            gc.unfreeze()  # in a rank, what was imported before it was forked is not looked at otherwise
            gc.collect()
        if left := self._left():
            _empty_caches({id(tensor) for tensor, _ in left})
            del left
        if left := self._left():
            tensor, layer = left[0]
            raise InputError(
                f"{layer} keeps a tensor of shape {tuple(tensor.shape)} that it makes in its forward{_holder(tensor)}, outside "
                "of the model's modules, where one without values would stay from the look at its shapes: make it when the model "
                "is built, keep it in the module (self.table = …, or register_buffer), or call the model once before"
            )

    def _left(self) -> list[tuple[Tensor, str]]:
        return [(tensor, layer) for ref, layer in self._made if (tensor := ref()) is not None]


@contextmanager
def fake_tensors() -> Iterator[Fakes]:
    """Tensors without values, real ones beside them; without the traceback that torch logs before it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, Fakes(mode) as fakes:
            yield fakes
    finally:
        logger.disabled = before


@contextmanager
def looked_at(module: nn.Module) -> Iterator[Fakes]:
    """In here a module is run only to be looked at, on fake tensors: afterwards all is as it was. InputError if it is not."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # it would keep the weights that are cast here
    try:
        with kept(module), drawing("trace"), fake_tensors() as fakes, torch.enable_grad():
            yield fakes
        fakes.refuse_what_is_left()
    finally:
        torch.set_autocast_cache_enabled(keeps)


def _empty_caches(tensors: set[int]) -> None:
    """Empty the caches of functools that hold one of these tensors (by id)."""
    for cache in [found for found in gc.get_objects() if type(found) is _CACHE]:
        pending, seen = [cache], set[int]()
        while pending:
            held = gc.get_referents(pending.pop())
            if any(id(item) in tensors for item in held):
                cache.cache_clear()
                break
            fresh = [h for h in held if isinstance(h, dict | tuple | list) or type(h).__name__ == _ITEM]
            pending += [item for item in fresh if id(item) not in seen and not _is_namespace(item)]
            seen |= {id(item) for item in fresh}


def _is_namespace(value: Any) -> bool:
    return isinstance(value, dict) and "__builtins__" in value


def _holder(tensor: Tensor) -> str:
    """Who has it, as far as that is easily found."""
    for held in gc.get_referrers(tensor):
        for owner in gc.get_referrers(held) if isinstance(held, dict) else (held,):
            if isinstance(owner, ModuleType) and vars(owner) is held:
                return f" in {owner.__name__}"
            if isinstance(owner, dict) and "__name__" in owner and "__builtins__" in owner:
                return f" in {owner['__name__']}"
            if isinstance(owner, type):
                return f" in the class {owner.__qualname__}"
    return ""
