"""Part 2: the profile of the model, and each layer's bytes beside what torch's allocator says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import hetpipe
from bench.gpu.allocator import Allocator, allocator_of
from bench.gpu.page import Row, Rows, Say
from bench.gpu.subject import Subject
from hetpipe.documents.profile import Profile
from hetpipe.layers.model import Tensors, as_tuple, as_value, move, named_layers
from hetpipe.layers.recipe import layer_on
from hetpipe.measuring.layer_run import loss_of

Loss = Callable[[Tensors], Tensor]
UNITS = ("_seconds", "_bytes")


def profile_of(subject: Subject, say: Say) -> Profile:
    """The profile, measured by the first part that asks for it."""
    path = Path(subject.folder) / "profile.json"
    if path.exists():
        return Profile.load(path)
    profile = hetpipe.profile_model(
        subject.model(),
        microbatch_sizes=sorted({1, max(1, subject.microbatch // 2), subject.microbatch}),
        repeats=subject.repeats,
        device=subject.device,
        advance=lambda text: say(f"measuring {text}"),
    )
    profile.save(path)
    return profile


def layer_bytes(subject: Subject, say: Say) -> Rows:
    """Seconds of each layer and, for a micro-batch, predicted bytes beside allocated ones, where there is an allocator."""
    profile, allocator = profile_of(subject, say), allocator_of(subject.device)
    forward, backward = profile.measurements[0].times(subject.microbatch)
    rows: Rows = [
        {
            "layer": layer.name,
            "forward_seconds": float(forward[index]),
            "backward_seconds": float(backward[index]),
            "parameter_bytes": layer.parameter_bytes,
            "saved_bytes": layer.saved_bytes_per_sample * subject.microbatch,
        }
        for index, layer in enumerate(profile.layers)
    ]
    if allocator is not None:
        say("allocated bytes")
        for row, more in zip(rows, allocated_bytes(subject, allocator), strict=True):
            row |= more
            row["kept_by_saved"] = row["kept_bytes"] / row["saved_bytes"] if row["saved_bytes"] else None
    return [*rows, _sums(rows)]


def _sums(rows: Rows) -> Row:
    """All layers together; a peak is of one moment, and has no sum."""
    total: Row = {key: None if "peak" in key else sum(row[key] for row in rows) for key in rows[0] if key.endswith(UNITS)}
    if "kept_bytes" in total:
        total["kept_by_saved"] = total["kept_bytes"] / total["saved_bytes"]
    return {"layer": "all", **total}


def allocated_bytes(subject: Subject, allocator: Allocator) -> Rows:
    """What the allocator says of each layer, for one micro-batch."""
    model, device, rows = subject.model(), subject.device, list[Row]()
    inputs, targets = (move(x, device) for x in model.sample(subject.microbatch))
    tensors = as_tuple(inputs)
    for index, (_, layer) in enumerate(named_layers(model.layers)):
        loss = loss_of(model, targets) if index == len(model.layers) - 1 else None
        allocator.collect()
        before = allocator.used()
        with layer_on(model.layers, layer, device):
            parameters = allocator.used() - before
            outputs = _passed_on(layer, tensors, loss)  # the first time, libraries take their workspaces
            kept = _kept(layer, tensors, loss, allocator)
            forward, backward = _peaks(layer, tensors, loss, allocator)
        rows.append(
            {
                "allocated_parameter_bytes": parameters,
                "kept_bytes": kept,
                "forward_peak_bytes": forward,
                "backward_peak_bytes": backward,
            }
        )
        tensors = outputs
    return rows


def _forward(layer: nn.Module, tensors: tuple[Tensor, ...], zero: Tensor, loss: Loss | None) -> tuple[Tensor, ...]:
    """The layer's outputs, or the loss. What enters it is new, and kept only if autograd saves it: a sum saves nothing."""
    given = [t + zero.to(t.dtype) if t.is_floating_point() else t.clone() for t in tensors]
    output = layer(as_value(given))
    return (loss(output),) if loss is not None else as_tuple(output)


def _zero(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.zeros((), device=tensors[0].device, requires_grad=True)


def _backward(layer: nn.Module, ends: tuple[Tensor, ...]) -> None:
    ends = tuple(t for t in ends if t.requires_grad)
    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    for parameter in layer.parameters():
        parameter.grad = None


def _passed_on(layer: nn.Module, tensors: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
    """What leaves the layer, after one forward and backward."""
    ends = _forward(layer, tensors, _zero(tensors), loss)
    _backward(layer, ends)
    return tuple(t.detach() for t in ends)


def _kept(layer: nn.Module, tensors: tuple[Tensor, ...], loss: Loss | None, allocator: Allocator) -> int:
    """Bytes that are still in use after a forward when only its graph is left."""
    zero = _zero(tensors)
    allocator.collect()
    before = allocator.used()
    ends = _forward(layer, tensors, zero, loss)
    graph = [t.grad_fn for t in ends]
    del ends
    kept = allocator.used() - before
    del graph
    return kept


def _peaks(layer: nn.Module, tensors: tuple[Tensor, ...], loss: Loss | None, allocator: Allocator) -> tuple[int, int]:
    """The most bytes that a forward, with a copy of its input, and the backward after it took beside the parameters."""
    zero = _zero(tensors)
    allocator.collect()
    before = allocator.used()
    allocator.begin()
    ends = _forward(layer, tensors, zero, loss)
    forward = allocator.peak() - before
    allocator.begin()
    _backward(layer, ends)
    return forward, allocator.peak() - before
