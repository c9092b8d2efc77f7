"""What modules and tensors of a chain are called where others look for them: in the model of a library that its layers are made
of; without one, in the chain as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from torch import nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import lineage_of, tensors_of, uncompiled, uncompiled_name, written_names

ADAPTER = "default"  # peft's name of an adapter that is the only one


class InLibrary(Protocol):
    """A layer that holds modules of a library's model (of transformers, diffusers, timm). `library_names`: the name of each of
    its tensors (`block.attn.to_q.weight`) → what that model calls it (`transformer_blocks.3.attn.to_q.weight`). Adapters are
    read, written and asked for by these. A chain whose layers do not have it goes by its own names
    (`3.block.attn.to_q.weight`)."""

    library_names: Mapping[str, str]


def library_names(layer: nn.Module, model: nn.Module) -> dict[str, str]:
    """What the model of a library calls the tensors of a layer that is made of its modules, as the layer's attribute
    `library_names` has it.

    Args:
        layer: holds modules of the model, the same objects, or tensors of it. What else it holds has no name there.
        model: as the library makes it; on the meta device, too.
    """
    return names_in(model)(layer)


def names_in(model: nn.Module) -> Callable[[nn.Module], dict[str, str]]:
    """`library_names` of any layer: the model is walked once."""
    paths, names = {module: path for path, module in model.named_modules()}, dict[int, str]()
    for name, tensor in tensors_of(model).items():
        names.setdefault(id(tensor), name)

    def of_layer(layer: nn.Module) -> dict[str, str]:
        found = dict[str, str]()
        for own, tensor in tensors_of(layer).items():
            path, _, last = own.rpartition(".")
            module = layer.get_submodule(path)
            if module in paths:
                found[own] = joined(paths[module], last)
            elif id(tensor) in names:
                found[own] = names[id(tensor)]
        return found

    return of_layer


def names_of(label: str, layer: nn.Module) -> dict[str, str] | None:
    """`library_names` of a layer, whatever was made of it since; None where it has none. InputError if they are no names."""
    lineage = lineage_of(layer)
    names = getattr(uncompiled(layer if lineage is None else lineage.written), "library_names", None)
    if names is None:
        return None
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise InputError(
            f"layer {label!r}: library_names is a {type(names).__name__}, and must be a mapping from the names of "
            "its tensors to those in the library's model: hetpipe.library_names(layer, model) makes it"
        )
    return {uncompiled_name(own): name for own, name in names.items()}


class Place(NamedTuple):
    """A module where it stands: its layer's name in the chain and the layer, its path in that and the module itself. `own`: its
    name in the chain, `layer3.layer.self_attn.q_proj`; `outside`: what it is called in the library's model, where its layer is of
    one and says it; else in the chain."""

    label: str
    layer: nn.Module
    path: str
    module: nn.Module
    own: str
    outside: str | None


def modules_in(layers: nn.Sequential) -> Iterator[Place]:
    """The modules of each layer, which has no adapters yet; one that stands at several places is at each of them."""
    for label, layer in uncompiled_layers(layers):
        names, written = names_of(label, layer), written_names(layer)
        for path, module in layer.named_modules(remove_duplicate=False):
            own = joined(label, uncompiled_name(path))
            last = next((last for last, tensor in (module._parameters | module._buffers).items() if tensor is not None), "")
            outside = own if names is None else module_outside(names, written(joined(path, last)), last)
            yield Place(label, layer, path, module, own, outside)


def module_outside(names: Mapping[str, str], own: str, last: str) -> str | None:
    """The path of a module in the library's model: where one of its tensors, which it calls `last`, is found there."""
    name = names.get(own)
    if name is None or not f".{name}".endswith(f".{last}"):
        return None
    return name.removesuffix(last).removesuffix(".")


def uncompiled_layers(layers: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Name and layer, in order, each as it is where nothing is compiled."""
    return [(label, uncompiled(layer)) for label, layer in named_layers(layers)]


def without_base(name: str) -> str:
    """A name as it was before peft wrapped the module."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def joined(*parts: str) -> str:
    """The parts that are not empty, with dots between."""
    return ".".join(part for part in parts if part)


class Trained(NamedTuple):
    """What trains of a chain with adapters, by the names that it has in a checkpoint. `adapters`: → the module that it is beside,
    by its name outside (see `Place`), and the part (`lora_A.weight`). `whole`: tensors of modules that train as a whole → their
    names outside."""

    adapters: dict[str, tuple[str, str]]
    whole: dict[str, str]


def trained_in(layers: nn.Sequential) -> Trained:
    """Name what trains in a chain with adapters. InputError where some layers say what the library calls their tensors, and
    one that trains does not."""
    found, every = Trained({}, {}), uncompiled_layers(layers)
    named = {label: names for label, layer in every if (names := names_of(label, layer)) is not None}
    for label, layer in every:
        written = written_names(layer)
        for said in (written(own) for own in _trained_tensors(layer)):
            at, kind = split_kind(said)
            own = joined(at, "weight") if kind else said
            if kind and not at and not named and [other for _, other in every].count(layer) > 1:
                raise InputError(
                    f"layer {label!r} is a {type(layer).__name__} at several places of the chain, of which peft "
                    "adds to one only: let a module hold it, and stand there"
                )
            outside = named.get(label, {}).get(own) if named else joined(label, own)
            if outside is None or (kind and not f".{outside}".endswith(".weight")):
                raise InputError(
                    f"layer {label!r} does not say what the library calls its {own!r} (in library_names, as layer "
                    f"{next(iter(named))!r} has it), so adapters have no name there"
                )
            if kind:
                found.adapters[f"{label}.{said}"] = (outside.removesuffix("weight").removesuffix("."), kind)
            else:
                found.whole[f"{label}.{said}"] = outside
    return found


def _trained_tensors(layer: nn.Module) -> Iterator[str]:
    """Names of tensors of modules that train: adapters, and such as train as a whole, with the buffers that are saved."""
    for path, module in layer.named_modules(remove_duplicate=False):
        own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        kept = {name for name, b in module._buffers.items() if b is not None and name not in module._non_persistent_buffers_set}
        yield from (joined(path, name) for name in ([*own, *sorted(kept)] if own else []))


def split_kind(name: str) -> tuple[str, str]:
    """(the path of the module, `lora_A.weight`) of an adapter's tensor, with the adapter's name or without; of another tensor the
    second is empty."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), len(parts))
    kind = [part for part in parts[at:] if part != ADAPTER]
    if kind and kind[0] == "lora_magnitude_vector":
        kind = kind[:1]  # as peft writes it
    return ".".join(parts[:at]), ".".join(kind)
