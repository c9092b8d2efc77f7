"""Values for layers that were built on the meta device: each layer's own tensors, when and where it is needed, so that no
process ever holds a whole model that does not fit it.

A layer with tensors on the meta device has a method `values(names)`, which reads or draws the tensors of these names. What it
gives depends on the layer and its names only, so that all ranks agree. A parameter that layers share is one object before and
after: giving it a value in one layer gives it to all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers


@runtime_checkable
class Deferred(Protocol):
    """A layer that knows its values."""

    def values(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """The parameters and buffers of these names (as in `named_parameters`), on the CPU, each in memory of its own."""
        ...


COMPILED = "_orig_mod"  # under which torch.compile(module) holds the module


def uncompiled(layer: nn.Module) -> nn.Module:
    """The module itself, of one that `torch.compile` returned."""
    while COMPILED in layer._modules:
        layer = layer.get_submodule(COMPILED)
    return layer


def eagerly() -> AbstractContextManager[object]:
    """In here nothing runs compiled: what is run only to be looked at would be compiled for it, under modes that others do not
    know."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def plain_name(name: str) -> str:
    """A tensor's name as it is in a model of which nothing is compiled."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's `state_dict`, the same whether parts of it are compiled or not. Of a chain it is put together of its layers',
    without the hooks that the chain as a whole has: whoever wants names and shapes only may ask for it at any time."""
    if isinstance(module, nn.Sequential) and not module._parameters and not module._buffers:
        parts = [layer.state_dict(prefix=f"{name}.") for name, layer in named_layers(module)]
    else:
        parts = [module.state_dict()]
    return {plain_name(name): tensor for part in parts for name, tensor in part.items()}


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The module's `load_state_dict`, compiled or not, of a state of either. RuntimeError, as torch's."""
    own = {plain_name(name): name for name in module.state_dict()}
    module.load_state_dict({own.get(plain_name(name), name): tensor for name, tensor in state.items()})


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a shared one under each of its names."""
    return {
        **dict(layer.named_parameters(remove_duplicate=False)),
        **dict(layer.named_buffers(remove_duplicate=False)),
    }


def empty_names(layer: nn.Module) -> list[str]:
    """Names of the tensors without values."""
    return [name for name, tensor in tensors_of(layer).items() if tensor.is_meta]


def materialise(
    layers: nn.Sequential, lo: int = 0, hi: int | None = None, device: torch.device | str = "cpu"
) -> None:
    """Give layers [lo, hi) their values, on `device`, one layer after the other. Tensors that have values keep them."""
    for name, layer in named_layers(layers)[lo:hi]:
        _give(layers, name, layer, torch.device(device))


@contextmanager
def placed(layers: nn.Sequential, layer: nn.Module, device: torch.device) -> Iterator[None]:
    """One layer with its values on the device; afterwards it is where, and as empty, as it was (on one device, if on several)."""
    before = {name: tensor for name, tensor in tensors_of(layer).items() if tensor.device != device}
    empty = {name: tensor for name, tensor in before.items() if tensor.is_meta}
    home = next((tensor.device for tensor in before.values() if not tensor.is_meta), device)
    _give(layers, next(name for name, found in named_layers(layers) if found is layer), layer, device)
    if len(empty) < len(before):
        layer.to(device)

    def put_back() -> None:
        if len(empty) < len(before):
            layer.to(home)
        given = tensors_of(layer)
        _replace(layers, {id(given[name]): tensor for name, tensor in empty.items()})

    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # a card that has failed gives nothing back
            put_back()
        raise
    put_back()


def _give(layers: nn.Sequential, name: str, layer: nn.Module, device: torch.device) -> None:
    layer = uncompiled(layer)
    empty = {n: tensors_of(layer)[n] for n in empty_names(layer)}
    if not empty:
        return
    if not isinstance(layer, Deferred):
        raise InputError(
            f"layer {name!r} ({type(layer).__name__}) is on the meta device ({next(iter(empty))!r} has no values), and has no "
            "method values(names) that would give them: build the model without torch.device('meta')"
        )
    values = layer.values(list(empty))
    new: dict[int, Tensor] = {}
    for own, old in empty.items():
        value = values[own]
        if value.shape != old.shape:
            raise InputError(f"layer {name!r}: the values of {own!r} have shape {tuple(value.shape)}, "
                             f"the model has {tuple(old.shape)}")  # fmt: skip
        value = value.to(device=device, dtype=old.dtype)
        new[id(old)] = (
            nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        )
    _replace(layers, new)


def _replace(layers: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Put other tensors in the places of these (by id), in every layer that holds them."""
    for module in layers.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) in new:
                setattr(module, name, new[id(tensor)])


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of the bits of these tensors, int64 [] on the first one's device, at least 0: Σ wordᵢ · oddᵢ mod 2⁶², so that two
    rows of tensors that differ in one 32-bit word never have the same; others have it by chance once in 2⁶²."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        odd = (2 * number + 1) * _ODD % 2**62
        for at, part in enumerate(torch.split(_words(tensor), _PART)):
            places = torch.arange(at * _PART, at * _PART + len(part), device=part.device)
            total += (part.long() * (places * _SPREAD + odd | 1)).sum().to(total.device)
    return total & (2**62 - 1)


_ODD, _SPREAD, _PART = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B8, 2**20  # two large numbers, the second even; words at a time


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as 32-bit words; the last ones of a few bytes filled up with zeros."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    if bits.numel() % 4:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 4))
    return bits.view(torch.int32)
