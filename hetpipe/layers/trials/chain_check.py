"""Is it a chain? Whatever the nn.Sequential itself does beside calling its layers one after the other, and whatever layers share
beside parameters, would be lost where they lie on different devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hetpipe.files.messages import InputError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_chain(name: str, layers: object) -> None:
    """InputError if a model is more than its layers, or a layer is not ready."""
    if not isinstance(layers, nn.Sequential):
        raise InputError(
            f"model {name!r}: expected an nn.Sequential whose children are the layers, found {type(layers).__name__}"
        )
    _refuse_more_than_layers(name, layers)
    for position, (own, layer) in enumerate(layers._modules.items()):
        _check_layer(position, own, layer)
    _refuse_shared_memory(layers)


def _refuse_more_than_layers(name: str, layers: nn.Sequential) -> None:
    kind, own = type(layers), vars(layers)
    what = f"model {name!r} ({kind.__name__})"
    if kind.forward is not nn.Sequential.forward or kind.__call__ is not nn.Module.__call__ or "forward" in own:
        raise InputError(
            f"{what} has a forward of its own, which would not run: stages call its layers one after the other. Put what it does "
            "into layers (a tensor that a later layer needs travels in a tuple), and make it a plain nn.Sequential"
        )
    if hooks := [hook for hook in _HOOKS if own.get(hook)]:
        raise InputError(
            f"{what} has {hooks[0].strip('_').replace('_', ' ')} on the whole, which would not run, as no rank calls the whole: "
            "register them on its layers, where they do"
        )
    if held := [*layers._parameters, *layers._buffers]:
        raise InputError(f"{what} holds {held[0]!r} itself, beside its layers: put it into the layer that uses it")


def _check_layer(position: int, name: str, layer: nn.Module | None) -> None:
    nested = layer.named_modules(prefix=name) if layer is not None else []
    inside = [f"{at}.{k}" for at, m in nested if isinstance(m, nn.Sequential) for k, child in m._modules.items() if child is None]
    if layer is None or inside:
        what = f"layer {position} ({name!r})" if layer is None else f"{inside[0]!r}"
        raise InputError(f"{what} of the nn.Sequential is None: leave it out, or put an nn.Identity() there")
    for own, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if is_lazy(tensor):
            raise InputError(
                f"layer {name!r} ({type(layer).__name__}): {own!r} has no shape before the module has run: call the "
                "model on a sample first, or give the module its sizes"
            )


class _Place(NamedTuple):
    """Where a tensor lies: the first byte, and that behind the last."""

    device: str
    begin: int
    end: int
    layer: int
    name: str
    tensor: Tensor


def _refuse_shared_memory(layers: nn.Sequential) -> None:
    """InputError if a parameter of one layer lies in the memory of another's tensor: on two devices they would part."""
    last: _Place | None = None  # of those before, the one that ends last
    for place in sorted(_places(layers), key=lambda place: place[:4]):
        if last is None or place.device != last.device or place.begin >= last.end:
            last = place
            continue
        shared = place.layer != last.layer and place.tensor is not last.tensor
        if shared and any(isinstance(t, nn.Parameter) for t in (place.tensor, last.tensor)):
            raise InputError(
                f"{last.name!r} and {place.name!r} are two tensors in the same memory; in layers on different devices they would "
                "part. To tie two layers, let both have the same nn.Parameter (head.weight = embedding.weight)"
            )
        last = max(last, place, key=lambda place: place.end)


def _places(layers: nn.Sequential) -> Iterator[_Place]:
    """Of all that have memory, each once a layer."""
    for number, (child, layer) in enumerate(layers._modules.items()):
        assert layer is not None
        for own, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
            if plain and not tensor.is_meta and tensor.numel():
                steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                end = tensor.data_ptr() + (steps + 1) * tensor.element_size()
                yield _Place(str(tensor.device), tensor.data_ptr(), end, number, f"{child}.{own}", tensor)
