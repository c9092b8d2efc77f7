"""Adapters by the names that their modules have in a model of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from hetpipe.hf.chain import HFLayer
from hetpipe.layers.adapters.low_rank import ADAPTER
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import lineage_of, uncompiled, written_names


class Adapted(NamedTuple):
    """What trains of an adapted layer. `adapters`: its name in the model → (the path of the module that has it, in the model of
    transformers, and its name there: `lora_A.weight`). `own`: tensors of the model itself that train, their name in the model →
    their name in that of transformers."""

    adapters: dict[str, tuple[str, str]]
    own: dict[str, str]


def adapted_of(layers: nn.Sequential) -> dict[str, Adapted]:
    """Of each layer that is made of transformers, by its name in the chain."""
    found, alike = dict[str, Adapted](), dict[str, list[str]]()
    for name, layer in named_layers(layers):
        lineage = lineage_of(layer)
        if lineage is None or lineage.adapter is None:
            continue
        source = lineage.written
        assert isinstance(source, HFLayer)
        alike = alike or names_of_one(source.origin.model)
        written = written_names(layer)
        adapters, own = dict[str, tuple[str, str]](), dict[str, str]()
        for raw, parameter in uncompiled(layer).named_parameters(remove_duplicate=False):
            said = written(raw)
            path, kind, rest = _split(said)
            if kind:
                adapters[f"{name}.{said}"] = path_of(source, path, alike), ".".join([kind, *rest])
            elif parameter.requires_grad:
                own[f"{name}.{said}"] = source.hf_names[said]
        found[name] = Adapted(adapters, own)
    return found


def path_of(layer: HFLayer, path: str, alike: Mapping[str, Sequence[str]]) -> str:
    """The path, in the model of transformers, of a module of a layer: of those that hold the same tensor the one that is called
    as it is here. `alike`: see `names_of_one`."""
    own, name = next((own, name) for own, name in layer.hf_names.items() if own.startswith(f"{path}."))
    ends = own.removeprefix(path)
    found = [same.removesuffix(ends) for same in alike.get(name, [name]) if same.endswith(ends)]
    called = path.rpartition(".")[2]
    return next((same for same in found if same.rpartition(".")[2] == called), found[0])


def names_of_one(model: nn.Module) -> dict[str, list[str]]:
    """The name of each parameter → all names of it."""
    names = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _split(name: str) -> tuple[str, str, list[str]]:
    """(the module's path, `lora_A`, what comes behind it but for the adapter's name); no kind where it is no adapter's tensor."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), len(parts))
    return ".".join(parts[:at]), parts[at] if at < len(parts) else "", [part for part in parts[at + 1 :] if part != ADAPTER]
