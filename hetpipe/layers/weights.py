"""Values for layers that were built on the meta device: each layer's own tensors, when and where it is needed, so that no
process ever holds a whole model that does not fit it.

A layer with tensors on the meta device has a method `values(names)`, which reads or draws the tensors of these names. What it
gives depends on the layer and its names only, so that all ranks agree. A parameter that layers share is one object before and
after: giving it a value in one layer gives it to all.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import added_as, kept_elsewhere, lineage_of, tensors_of, uncompiled, written_names


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


def materialise(layers: nn.Sequential, lo: int = 0, hi: int | None = None, device: torch.device | str = "cpu") -> None:
    """Give layers [lo, hi) their values, on `device`, one layer after the other. Tensors that have values keep them."""
    for name, layer in named_layers(layers)[lo:hi]:
        give_values(layers, name, layer, torch.device(device))


def give_values(layers: nn.Sequential, name: str, layer: nn.Module, device: torch.device) -> None:
    """A layer of the chain has values, on the device. Tensors that have values keep them. What was made of a tensor is made on
    the device, one tensor after the other: no more than one of them is there as it was written."""
    layer = uncompiled(layer)
    tensors = tensors_of(layer)
    empty = {n: tensors[n] for n in empty_names(layer)}
    if not empty:
        return
    found = lineage_of(layer)
    source = layer if found is None else found.written
    if not isinstance(source, Deferred):
        raise InputError(
            f"layer {name!r} ({type(layer).__name__}) is on the meta device ({next(iter(empty))!r} has no values), and has no "
            "method values(names) that would give them: build the model without torch.device('meta')"
        )
    new: dict[int, Tensor] = {}
    for values in _values_of(layer, source, list(empty), device):
        for own, value in values.items():
            old = empty[own]
            if value.shape != old.shape:
                raise InputError(
                    f"layer {name!r}: the values of {own!r} have shape {tuple(value.shape)}, the model has {tuple(old.shape)}"
                )
            value = value.to(device=device, dtype=old.dtype)
            new[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    replace_tensors(layers, new)


def _values_of(layer: nn.Module, source: Deferred, empty: Sequence[str], device: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """The values of these tensors of a layer: those that it was written with, then of each that was made, by itself."""
    found, written = lineage_of(layer), written_names(layer)
    made = [each for each in (found.made if found is not None else ()) if {*empty} & {*each.names}]
    later = {own for each in made for own in each.names}
    plain = [own for own in empty if own not in later]
    if plain:
        values = source.values([written(own) for own in plain])
        _note_read(layer, {written(own): values[written(own)] for own in kept_elsewhere(layer) & {*plain}})
        yield {own: values[written(own)] for own in plain}
    for each in made:
        values = source.values(each.of) if each.of else {}
        _note_read(layer, values)
        given = {own: value.to(device) for own, value in values.items()}
        yield {own: value for own, value in each.make(given).items() if own in empty}


_READ = WeakKeyDictionary[nn.Module, dict[str, str]]()  # not in the layers, whose attributes a look at them puts back


def _note_read(layer: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Keep hashes of what was read of a model that adapters were added to, once of each tensor."""
    if added_as(layer) is not None:
        known = _READ.setdefault(layer, {})
        known |= {name: numbers_hash(value) for name, value in values.items() if name not in known}


def read_of(layer: nn.Module) -> Mapping[str, str]:
    """Return hashes of the tensors that were read in this process for a layer with adapters, by the names that they had as
    the layer was written."""
    return _READ.get(uncompiled(layer), {})


def numbers_hash(tensor: Tensor) -> str:
    """Return a hash of the type, the shape and all numbers of a tensor."""
    text = repr((str(tensor.dtype), tuple(tensor.shape), int(fingerprint([tensor.detach()]))))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def replace_tensors(layers: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Put other tensors in the places of these (by id), in every layer that holds them."""
    for module in layers.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) in new:
                setattr(module, name, new[id(tensor)])


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of the bits of these tensors, int64 [] on the first one's device, at least 0, the same whatever device they are on:
    Σ wordᵢ · oddᵢ mod 2⁶², so that two rows of tensors that differ in one 32-bit word never have the same; others have it by
    chance once in 2⁶². A few blocks of words at a time: it takes no memory beside the tensors."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        odd, at = (2 * number + 1) * _ODD % 2**62, 0
        low, high = _odds(tensor.device)
        for blocks in _blocks(tensor):
            own = blocks.shape[1]
            sums = (blocks * low[:own]).sum(1) + ((blocks >> 32) * high[:own]).sum(1)
            places = torch.arange(at, at + len(sums), device=tensor.device)
            total += (sums * (places * _SPREAD + odd | 1)).sum().to(total.device)
            at += len(sums)
    return total & (2**62 - 1)


# A word of 64 bits is h · 2³² + l, so that its part of a sum is l · low + h · (2³² · low + high): odd times each half.
_ODD, _SPREAD, _BLOCK = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B8, 2**14  # two large numbers, the second even; words of a block
_BLOCKS = {"cpu": 4}  # that are looked at together, so that they stay in a processor's cache; elsewhere 256


@functools.cache
def _odds(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two rows of odd numbers, int64 [_BLOCK], the same everywhere and for ever."""
    drawn = torch.frombuffer(bytearray(hashlib.shake_256(b"odd numbers").digest(16 * _BLOCK)), dtype=torch.int64) | 1
    low, high = drawn.to(device).split(_BLOCK)
    return low, high


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The bits of a tensor as 64-bit words, int64 [blocks, _BLOCK], some at a time, and at last [1, the rest]; a word of fewer
    bytes is filled up with zeros."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    words = bits[: len(bits) // 8 * 8].view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    if whole:
        yield from torch.split(words[:whole].view(-1, _BLOCK), _BLOCKS.get(tensor.device.type, 256))
    rest = bits[whole * 8 :]
    if len(rest):
        yield nn.functional.pad(rest, (0, -len(rest) % 8)).view(1, -1).view(torch.int64)
