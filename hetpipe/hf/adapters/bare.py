"""A chain as it was before adapters were added to it, without values: what peft is tried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import uncompiled


def bare_chain(layers: nn.Sequential) -> nn.Sequential:
    """Copy the modules, by class and name, onto the meta device; tensors that are shared stay shared."""
    modules, tensors, found = dict[nn.Module, nn.Module](), dict[int, Tensor](), nn.Sequential()
    for name, layer in named_layers(layers):
        found.add_module(name, _bare(layer, modules, tensors))
    return found


def _bare(module: Any, modules: dict[nn.Module, nn.Module], tensors: dict[int, Tensor]) -> nn.Module:
    module = uncompiled(module)
    if module in modules:
        return modules[module]
    base: nn.Module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    if isinstance(base, QuantisedLinear):
        plain = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        modules[module] = plain
        return plain
    found: nn.Module = nn.Module.__new__(type(base))
    vars(found).update(vars(base))  # what else it knows is not looked at
    modules[module] = found
    vars(found)["_parameters"] = {name: _empty(p, tensors) for name, p in base._parameters.items()}
    vars(found)["_buffers"] = {name: _empty(b, tensors) for name, b in base._buffers.items()}
    vars(found)["_modules"] = {
        name: child if child is None else _bare(child, modules, tensors) for name, child in base._modules.items()
    }
    return found


def _empty(tensor: Tensor | None, tensors: dict[int, Tensor]) -> Tensor | None:
    if tensor is not None and id(tensor) not in tensors:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        tensors[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return tensor if tensor is None else tensors[id(tensor)]
