"""Adapters by the names that their modules have in a model of transformers."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hetpipe.hf.chain import HFLayer
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import lineage_of, uncompiled, written_names
from hetpipe.spec.sections.adapter import AdapterSection

ADAPTER = "default"  # peft's name of an adapter that is the only one


class Adapted(NamedTuple):
    """What trains of an adapted layer. `adapters`: its name in the model → (the path of the module that has it, in the model of
    transformers, and its name there: `lora_A.weight`). `own`: tensors of the model itself that train, their name in the model →
    their name in that of transformers."""

    adapters: dict[str, tuple[str, str]]
    own: dict[str, str]


def adapted_of(layers: nn.Sequential) -> dict[str, Adapted]:
    """Of each layer that is made of transformers, by its name in the chain."""
    found = dict[str, Adapted]()
    for name, layer in named_layers(layers):
        lineage = lineage_of(layer)
        if lineage is None or lineage.adapter is None:
            continue
        source = lineage.written
        assert isinstance(source, HFLayer)
        written = written_names(layer)
        adapters, own = dict[str, tuple[str, str]](), dict[str, str]()
        for raw, parameter in uncompiled(layer).named_parameters(remove_duplicate=False):
            said = written(raw)
            path, kind, rest = _split(said)
            if kind:
                adapters[f"{name}.{said}"] = path_of(source, path), ".".join([kind, *rest])
            elif parameter.requires_grad:
                own[f"{name}.{said}"] = source.hf_names[said]
        found[name] = Adapted(adapters, own)
    return found


def path_of(layer: HFLayer, path: str) -> str:
    """The path, in the model of transformers, of a module of a layer."""
    for own, name in layer.hf_names.items():
        if own.startswith(f"{path}.") if path else True:
            return name.removesuffix(own.removeprefix(f"{path}.") if path else own).rstrip(".")
    raise LookupError(path)


def _split(name: str) -> tuple[str, str, list[str]]:
    """(the module's path, `lora_A`, what comes behind it but for the adapter's name); no kind where it is no adapter's tensor."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), len(parts))
    return ".".join(parts[:at]), parts[at] if at < len(parts) else "", [part for part in parts[at + 1 :] if part != ADAPTER]


def section_of(layers: nn.Sequential) -> AdapterSection | None:
    """As which adapters were added to a chain; None where it has none."""
    found = (lineage_of(layer) for _, layer in named_layers(layers))
    return next((lineage.adapter for lineage in found if lineage is not None and lineage.adapter is not None), None)
