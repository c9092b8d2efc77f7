"""A model whose layers come and go from leg to leg. The modules stay the same objects, so that it need not be built, nor its
weights be read, again: of the layers that a rank keeps nothing is touched, those that it loses take no memory of its device any
more, and those that it gets are given their values where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.state_tensors import saved_view
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import tensors_of, written_names
from hetpipe.layers.weights import empty_names, replace_tensors
from hetpipe.runtime.checks import stale


class Modules:
    """The layers of a run's model on this rank, before any of them has trained."""

    def __init__(self, layers: nn.Sequential) -> None:
        self.layers = layers
        self._empty = {name: empty_names(layer) for name, layer in named_layers(layers)}  # which know their values themselves

    def names(self, numbers: range) -> list[str]:
        """What these layers are called."""
        return [name for name, _ in named_layers(self.layers)[numbers.start : numbers.stop]]

    def set_down(self, lost: Collection[str], kept: Collection[str]) -> None:
        """The rank has these layers no longer. What they share with layers that are `kept` stays."""
        named = dict(named_layers(self.layers))
        here = {id(tensor) for name in kept for tensor in tensors_of(named[name]).values()}
        for name in lost:
            own = {key: tensor for key, tensor in tensors_of(named[name]).items() if id(tensor) not in here}
            empty = {id(tensor): _without_values(tensor) for key, tensor in own.items() if key in self._empty[name]}
            replace_tensors(self.layers, empty)
            for tensor in own.values():
                tensor.grad = None
                if id(tensor) not in empty:
                    tensor.data = tensor.data.cpu()

    def discard(self) -> None:
        """Another model takes the place of this one, of which only shapes and types are looked at from now on."""
        replace_tensors(self.layers, {id(tensor): _without_values(tensor) for tensor in tensors_of(self.layers).values()})

    def give(self, values: Mapping[str, Tensor]) -> None:
        """Tensors of the model, by their names in it, get values; then none of it is older than what other ranks have."""
        written, empty = written_names(self.layers), dict[int, Tensor]()
        for name, tensor in tensors_of(self.layers).items():
            value = values.get(f"model.{written(name)}")
            if value is None:
                continue
            if tensor.is_meta:
                value = value.view(tensor.dtype) if saved_view(tensor).dtype != tensor.dtype else value.to(tensor.dtype)
                empty[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            else:
                with torch.no_grad():
                    saved_view(tensor.detach()).copy_(value)
        replace_tensors(self.layers, empty)
        stale.forget(self.layers)


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
