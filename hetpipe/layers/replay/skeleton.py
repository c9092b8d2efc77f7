"""A model without its modules: its own forward runs, and where a module was called happens what it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.layers.untouched.kept import Fixed

EMPTY = "empty"


class Stop(BaseException):
    """The forward has done what it was run for."""


class _Turn(Fixed):
    """What happens in the run that is going on where a module is called: it gets the path, and what the module is called with."""

    act: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


class LeftOut(nn.Module, Fixed):
    """Stands where a module stood, and has its attributes, which some forwards read. Others ask a model's parameters for their
    type: it has one that is empty."""

    def __init__(self, module: nn.Module, path: str, turn: _Turn) -> None:
        super().__init__()
        vars(self).update(like=module, path=path, turn=turn)  # `like` is no module of this one
        self.register_parameter(EMPTY, nn.Parameter(torch.empty(0), requires_grad=False))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["like"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the run's `act` does."""
        return self.turn.act(self.path, args, kwargs)


def without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def fill(model: nn.Module) -> None:
    """Give it parameters and buffers that can be computed with, where these are on the meta device."""
    made = dict[int, Tensor]()
    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for held in tables:
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    new = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
                    held[name] = made.setdefault(id(tensor), new)


class Skeleton:
    """The model without the modules at these paths, of which a process has one: it is lent to the layers of the chain one after
    the other. Its parameters have no values."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self.turn, self.is_lent = _Turn(), False
        self.model = without_values(model).eval()
        self.left_out = list[LeftOut]()
        for path in paths:
            owner, _, name = path.rpartition(".")
            held = self.model.get_submodule(owner)._modules
            module = held[name]
            assert module is not None
            self.left_out.append(LeftOut(module, path, self.turn))
            held[name] = self.left_out[-1]
        self.own = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        self.helpers = helpers_of(self.model)

    def __deepcopy__(self, memo: object) -> Skeleton:
        return self  # a copy of a layer runs the same rest of the model

    @contextmanager
    def lent(self, like: Tensor, parameters: Mapping[str, Tensor], helpers: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
        """The model with these parameters and helpers, and numbers of the type and on the device of a tensor where it has none.
        RuntimeError where it is lent already, to another thread."""
        if self.is_lent:
            raise RuntimeError(
                "layers of one model run in two threads at once, and share the rest of it: let each thread have a model of its "
                "own, or run them one after the other"
            )
        before, self.is_lent = list[tuple[dict[str, Any], str, Any]](), True
        try:
            for name in self.own:
                held, own = self._place(name, "_parameters")
                before.append((held, own, held[own]))
                held[own] = parameters[name] if name in parameters else like.new_zeros(()).expand(held[own].shape)
            for path, helper in helpers.items():
                held, own = self._place(path, "_modules")
                before.append((held, own, held[own]))
                held[own] = helper
            empty = nn.Parameter(like.new_empty(0), requires_grad=False)
            for stand in self.left_out:
                before.append((stand._parameters, EMPTY, stand._parameters[EMPTY]))
                stand._parameters[EMPTY] = empty
            yield self.model
        finally:
            for held, own, value in reversed(before):
                held[own] = value
            self.is_lent = False

    def _place(self, path: str, kind: str) -> tuple[dict[str, Any], str]:
        owner, _, name = path.rpartition(".")
        return getattr(self.model.get_submodule(owner), kind), name

    def run(self, act: Callable[[str, tuple[Any, ...], dict[str, Any]], Any], given: Mapping[str, Any]) -> Any:
        """What the forward returns; None where `act` raised Stop."""
        self.turn.act = act
        try:
            return self.model(**given)
        except Stop:
            return None
        finally:
            del self.turn.act  # it holds what the run has found


def helpers_of(model: nn.Module) -> list[str]:
    """Modules without parameters that hold buffers (rotary frequencies), the topmost of them: all layers need them."""
    found = list[str]()
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and any(True for _ in module.buffers()) and not any(True for _ in module.parameters()):
            found.append(path)
    return found
