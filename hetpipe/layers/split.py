"""What a tensor that crosses a boundary is like; and what must not be cut apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.numbers import type_name


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor that crosses a boundary, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.shape} of {type_name(self.dtype)}"

    def empty(self, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def filled(self) -> Tensor:
        """Numbers of this shape on the CPU, always the same; zeros where they are no floating-point numbers."""
        if not self.dtype.is_floating_point:
            return torch.zeros(self.shape, dtype=self.dtype)
        drawn = torch.randn(self.shape, dtype=self.dtype, generator=torch.Generator().manual_seed(0))
        return drawn.requires_grad_(self.requires_grad)

    @property
    def numel(self) -> int:
        """Numbers of the tensor."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize


def joint_gradients(rows: Sequence[tuple[TensorSpec, ...]]) -> list[tuple[TensorSpec, ...]]:
    """One boundary's tensors for several micro-batches: a gradient comes back for all of them if for any."""
    needed = [any(column) for column in zip(*([s.requires_grad for s in row] for row in rows), strict=True)]
    return [tuple(replace(s, requires_grad=n) for s, n in zip(row, needed, strict=True)) for row in rows]


def ancestors(nodes: Iterable[Node | None], stops: Collection[Node | None] = ()) -> dict[Node, None]:
    """All nodes of the autograd graph that a backward from these visits, in this order; not those in `stops`, nor behind them."""
    pending, seen = [*nodes], dict[Node, None]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and node not in stops:
            seen[node] = None
            pending += [parent for parent, _ in node.next_functions]
    return seen


def gradient_leaves(tensors: Iterable[Tensor], stops: Collection[Node | None] = ()) -> list[Tensor]:
    """The tensors that would be given a gradient by a backward from these, which ends at `stops`."""
    found = [getattr(node, "variable", None) for node in ancestors((t.grad_fn for t in tensors), stops)]
    return [variable for variable in found if isinstance(variable, Tensor)]


REENTRANT = "uses reentrant checkpointing, under which a pipeline loses gradients without a word"


def is_reentrant(tensors: Iterable[Tensor], stops: Collection[Node | None] = ()) -> bool:
    """Whether some of what was computed for these, behind `stops`, will be computed again in a backward of its own."""
    return any(node.name() == "CheckpointFunctionBackward" for node in ancestors((t.grad_fn for t in tensors), stops))


def tied_layers(layers: nn.Sequential) -> dict[str, tuple[int, ...]]:
    """Tied parameters: the first name of each → the layers that hold the same object."""
    names: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index, (child, layer) in enumerate(named_layers(layers)):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append((index, f"{child}.{name}"))
    found = {places[0][1]: tuple(dict.fromkeys(index for index, _ in places)) for places in names.values()}
    return {name: indices for name, indices in found.items() if len(indices) > 1}


def tied_names(layers: nn.Sequential) -> set[str]:
    """All names of the tied parameters."""
    by_name = dict(layers.named_parameters(remove_duplicate=False))
    tied = {by_name[name] for name in tied_layers(layers)}
    return {name for name, parameter in by_name.items() if parameter in tied}


CARRY = "carry the tensor instead: let the layers between take and return it beside their own, as a tuple"


def skipping_layers(layers: nn.Sequential) -> dict[str, str]:
    """Layers with skip connections by fairscale's or torchgpipe's @skippable: name → the library. (Found by the class's own
    package, so that neither needs to be installed.)"""
    found = {}
    for name, layer in named_layers(layers):
        for base in type(layer).__mro__:
            if base.__name__ == "Skippable" and hasattr(layer, "stashable"):
                found[name] = base.__module__.split(".")[0]
    return found


def refuse_skips(layers: nn.Sequential, backend: str) -> None:
    """InputError if a layer has skip connections that this back end does not know."""
    for name, library in skipping_layers(layers).items():
        if library != backend:
            raise InputError(
                f"layer {name!r} is @skippable by {library}, and the back end {backend!r} passes tensors from layer to layer "
                f"only; use the back end {library!r}, or {CARRY}"
            )
