"""Which linear layers of a chain get adapters, which are held in few bits, and what trains beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from hetpipe.documents.sections.adapter import ALL_LINEAR, AdapterSection, TrainedToo
from hetpipe.files.messages import InputError, listed, natural_key, nearest, shown
from hetpipe.layers.adapters.names import Place, modules_in, uncompiled_layers
from hetpipe.layers.transforms import uncompiled_name

Names = Mapping[nn.Module, tuple[str, ...]]  # layer of the chain → names of modules in it ("" is the layer itself)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix and does no more: torch's, or the one of GPT-2."""
    return getattr(type(module), "forward", None) is nn.Linear.forward or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix [in, out], as the one of GPT-2 does."""
    return type(module).__name__ == "Conv1D"


def linear_modules(layers: nn.Sequential) -> dict[nn.Module, tuple[str, ...]]:
    """Of each layer of the chain but the last, which is the output, its linear modules by name."""
    named = uncompiled_layers(layers)
    last = named[-1][1] if len(named) > 1 else None
    return {
        layer: tuple(name for name, module in layer.named_modules() if is_linear(module))
        for _, layer in named
        if layer is not last
    }


def targets_of(section: AdapterSection, layers: nn.Sequential) -> dict[nn.Module, tuple[str, ...]]:
    """The modules of each layer that get adapters. InputError where a name is of none, or where there is nothing to adapt."""
    if section.targets == ALL_LINEAR:
        found = linear_modules(layers)
    else:
        chosen = _chosen(section.targets, layers)
        found = {
            layer: tuple(name for name, module in layer.named_modules() if module in chosen)
            for _, layer in uncompiled_layers(layers)
        }
    _check_apart(found, layers)
    if not any(found.values()):
        raise InputError("adapter: the model has no linear layer before its last layer: name what gets adapters in 'targets'")
    return found


def _chosen(targets: Sequence[str], layers: nn.Sequential) -> set[nn.Module]:
    """The modules that these names mean. InputError where one means none."""
    every, chosen, faults = list(modules_in(layers)), set[nn.Module](), list[str]()
    able = [place for place in every if adaptable(place.module)]
    for target in targets:
        called = meant_by(target, every)
        chosen |= {place.module for place in called if adaptable(place.module)}
        if not called:
            known = sorted({place.own.rpartition(".")[2] for place in able})
            faults.append(f"{shown(target)} is no module of the model{nearest(target, known)}")
        elif not any(adaptable(place.module) for place in called):
            kind = type(called[0].module).__name__
            faults.append(f"{shown(target)} is a {kind}: adapters are added to linear layers and embeddings")
    if faults and able:
        first = able[len(able) // 2]
        outside = f", or in the library's model {first.outside!r}" if first.outside not in (None, first.own) else ""
        faults.append(f"names are as in {first.own!r}{outside}, or the ends of such")
    if faults:
        raise InputError(f"adapter.targets:\n{listed(faults)}")
    return chosen


def meant_by(target: str, places: Sequence[Place]) -> list[Place]:
    """The modules that a name means: the one that can be adapted whose name in the chain, or outside, it is; else those whose
    names end with it, or whose name in the layer of this name does (`layer3.q_proj`)."""
    label, _, rest = target.partition(".")
    return [place for place in places if target in (place.own, place.outside) and adaptable(place.module)] or [
        place
        for place in places
        if any(name is not None and name.endswith(f".{target}") for name in (place.own, place.outside))
        or (place.label == label and rest and f".{uncompiled_name(place.path)}".endswith(f".{rest}"))
    ]


def described(modules: Collection[nn.Module], layers: nn.Sequential) -> Literal["all-linear"] | tuple[str, ...]:
    """`targets` that mean these modules: in as few words as do."""
    if {layer.get_submodule(name) for layer, names in linear_modules(layers).items() for name in names} == {*modules}:
        return ALL_LINEAR
    every = list(modules_in(layers))
    names = {place.module: place.own for place in reversed(every) if place.module in modules}
    ends = sorted({name.rpartition(".")[2] for name in names.values()})
    meant = {place.module for end in ends for place in meant_by(end, every) if adaptable(place.module)}
    return tuple(ends) if meant == {*modules} else tuple(sorted(names.values(), key=natural_key))


def places_of(layers: nn.Sequential) -> dict[nn.Module, list[str]]:
    """Under which names each module stands; those of a layer that stands several times are counted once."""
    places, first = dict[nn.Module, list[str]](), dict[nn.Module, str]()
    for place in modules_in(layers):
        if first.setdefault(place.layer, place.label) == place.label:
            places.setdefault(place.module, []).append(place.own)
    return places


def _check_apart(found: Names, layers: nn.Sequential) -> None:
    """InputError where a module that would get adapters has some, stands at several places, or is passed by in evaluation."""
    places = places_of(layers)
    had = next(
        (
            names[0]
            for module, names in places.items()
            for name, _ in module.named_parameters(recurse=False)
            if any(part.startswith("lora_") for part in f"{names[0]}.{name}".split("."))
        ),
        None,
    )
    if had is not None:
        raise InputError(f"the model has adapters already ({had!r}): build it without them, and add all at once")
    for layer, names in found.items():
        for name in names:
            module, above = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
            if len(places[module]) > 1:
                raise InputError(
                    f"adapter.targets: {places[module][0]!r} and {places[module][1]!r} are one module, which would "
                    "get two adapters: leave it out"
                )
            if name and isinstance(above, nn.TransformerEncoderLayer | nn.MultiheadAttention):
                raise InputError(
                    f"adapter.targets: {places[module][0]!r} is in a {type(above).__name__}, which takes its matrix "
                    "for itself in evaluation, and would pass the adapter by: leave it out"
                )


def adaptable(module: nn.Module) -> bool:
    """Whether peft adds to it."""
    return is_linear(module) or isinstance(module, nn.Embedding)


def whole_modules(kind: TrainedToo, layers: nn.Sequential) -> list[nn.Module]:
    """The modules that are meant where embeddings, the head or norms train as a whole."""
    every = uncompiled_layers(layers)
    last = every[-1][1]
    return [
        module
        for _, layer in every
        for module in layer.modules()
        if (kind == "embed" and isinstance(module, nn.Embedding))
        or (kind == "head" and layer is last and is_linear(module))
        or (kind == "norms" and _is_norm(module))
    ]


def trained_too(kinds: Sequence[TrainedToo], layers: nn.Sequential) -> Iterator[nn.Module]:
    """Modules whose own parameters train beside adapters. InputError where there is none of a kind."""
    for kind in kinds:
        found = whole_modules(kind, layers)
        if not found:
            raise InputError(f"adapter.train_also has {shown(kind)}, and the model has none")
        yield from found


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))
