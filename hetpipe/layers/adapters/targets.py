"""Which linear layers of a chain get adapters, which are held in few bits, and what trains beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from hetpipe.files.messages import InputError, listed, nearest, shown
from hetpipe.layers.model import named_layers
from hetpipe.spec.sections.adapter import ALL_LINEAR, AdapterSection, TrainedToo

Names = Mapping[nn.Module, tuple[str, ...]]  # layer of the chain → names of modules in it ("" is the layer itself)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix and does no more: torch's, or the one of GPT-2, whose matrix is turned around."""
    return getattr(type(module), "forward", None) is nn.Linear.forward or type(module).__name__ == "Conv1D"


def linear_modules(layers: nn.Sequential) -> dict[nn.Module, tuple[str, ...]]:
    """Of each layer of the chain but the last, which is the output, its linear modules by name."""
    named = named_layers(layers)
    last = named[-1][1] if len(named) > 1 else None
    return {layer: tuple(name for name, module in layer.named_modules() if is_linear(module))
            for _, layer in named if layer is not last}  # fmt: skip


def targets_of(section: AdapterSection, layers: nn.Sequential) -> dict[nn.Module, tuple[str, ...]]:
    """The modules of each layer that get adapters. InputError where a name is of none, or where there is nothing to adapt."""
    if section.targets == ALL_LINEAR:
        found = linear_modules(layers)
    else:
        found = {layer: tuple(name for name, module in layer.named_modules() if adaptable(module)
                              and any(_is_called(f"{label}.{name}".rstrip("."), target) for target in section.targets))
                 for label, layer in named_layers(layers)}  # fmt: skip
        _check_each_found(section.targets, layers)
    _check_apart(found, layers)
    if not any(found.values()):
        raise InputError("adapter: the model has no linear layer before its last layer: name what gets adapters in 'targets'")
    return found


def places_of(layers: nn.Sequential) -> dict[nn.Module, list[str]]:
    """Under which names each module stands; those of a layer that stands several times are counted once."""
    places, seen = dict[nn.Module, list[str]](), set[nn.Module]()
    for label, layer in named_layers(layers):
        if layer not in seen:
            for name, module in layer.named_modules(remove_duplicate=False):
                places.setdefault(module, []).append(f"{label}.{name}".rstrip("."))
        seen.add(layer)
    return places


def _check_apart(found: Names, layers: nn.Sequential) -> None:
    """InputError where a module that would get adapters has some, stands at several places, or is passed by in evaluation."""
    places = places_of(layers)
    had = next((names[0] for module, names in places.items() for name, _ in module.named_parameters(recurse=False)
                if any(part.startswith("lora_") for part in f"{names[0]}.{name}".split("."))), None)  # fmt: skip
    if had is not None:
        raise InputError(f"the model has adapters already ({had!r}): build it without them, and add all at once")
    for layer, names in found.items():
        for name in names:
            module, above = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
            if len(places[module]) > 1:
                raise InputError(f"adapter.targets: {places[module][0]!r} and {places[module][1]!r} are one module, which would "
                                 "get two adapters: leave it out")  # fmt: skip
            if name and isinstance(above, nn.TransformerEncoderLayer | nn.MultiheadAttention):
                raise InputError(f"adapter.targets: {places[module][0]!r} is in a {type(above).__name__}, which takes its matrix "
                                 "for itself in evaluation, and would pass the adapter by: leave it out")  # fmt: skip


def adaptable(module: nn.Module) -> bool:
    """Whether peft adds to it."""
    return is_linear(module) or isinstance(module, nn.Embedding)


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_each_found(targets: Sequence[str], layers: nn.Sequential) -> None:
    every = [(f"{label}.{name}".rstrip("."), module) for label, layer in named_layers(layers)
             for name, module in layer.named_modules()]  # fmt: skip
    faults = []
    for target in targets:
        called = [module for name, module in every if _is_called(name, target)]
        if not called:
            known = sorted({name.rpartition(".")[2] for name, module in every if adaptable(module)})
            faults.append(f"{shown(target)} is no module of the model{nearest(target, known)}")
        elif not any(map(adaptable, called)):
            faults.append(f"{shown(target)} is a {type(called[0]).__name__}: adapters are added to linear layers and embeddings")
    if faults:
        raise InputError(f"adapter.targets:\n{listed(faults)}")


def trained_too(names: Sequence[TrainedToo], layers: nn.Sequential) -> Iterator[tuple[TrainedToo, nn.Module]]:
    """Modules whose own parameters train beside adapters. InputError where there is none of a name."""
    last = named_layers(layers)[-1][1]
    for name in names:
        found = [module for label, layer in named_layers(layers) for module in layer.modules()
                 if (name == "embed" and isinstance(module, nn.Embedding))
                 or (name == "head" and layer is last and is_linear(module))
                 or (name == "norms" and _is_norm(module))]  # fmt: skip
        if not found:
            raise InputError(f"adapter.train_also has {shown(name)}, and the model has none")
        yield from ((name, module) for module in found)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))
