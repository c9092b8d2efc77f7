"""The recipe of a stage: the one way from the layers of a model to what is measured and what is trained. In this order a layer is

1. what the model function returned, or what transforms made of it (`transforms`), the same on all devices;
2. given its values, where it has none yet (`weights`);
3. moved to its device, its parameters in the number type that this holds them in (`numbers`);
4. made its device's shard of itself, where the stage is split over several (`shards`);
5. run in the number types that the device computes in (`numbers.computing`), what crosses to its neighbours cast (`StageTypes`);
6. recomputed in backward, or what it saves kept on the host until then, where the plan says so (`stage`).

What is to happen to a layer on each device stands here, and whatever runs layers runs them by this: the back ends, the profiler,
what is measured of the framework, and the trials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from hetpipe.documents.number_types import AS_BUILT, NumberTypes
from hetpipe.layers.model import named_layers
from hetpipe.layers.numbers import StageTypes, computing, held_types, types_alone
from hetpipe.layers.shards.split import refuse_shards, split_layer
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.split import tied_names
from hetpipe.layers.stage import Stage
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.weights import give_values, replace_tensors

CPU = torch.device("cpu")


def make_stage(
    layers: nn.Sequential,
    lo: int,
    hi: int,
    device: torch.device = CPU,
    *,
    recompute: bool = False,
    types: StageTypes | None = None,
    group: Group | None = None,
) -> Stage:
    """The stage of layers [lo, hi) on its device: the same module objects, the same names. `group`: the devices over which it is
    split; no more than one layer of it is whole at a time."""
    stage, tied = Stage(), tied_names(layers) if group is not None else ()
    for name, layer in named_layers(layers)[lo:hi]:
        refuse_shards({name: layer})
        give_values(layers, name, layer, device if group is None else CPU)  # a whole layer may not fit one device
        if group is None:
            layer.to(device)
        if types is not None:
            _hold(layer, types.types)
        if group is not None:
            split_layer(name, layer, group, tied)
            layer.to(device)
        stage.add_module(name, layer)
    stage.recompute, stage.types = recompute, types
    return stage


@contextmanager
def layer_on(
    layers: nn.Sequential, layer: nn.Module, device: torch.device, types: NumberTypes = AS_BUILT, group: Group | None = None
) -> Iterator[nn.Module]:
    """One layer as a stage on the device runs it, split over the devices of a group if there is one, and in here what such a
    device computes in; afterwards it is where, and as empty, as it was (on one device, if on several)."""
    before = {name: tensor for name, tensor in tensors_of(layer).items() if tensor.device != device}
    empty = {name: tensor for name, tensor in before.items() if tensor.is_meta}
    home = next((tensor.device for tensor in before.values() if not tensor.is_meta), device)
    name = next(name for name, found in named_layers(layers) if found is layer)
    give_values(layers, name, layer, device)
    if len(empty) < len(before):
        layer.to(device)
    types = types if types != AS_BUILT else types_alone(layers)
    held = _hold(layer, types)
    unsplit = split_layer(name, layer, group, tied_names(layers)) if group is not None else lambda: None

    def put_back() -> None:
        unsplit()
        for tensor, data in held:
            tensor.data = data
        if len(empty) < len(before):
            layer.to(home)
        given = tensors_of(layer)
        replace_tensors(layers, {id(given[name]): tensor for name, tensor in empty.items()})

    try:
        with computing(types, device):
            yield layer
    except BaseException:
        with suppress(RuntimeError):  # a card that has failed gives nothing back
            put_back()
        raise
    put_back()


def _hold(layer: nn.Module, types: NumberTypes) -> list[tuple[Tensor, Tensor]]:
    """Let the layer's tensors, the same objects, be of the number type that the device holds them in; what was in each of those
    that were of another."""
    others = {tensor: dtype for tensor, dtype in held_types(layer, types).items() if tensor.dtype != dtype}
    before = [(tensor, tensor.data) for tensor in others]
    for tensor, dtype in others.items():
        tensor.data = tensor.data.to(dtype)
    return before
