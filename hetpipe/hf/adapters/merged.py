"""A model with its adapters added to its own matrices, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError, one_line
from hetpipe.hf.chain import HFLayer
from hetpipe.layers.adapters.names import joined, trained_in, without_base
from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import lineage_of, tensors_of, uncompiled, written_names
from hetpipe.layers.weights import give_values, replace_tensors

CPU = torch.device("cpu")


def merged_layers(layers: nn.Sequential, read: Callable[[str], Tensor]) -> Iterator[dict[str, Tensor]]:
    """Of each layer in turn the tensors that `save_pretrained` stores, by their names in the model of transformers, each in the
    number type that it was read in. `read` gives what was trained, by its name in the model. A matrix in few bits is added to as
    it was used. A tensor that layers share comes with the first. The layers are on the meta device before and after."""
    seen = set[str]()
    for name, layer in named_layers(layers):
        source = lineage_of(layer).written  # type: ignore[union-attr]
        assert isinstance(source, HFLayer)
        held = {own: tensor for own, tensor in tensors_of(layer).items() if tensor.is_meta}
        give_values(layers, name, layer, CPU)
        written = written_names(layer)
        with torch.no_grad():
            for own, parameter in uncompiled(layer).named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    parameter.copy_(read(f"{name}.{written(own)}"))
        merged = _merged(name, layer)
        found = {hf: merged[own] for own, hf in source.stored_names.items() if hf not in seen}
        seen |= found.keys()
        yield {hf: tensor.to(source.origin.stored_type(hf)) for hf, tensor in found.items()}
        del merged, found
        given = tensors_of(layer)
        replace_tensors(layers, {id(given[own]): tensor for own, tensor in held.items()})


def check_mergeable(layers: nn.Sequential) -> None:
    """InputError where an adapter is of a matrix that other modules share: two different matrices are no longer one."""
    source = next(lineage.written for _, layer in named_layers(layers) if (lineage := lineage_of(layer)) is not None)
    assert isinstance(source, HFLayer)
    alike = _names_of_one(source.origin.model)
    for path, _ in trained_in(layers).adapters.values():
        shared = [name for name in alike.get(f"{path}.weight", []) if name != f"{path}.weight"]
        if shared:
            raise InputError(
                f"the adapter of {path!r} cannot be merged: its matrix is that of {shared[0].rpartition('.')[0]!r}, "
                "too, to which nothing may be added; export the adapters without --merge"
            )


def _names_of_one(model: nn.Module) -> dict[str, list[str]]:
    """The name of each parameter → all names of it."""
    names = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _merged(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """The layer's tensors by the names that they had when it was written."""
    found, written = dict[str, Tensor](), written_names(layer)
    module: Any
    for path, module in uncompiled(layer).named_modules():
        if hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            base = module.get_base_layer()
            plain = _plain(base) if isinstance(base, QuantisedLinear) else base
            before = plain.weight.detach().clone()
            module.base_layer = plain
            try:
                module.merge(safe_merge=True)
            except ValueError as error:
                raise InputError(f"layer {name!r}: the adapter of {path!r} cannot be merged: {one_line(error)}") from error
            found[joined(path, "weight")] = plain.weight.detach().clone()
            module.merged_adapters.clear()
            plain.weight.data.copy_(before)
            module.base_layer = base
        elif isinstance(module, QuantisedLinear):
            found.setdefault(joined(without_base(path), "weight"), module.weight)
    for own, tensor in tensors_of(layer).items():
        found.setdefault(written(own), tensor.detach())
    return found


def _plain(few: QuantisedLinear) -> nn.Linear:
    linear = nn.Linear(few.in_features, few.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(few.weight, requires_grad=False)
    linear.bias = few.bias
    return linear
