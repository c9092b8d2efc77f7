"""Layers that other ranks train. What this rank has of them is as old as the first step, and neither the model as a whole nor an
engine by another plan may use it: both would be right on no rank. A tensor is known by itself and its version, which is another
once the user has loaded values into it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hetpipe.files.messages import InputError, counted, cut
from hetpipe.layers.model import named_layers
from hetpipe.processes.world import World

LOAD = (
    "'model.load_state_dict(engine.world.first(engine.whole_state_dict()))' on every rank, before engine.close(), gives all of "
    "them the trained model; so does hetpipe.load_weights(model, folder), from a checkpoint"
)


class _Mark(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Mark:
        """As it is now."""
        return cls(weakref.ref(tensor), _version(tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is the tensor as it was. (One on the meta device takes no values.)"""
        return self.tensor() is tensor and (tensor.is_meta or _version(tensor) == self.version)


class _Marks:
    """Of one model: what is stale in each layer, and the hooks that say so."""

    def __init__(self) -> None:
        self.layers: dict[str, dict[int, _Mark]] = {}
        self.handles: list[RemovableHandle] = []
        self.stage: weakref.ref[nn.Sequential] | None = None  # which this rank trains

    def are_of(self, stage: nn.Sequential) -> bool:
        """Whether all is as it was marked while this stage was trained: looked at after each step, so it must be quick."""
        if self.stage is None or self.stage() is not stage:
            return False
        marks = (mark for layer in self.layers.values() for mark in layer.values())
        return all((tensor := mark.tensor()) is not None and mark.holds(tensor) for mark in marks)

    def watch(self, model: nn.Sequential) -> None:
        """Look at calls of the model, and at its `state_dict`."""
        if not self.handles:
            self.handles = [model.register_forward_pre_hook(_refuse_call), model.register_state_dict_pre_hook(_refuse_state)]

    def unwatch(self) -> None:
        """Look no longer."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


_OF: weakref.WeakKeyDictionary[nn.Module, _Marks] = weakref.WeakKeyDictionary()


def mark(model: nn.Sequential, stage: nn.Sequential) -> None:
    """The layers of this stage are trained here, and all others by other ranks."""
    marks = _OF.setdefault(model, _Marks())
    if marks.are_of(stage):
        return
    own = {id(t) for t in _tensors(stage)}
    for name, layer in named_layers(model):
        others = [t for t in _tensors(layer) if _changes(t) and id(t) not in own] if name not in stage._modules else []
        marks.layers[name] = {id(t): _Mark.of(t) for t in others}
    marks.stage = weakref.ref(stage)
    marks.watch(model)


def stale_layers(model: nn.Module) -> list[str]:
    """The names of the layers whose values are not those that were trained."""
    marks = _OF.get(model)
    if marks is None:
        return []
    return [name for name, layer in model.named_children() if _is_stale(layer, marks.layers.get(name, {}))]


def _is_stale(layer: nn.Module, marks: dict[int, _Mark]) -> bool:
    return bool(marks) and any(id(t) in marks and marks[id(t)].holds(t) for t in _tensors(layer))


def _tensors(layers: nn.Module) -> Iterator[Tensor]:
    """All that `state_dict` has."""
    return (value for value in layers.state_dict(keep_vars=True).values() if isinstance(value, Tensor))


def _changes(tensor: Tensor) -> bool:
    """Whether training may change it."""
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def check_fresh(model: nn.Sequential, lo: int, hi: int, world: World) -> None:
    """InputError on every rank if one would train layers [lo, hi) on from values that are stale there. Collective."""
    stale, own = set(stale_layers(model)), [name for name, _ in named_layers(model)[lo:hi]]
    for rank, names in zip(world.ranks, world.gather([name for name in own if name in stale]), strict=True):
        if names:
            raise InputError(
                f"rank {rank} would train {_called(names)} of the model, which other ranks have trained: its own values of them "
                f"are those of before. {LOAD}; then wrap the model"
            )


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """In here the model has no hooks of ours, and what is done to its values, which are put back, makes none of them newer."""
    marks = _OF.get(model)
    if marks is None or not isinstance(model, nn.Sequential):
        yield
        return
    marks.unwatch()
    stale = {
        name: [t for t in _tensors(model.get_submodule(name)) if id(t) in own and own[id(t)].holds(t)]
        for name, own in marks.layers.items()
        if name in model._modules
    }
    try:
        yield
    finally:
        marks.layers = {name: {id(t): _Mark.of(t) for t in tensors} for name, tensors in stale.items()}
        if any(stale.values()):
            marks.watch(model)


def forget(model: nn.Module) -> None:
    """Whoever calls this has given the model the values of all layers that this rank is going to train."""
    if model in _OF:
        _OF.pop(model).unwatch()


def close(model: nn.Module) -> None:
    """Nothing is trained any longer: if nothing is stale either, the model is looked at no more."""
    if model in _OF and not stale_layers(model):
        _OF.pop(model).unwatch()


def _refuse_call(model: nn.Module, _: Any) -> None:
    if names := stale_layers(model):
        raise InputError(
            f"the model was called as a whole, but other ranks have trained {_called(names)} of it, of which this rank has the "
            f"values of before. engine(x) gives the model's outputs. {LOAD}"
        )


def _refuse_state(model: nn.Module, *_: Any) -> None:
    if names := stale_layers(model):
        raise InputError(
            f"model.state_dict() was asked for, but other ranks have trained {_called(names)} of it, of which this rank has the "
            "values of before. engine.whole_state_dict(), which every rank calls, gives the trained model on the engine's first "
            f"rank, and engine.state_dict() this rank's layers. {LOAD}"
        )


def _called(names: list[str]) -> str:
    told = cut(", ".join(map(repr, names)), 120)
    return f"layer {told}" if len(names) == 1 else f"{counted(len(names), 'layer')} ({told})"
