"""Number types as torch has them: computing in them, and tensors that cross from one device's types to another's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from hetpipe.documents.number_types import AS_BUILT, PRECISION_OF, NumberType, NumberTypes
from hetpipe.layers.transforms import tensors_of


def torch_type(name: NumberType) -> torch.dtype:
    """torch's own, of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def type_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def as_type(value: Any, name: NumberType) -> Any:
    """Floating-point tensors of a batch in this type, all else as it is; TypeError where it holds something else than tensors."""
    if isinstance(value, Tensor):
        return value.to(torch_type(name)) if value.is_floating_point() else value
    if not isinstance(value, tuple | list):
        raise TypeError(f"samples hold tensors or tuples of tensors, found {type(value).__name__}")
    return tuple(as_type(v, name) for v in value)


def computing(types: NumberTypes, device: torch.device) -> AbstractContextManager[object]:
    """In here layers compute in these types, whatever autocast the caller has; where the types say nothing, in the caller's."""
    if types.computed is None:
        return nullcontext()
    if types.casts:
        return torch.autocast(device.type, torch_type(types.computed))
    return without_autocast(device)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """In here autocast, where it is on, is off, and keeps its copies of weights. Backward runs in here: an operation's backward
    is of the types that its forward had, and what a layer computes in float32 is not cast in backward either (torch.amp:
    "Backward passes under autocast are not recommended")."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def stays(tensor: Tensor) -> bool:
    """Whether a tensor of a layer is held as it is, whatever others are held in: its numbers are of a type in which no device
    computes (float8, or packed), so that the layer itself makes others of them, and it does not train."""
    return not tensor.requires_grad and (not tensor.is_floating_point() or type_name(tensor.dtype) not in get_args(NumberType))


def turn(layers: nn.Module, name: NumberType) -> None:
    """Let all layers be of this type, but for what stays as it is."""
    dtype = torch_type(name)
    layers._apply(lambda tensor: tensor if stays(tensor) else tensor.to(dtype))


def held_type(tensor: Tensor, types: NumberTypes) -> torch.dtype:
    """In which type a device holds a parameter or buffer of a model (see `NumberTypes.holds`)."""
    name = type_name(tensor.dtype)
    if name not in get_args(NumberType):
        return tensor.dtype
    return torch_type(types.holds(cast(NumberType, name), trained=tensor.requires_grad))


@runtime_checkable
class TypedBuffers(Protocol):
    """A layer with buffers whose number type is not that of the parameters, such as rotary frequencies."""

    def buffer_type(self, name: str, held: torch.dtype) -> torch.dtype:
        """In which type this buffer is (named as in `named_buffers`) where parameters are held in `held`."""
        ...


def held_types(layer: nn.Module, types: NumberTypes) -> dict[Tensor, torch.dtype]:
    """In which type a device holds each of a layer's tensors."""
    found = {tensor: held_type(tensor, types) for tensor in tensors_of(layer).values()}
    for module in layer.modules():
        if isinstance(module, TypedBuffers) and types.held is not None:
            for name, buffer in module.named_buffers():
                found[buffer] = module.buffer_type(name, torch_type(types.held)) if buffer.is_floating_point() else buffer.dtype
    return found


def frozen_low(layers: nn.Module) -> set[NumberType]:
    """Of parameters that train in float32, and others that do not, the types of the latter that have fewer bits."""
    kinds = {(type_name(p.dtype), p.requires_grad) for p in layers.parameters()}
    return {low for low in PRECISION_OF if low != "float32" and (low, False) in kinds and ("float32", True) in kinds}


def types_alone(layers: nn.Module) -> NumberTypes:
    """In which types a model runs by itself, on any device: as it was built, or in autocast where some parameters that do not
    train are held in fewer bits than the others."""
    low = sorted(frozen_low(layers))
    return NumberTypes.of("float32", PRECISION_OF[low[0]]) if low else AS_BUILT


def callers_autocast(device: torch.device) -> NumberType | None:
    """The type of the autocast that whoever calls this has on such devices; None without one."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return cast(NumberType, type_name(torch.get_autocast_dtype(device.type)))


@dataclass(frozen=True)
class StageTypes:
    """Layers [lo, hi) of a replica, and the number types of the device that has them. `before` and `after`: those of the stages
    beside it, None where there is none."""

    lo: int
    hi: int
    types: NumberTypes = AS_BUILT
    before: NumberTypes | None = None
    after: NumberTypes | None = None

    def entered(self, tensor: Tensor) -> Tensor:
        """What has come from another device, as this one's layers take it."""
        wanted = self.types.entered
        if self.before == self.types or wanted is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(torch_type(wanted))

    def left(self, tensor: Tensor) -> Tensor:
        """What the last layer gives, as it is sent (see `NumberTypes.sent`)."""
        name = type_name(tensor.dtype)
        if self.after is None or self.after == self.types or name not in get_args(NumberType):
            return tensor
        return tensor.to(torch_type(self.types.sent(cast(NumberType, name), self.after)))


def stage_types(bounds: Sequence[tuple[int, int]], types: Sequence[NumberTypes]) -> list[StageTypes]:
    """The stages of a replica, in their order."""
    around: list[NumberTypes | None] = [None, *types, None]
    return [StageTypes(lo, hi, types[s], around[s], around[s + 2]) for s, (lo, hi) in enumerate(bounds)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [bytes], since gloo does not know every type."""
    return tensor.reshape(-1).view(torch.uint8)
