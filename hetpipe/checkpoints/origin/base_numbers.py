"""Hashes of all numbers of the model that adapters were added to. A few numbers of each tensor (`base`) do not tell every
change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hetpipe.checkpoints.origin.base import is_adapted
from hetpipe.checkpoints.training_state import BaseNumbers
from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import kept_elsewhere, lineage_of, tensors_of, uncompiled, written_names
from hetpipe.layers.weights import numbers_hash, read_of
from hetpipe.processes.world import World


class Known(NamedTuple):
    """How the numbers of a tensor are known (as they were "read", or as they are "held"), and a hash of them."""

    how: str
    hash: str


def numbers_of_base(layers: nn.Sequential, world: World, stage: nn.Module | None = None) -> BaseNumbers | None:
    """Hashes of all its numbers, the same under every plan: of those that this rank has read, or holds, for its `stage` (None:
    for all layers), and of the other ranks'. None where nothing was added. InputError on every rank where two have read, or hold,
    other numbers of one tensor. Collective."""
    if not any(map(is_adapted, layers)):
        return None
    found = dict[str, tuple[int, Known]]()
    for rank, part in zip(world.ranks, world.gather(_known_here(layers, layers if stage is None else stage)), strict=True):
        for name, known in part.items():
            before, other = found.setdefault(name, (rank, known))
            if other.how == known.how and other != known:
                first, second = (f"rank {r}" + (f" on host {world.hosts[r]}" if world.hosts else "") for r in (before, rank))
                raise InputError(
                    f"{first} and {second} have different numbers in {name!r} of the model beside the adapters. Give all "
                    "hosts the same files of the model, and build it alike on all ranks"
                )
    return summary({name: known for name, (_, known) in found.items()}, [name for name, _ in named_layers(layers)])


def numbers_key(numbers: BaseNumbers | None) -> dict[str, Any]:
    """Return them as a key of a checkpoint's state."""
    return {"base_numbers": numbers.model_dump()} if numbers is not None else {}


def summary(known: Mapping[str, Known], layers: Sequence[str]) -> BaseNumbers:
    """Summarise the hashes of all tensors, given by their names in the whole model, for each of these layers."""
    parts = {layer: {name: own for name, own in sorted(known.items()) if name.startswith(f"{layer}.")} for layer in layers}
    short = {}
    for layer, part in parts.items():
        hows = {own.how for own in part.values()}
        if part:
            short[layer] = f"{hows.pop() if len(hows) == 1 else 'both'}:{_digest(part)[:8]}"
    return BaseNumbers(digest=_digest({name: own for part in parts.values() for name, own in part.items()}), layers=short)


def _digest(known: Mapping[str, Known]) -> str:
    return hashlib.sha256(repr([(name, own.hash) for name, own in known.items()]).encode()).hexdigest()[:32]


def check_numbers(saved: BaseNumbers | None, own: BaseNumbers | None, checkpoint: object) -> None:
    """InputError where adapters would go on beside other numbers than those with which they were trained, as far as both are
    known in the same way; a checkpoint may say nothing of them."""
    if saved is None or own is None or saved.digest == own.digest:
        return
    pairs = [(layer, saved.layers.get(layer, ""), text) for layer, text in own.layers.items()]
    alike = [(layer, before, now) for layer, before, now in pairs if before.partition(":")[0] == now.partition(":")[0]]
    first = next((layer for layer, before, now in alike if before != now), None)
    if first is not None or len(alike) == len(own.layers) == len(saved.layers):
        where = f"; layer {first!r} is the first that differs" if first is not None else ""
        raise InputError(
            f"checkpoint {checkpoint} was saved with adapters beside a model with other numbers, under the same names and shapes"
            f"{where}. Give the model the weights that it had, or name another folder to start anew"
        )


def _known_here(layers: nn.Sequential, stage: nn.Module) -> dict[str, Known]:
    """Hash the tensors of a stage that are not saved, by their names in the whole model as it was written; a tensor with
    several names has the first. What few bits hold is hashed as it was read, or else as it is held."""
    adapted = {name: uncompiled(layer) for name, layer in named_layers(layers) if is_adapted(layer)}
    places = dict[int, list[tuple[str, str]]]()  # of each such tensor: the layers that have it, and how it was called in them
    for name, layer in adapted.items():
        written, tensors = written_names(layer), tensors_of(layer)
        for own in sorted(kept_elsewhere(layer)):
            places.setdefault(id(tensors[own]), []).append((name, written(own)))
    found = dict[str, Known]()
    for name in (name for name, _ in stage.named_children() if name in adapted):
        layer, lineage, tensors = adapted[name], lineage_of(adapted[name]), tensors_of(adapted[name])
        assert lineage is not None
        held = dict[str, Tensor]()
        for own in kept_elsewhere(layer):
            at = places[id(tensors[own])]
            read = next((read_of(adapted[other])[called] for other, called in at if called in read_of(adapted[other])), None)
            if read is not None:
                found[".".join(at[0])] = Known("read", read)
            else:
                held[".".join(at[0])] = tensors[own]
        for each in lineage.made:
            if each.of and all(called in read_of(layer) for called in each.of):
                found |= {f"{name}.{called}": Known("read", read_of(layer)[called]) for called in each.of}
            elif each.of:
                held |= {f"{name}.{own}": tensors[own] for own in each.names if not tensors[own].requires_grad}
        found |= {own: Known("held", _held_hash(tensor)) for own, tensor in held.items() if not tensor.is_meta}
    return found


_HELD = WeakIdKeyDictionary()  # tensor → its version, and the hash of it as it was then


def _held_hash(tensor: Tensor) -> str:
    """Made anew only where the tensor has changed, which what does not train does not."""
    known: tuple[int, str] | None = _HELD.get(tensor)
    if known is None or known[0] != tensor._version:
        _HELD[tensor] = known = tensor._version, numbers_hash(tensor)
    return known[1]
