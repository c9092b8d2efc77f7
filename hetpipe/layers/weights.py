"""Values for layers that were built on the meta device: each layer's own tensors, when and where it is needed, so that no
process ever holds a whole model that does not fit it.

A layer with tensors on the meta device has a method `values(names)`, which reads or draws the tensors of these names. What it
gives depends on the layer and its names only, so that all ranks agree. A parameter that layers share is one object before and
after: giving it a value in one layer gives it to all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import kept_elsewhere, lineage_of, tensors_of, uncompiled, written_names


@runtime_checkable
class Deferred(Protocol):
    """A layer that knows its values."""

    def values(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """The parameters and buffers of these names (as in `named_parameters`), on the CPU, each in memory of its own."""
        ...


def eagerly() -> AbstractContextManager[object]:
    """In here nothing runs compiled: what is run only to be looked at would be compiled for it, under modes that others do not
    know."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's `state_dict`, by the names of the model as it was written, whether parts of it are compiled or not; without
    what adapters were added to. Of a chain it is put together of its layers', without the hooks that the chain as a whole has:
    whoever wants names and shapes only may ask for it at any time."""
    if isinstance(module, nn.Sequential) and not module._parameters and not module._buffers:
        parts = [layer.state_dict(prefix=f"{name}.") for name, layer in named_layers(module)]
    else:
        parts = [module.state_dict()]
    written, kept = written_names(module), _not_saved(module)
    return {written(name): tensor for part in parts for name, tensor in part.items() if name not in kept}


def _not_saved(module: nn.Module) -> set[str]:
    """Of a layer, or a chain of layers."""
    inside = {f"{name}.{own}" for name, layer in module._modules.items() if layer is not None for own in kept_elsewhere(layer)}
    return inside | kept_elsewhere(module)


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The module's `load_state_dict`, compiled or not, of a state of either. RuntimeError, as torch's."""
    written, whole = written_names(module), module.state_dict()
    own = {written(name): name for name in whole}
    kept = {name: whole[name] for name in _not_saved(module)}
    module.load_state_dict(kept | {own.get(written(name), name): tensor for name, tensor in state.items()})


def empty_names(layer: nn.Module) -> list[str]:
    """Names of the tensors without values."""
    return [name for name, tensor in tensors_of(layer).items() if tensor.is_meta]


def materialise(
    layers: nn.Sequential, lo: int = 0, hi: int | None = None, device: torch.device | str = "cpu"
) -> None:
    """Give layers [lo, hi) their values, on `device`, one layer after the other. Tensors that have values keep them."""
    for name, layer in named_layers(layers)[lo:hi]:
        give_values(layers, name, layer, torch.device(device))


def give_values(layers: nn.Sequential, name: str, layer: nn.Module, device: torch.device) -> None:
    """A layer of the chain has values, on the device. Tensors that have values keep them. What was made of a tensor is made on
    the device, one tensor after the other: no more than one of them is there as it was written."""
    layer = uncompiled(layer)
    empty = {n: tensors_of(layer)[n] for n in empty_names(layer)}
    if not empty:
        return
    found = lineage_of(layer)
    source = layer if found is None else found.written
    if not isinstance(source, Deferred):
        raise InputError(
            f"layer {name!r} ({type(layer).__name__}) is on the meta device ({next(iter(empty))!r} has no values), and has no "
            "method values(names) that would give them: build the model without torch.device('meta')"
        )
    for values in _values_of(layer, source, list(empty), device):
        new: dict[int, Tensor] = {}
        for own, value in values.items():
            old = empty[own]
            if value.shape != old.shape:
                raise InputError(f"layer {name!r}: the values of {own!r} have shape {tuple(value.shape)}, "
                                 f"the model has {tuple(old.shape)}")  # fmt: skip
            value = value.to(device=device, dtype=old.dtype)
            new[id(old)] = (
                nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
            )
        replace_tensors(layers, new)


def _values_of(layer: nn.Module, source: Deferred, empty: Sequence[str], device: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """The values of these tensors of a layer: those that it was written with, then of each that was made, by itself."""
    found, written = lineage_of(layer), written_names(layer)
    made = [each for each in (found.made if found is not None else ()) if {*empty} & {*each.names}]
    later = {own for each in made for own in each.names}
    plain = [own for own in empty if own not in later]
    if plain:
        values = source.values([written(own) for own in plain])
        yield {own: values[written(own)] for own in plain}
    for each in made:
        given = {own: value.to(device) for own, value in source.values(each.of).items()} if each.of else {}
        yield {own: value for own, value in each.make(given).items() if own in empty}


def replace_tensors(layers: nn.Module, new: Mapping[int, Tensor]) -> None:
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
