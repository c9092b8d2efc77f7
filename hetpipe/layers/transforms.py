"""Transforms: layers made into others before anything is measured, planned or trained (adapters, quantised weights). What is
measured, run, saved and exported are the layers that come out; their tensors keep the names that they had in the model as it was
written, as do those of a layer that `torch.compile` holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.trials.chain_check import check_chain
from hetpipe.layers.untouched.kept import Fixed
from hetpipe.layers.untouched.kinds import LINEAGE

COMPILED = "_orig_mod"  # under which torch.compile(module) holds the module


@dataclass(frozen=True)
class Made:
    """Tensors of a layer, by their names in it, which take the place of others, or are new. `make` gives their values, from those
    of the tensors `of` (none, where they are drawn), whatever device these are on."""

    names: tuple[str, ...]
    of: tuple[str, ...]
    make: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class Changed(NamedTuple):
    """The layer that takes another's place: another one, or the same one, changed. Of the tensors of the one before
    (`attention.query.weight`): `renamed`, the old name → the new one, where that is another; `made`, what was made of them, and
    what is new. `added`: as what parameters were added to a model that is kept elsewhere, whose own, which do not train, are not
    saved."""

    layer: nn.Module
    renamed: Mapping[str, str] = {}
    made: Sequence[Made] = ()
    added: object | None = None


class Transform(Protocol):
    """Makes a layer into another one."""

    @property
    def identity(self) -> str:
        """What it does, in a few words with all that its layers' time and memory depend on: a profile is of this."""
        ...

    def apply(self, name: str, layer: nn.Module) -> Changed:
        """What takes the place of this layer, which has this name in the chain. Every rank does it alike. A layer on the meta
        device has no values yet; of another, what is made must have its values."""
        ...


@dataclass(frozen=True)
class Lineage(Fixed):
    """How a layer was made: by which transforms, of which layer as it was written, what its tensors are called in that, and how
    those are made that it does not have (of tensors by their names in it)."""

    identities: tuple[str, ...]
    written: nn.Module
    names: Mapping[str, str]
    made: tuple[Made, ...] = ()
    added: object | None = None


def transformed(layers: nn.Sequential, transforms: Sequence[Transform]) -> nn.Sequential:
    """The chain of what these make of its layers, one after the other, under the same names; of a layer that stands at several
    places once. InputError where `layers` is more than a chain, or a transform loses a tensor, or calls two alike."""
    check_chain("to be transformed", layers)
    found, of_layer = nn.Sequential(), dict[nn.Module, nn.Module]()
    for name, layer in named_layers(layers):
        if layer not in of_layer:
            plain = uncompiled(layer)
            made = reduce(lambda made, transform: _apply(transform, name, made), transforms, plain)
            if made is not plain and plain is not layer:
                raise InputError(
                    f"layer {name!r} is compiled, and another ({type(made).__name__}) takes the place of the "
                    f"{type(plain).__name__} in it: compile it afterwards, or a module that holds it"
                )
            of_layer[layer] = layer if made is plain else made
        found.add_module(name, of_layer[layer])
    return found


def _apply(transform: Transform, name: str, layer: nn.Module) -> nn.Module:
    before, earlier = list(tensors_of(layer)), lineage_of(layer)
    written = earlier.names if earlier is not None else {}
    result, renamed, made, added = transform.apply(name, layer)
    after, used = tensors_of(result), {own for each in made for own in each.of}
    names = {renamed.get(own, own): written.get(own, own) for own in before if renamed.get(own, own) in after}
    lost = next((own for own in before if renamed.get(own, own) not in after and own not in used), None)
    if lost is not None:
        raise InputError(
            f"layer {name!r}: of the transform {transform.identity!r}, {lost!r} becomes "
            f"{renamed.get(lost, lost)!r}, which the layer that it makes does not have"
        )
    plain = [names.get(own, own) for own in after]
    double = next((own for own in plain if plain.count(own) > 1), None)
    if double is not None:
        raise InputError(
            f"layer {name!r}: after the transform {transform.identity!r} two tensors stand for {double!r}; give "
            "the one that it adds another name"
        )
    identities, source = (earlier.identities, earlier.written) if earlier is not None else ((), layer)
    makers = [replace(each, names=tuple(renamed.get(own, own) for own in each.names)) for each in earlier.made] if earlier else []
    makers += [replace(each, of=tuple(written.get(own, own) for own in each.of)) for each in made]
    if added is None and earlier is not None:
        added = earlier.added
    vars(result)[LINEAGE] = Lineage((*identities, transform.identity), source, names, tuple(makers), added)
    return result


def kept_elsewhere(layer: nn.Module) -> set[str]:
    """Names of the tensors that are not saved with the layer: they are of a model that others were added to."""
    if added_as(layer) is None:
        return set()
    return {name for name, p in layer.named_parameters(remove_duplicate=False) if not p.requires_grad}


def lineage_of(layer: nn.Module) -> Lineage | None:
    """How the layer was made; None of one that is as it was written."""
    found: Lineage | None = vars(uncompiled(layer)).get(LINEAGE)
    return found


def added_as(layer: nn.Module) -> object | None:
    """As what parameters were added to the layer (see `Changed`); None where none were."""
    found = lineage_of(layer)
    return found.added if found is not None else None


def uncompiled(layer: nn.Module) -> nn.Module:
    """The module itself, of one that `torch.compile` returned."""
    while COMPILED in layer._modules:
        layer = layer.get_submodule(COMPILED)
    return layer


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a shared one under each of its names."""
    return {**dict(layer.named_parameters(remove_duplicate=False)), **dict(layer.named_buffers(remove_duplicate=False))}


def uncompiled_name(name: str) -> str:
    """A tensor's name as it is where nothing is compiled."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def without_wrappers(name: str) -> str:
    """A tensor's name before peft wrapped its module, or copied it, and torch.compile the module's."""
    parts = uncompiled_name(name).split(".")
    if "modules_to_save" in parts[:-1]:  # of which each adapter has a copy
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def written_names(module: nn.Module) -> Callable[[str], str]:
    """A function from the name of a tensor of this layer, or chain of layers, to its name in the model as it was written."""
    lineages = {name: lineage_of(layer) for name, layer in module._modules.items() if layer is not None}
    of_layers = {name: found.names for name, found in lineages.items() if found is not None}
    own = lineage_of(module)

    def written(name: str) -> str:
        name = uncompiled_name(name)
        if own is not None:
            return own.names.get(name, name)
        layer, _, rest = name.partition(".")
        return f"{layer}.{of_layers[layer].get(rest, rest)}" if layer in of_layers else name

    return written
