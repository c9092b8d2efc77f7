"""A stage: consecutive layers as one module, recomputed, offloaded or neither."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hetpipe.files.messages import InputError
from hetpipe.layers.batch_norm import may_normalise_batches
from hetpipe.layers.host.offload import Offload
from hetpipe.layers.model import Tensors, as_tuple, as_value, named_layers
from hetpipe.layers.numbers import StageTypes


class Stage(nn.Sequential):
    """Consecutive layers as one module; names stay those of the whole model. Tensors of a tuple come as separate arguments.
    With `recompute` each layer is checkpointed (non-reentrant), so that only the layers' inputs are kept; with `offload` what
    they save is kept in the host's memory. `types`: what is done with tensors that come from, or go to, a device that computes in
    other number types. `looks`: a recomputed layer finds the buffers that its forward found."""

    recompute, looks = False, True
    offload: Offload | None = None
    types: StageTypes | None = None

    @cached_property
    def _in_place(self) -> list[bool]:
        """Which layers say that they overwrite their input: looked at once."""
        return [works_in_place(layer) for _, layer in named_layers(self)]

    @cached_property
    def _again(self) -> list[_Again]:
        return [_Again(layer) for _, layer in named_layers(self)]

    def forward(self, *tensors: Tensor) -> Tensors:
        """Run the layers. What enters the stage, or a checkpointed layer, is kept for backward, so a layer that works
        in place (`nn.ReLU(inplace=True)`) gets a copy of it."""
        checkpointed = self.recompute and torch.is_grad_enabled()
        offload = self.offload if torch.is_grad_enabled() else None
        if offload is not None:
            offload.begin((*self.parameters(), *self.buffers(), *tensors))
        if self.types is not None:
            tensors = tuple(map(self.types.entered, tensors))
        tensors = tuple(alias(t) if t.requires_grad and t.is_leaf else t for t in tensors)
        for index, (name, layer) in enumerate(named_layers(self)):
            copy = (checkpointed or index == 0) and self._in_place[index]
            if checkpointed:
                given, versions = tensors, [t._version for t in tensors]
                contexts = self._again[index].contexts if self.looks else noop_context_fn
                tensors = as_tuple(checkpoint(_call, layer, copy, *tensors, use_reentrant=False, context_fn=contexts))
                if [t._version for t in given] != versions:
                    raise InputError(
                        f"layer {name!r} ({type(layer).__name__}) overwrites its input, so it cannot be recomputed: "
                        "let it work on a copy, or have the plan not recompute its stage"
                    )
            elif offload is not None:
                with offload.layer():
                    tensors = as_tuple(_call(layer, copy, *tensors))
                    if index == len(self) - 1:
                        offload.stay(tensors := self._left(tensors))
            else:
                tensors = as_tuple(_call(layer, copy, *tensors))
        return as_value(tensors if offload is not None else self._left(tensors))

    def _left(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tensors if self.types is None else tuple(map(self.types.left, tensors))


Name = tuple[str, str]  # of a buffer: its module's, and its own


class _Again:
    """Runs of a layer that are none of a new micro-batch: each finds the buffers that the first run found, and leaves those that
    there are (BatchNorm's statistics, a codebook). Which buffers forwards change is seen in the first, and by their versions in
    later ones, if they were frozen then."""

    def __init__(self, layer: nn.Module) -> None:
        self._holders = [(name, module._buffers) for name, module in layer.named_modules()]
        self._statistics = {(m, b) for m, module in may_normalise_batches(layer) for b in module._buffers}
        self._changing: set[Name] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of a checkpointed layer's forward, and of its recomputation."""
        found = self.values()
        return _Forward(self, found), _Recomputation(self, found)

    def buffers(self) -> dict[Name, Tensor]:
        """All that the layer has."""
        return {(m, name): buffer for m, held in self._holders for name, buffer in held.items() if buffer is not None}

    def values(self) -> dict[Name, Tensor]:
        """Copies of those that a forward changes; of all as long as that is not known."""
        if self._changing is not None and not self._changing:
            return {}
        return {key: b.clone() for key, b in self.buffers().items() if self._changing is None or key in self._changing}

    def changed(self, before: dict[Name, tuple[int, int]], found: dict[Name, Tensor]) -> None:
        """A forward is over, before which there were these versions, and values."""
        now = self.buffers()
        changed = {key for key, b in now.items() if before.get(key) != (id(b), b._version)}
        if self._changing is None:
            changed |= self._statistics | {key for key, b in now.items() if key in found and not torch.equal(b, found[key])}
        self._changing = changed | (self._changing or set())

    def put(self, values: dict[Name, Tensor]) -> None:
        """Let the buffers that a forward changes have these values."""
        with torch.no_grad():
            for module, held in self._holders:
                for name, buffer in held.items():
                    value = values.get((module, name)) if (module, name) in (self._changing or ()) else None
                    if buffer is not None and value is not None:
                        buffer.copy_(value) if buffer.shape == value.shape else held.update({name: value})


class _Forward(AbstractContextManager[None]):
    def __init__(self, again: _Again, found: dict[Name, Tensor]) -> None:
        self._again, self._found = again, found

    def __enter__(self) -> None:
        self._before = {key: (id(b), b._version) for key, b in self._again.buffers().items()}

    def __exit__(self, *_: object) -> None:
        self._again.changed(self._before, self._found)


class _Recomputation(AbstractContextManager[None]):
    """It may be entered several times: a layer that takes a gradient in its forward is recomputed for that, too."""

    def __init__(self, again: _Again, found: dict[Name, Tensor]) -> None:
        self._again, self._found = again, found

    def __enter__(self) -> None:
        self._now = self._again.values()
        self._again.put(self._found)

    def __exit__(self, *_: object) -> None:
        self._again.put(self._now)


class _Alias(torch.autograd.Function):
    """A view of a tensor's memory that is no leaf, so that a layer may write into it (`x += 1`), as it may on one device."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def alias(tensor: Tensor) -> Tensor:
    """A tensor that is no leaf, of the same memory."""
    result: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def works_in_place(layer: nn.Module) -> bool:
    """Whether a layer says that it overwrites its input."""
    return any(getattr(module, "inplace", False) is True for module in layer.modules())


def _call(layer: nn.Module, copy: bool, *tensors: Tensor) -> Tensors:
    result: Tensors = layer(as_value([t.clone() for t in tensors] if copy else tensors))
    return result
