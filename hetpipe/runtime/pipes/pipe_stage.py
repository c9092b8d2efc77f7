"""A stage as fairscale's `Pipe` and torchgpipe's `GPipe` hold it: the one child of its partition, whatever its layers are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from hetpipe.layers.model import Tensors, as_tuple, as_value, batch_size
from hetpipe.layers.numbers import computing
from hetpipe.layers.stage import Stage
from hetpipe.runtime.recorder import GpipeRecorder

Skip = tuple[Any, str]  # the name space and the name of a tensor that skips layers
_FLOATS = {1: torch.float16, 2: torch.float16, 4: torch.float32, 8: torch.float64}


@dataclass
class PipeCall:
    """What all stages share during one call of the library. `inputs` of each micro-batch; `needed`: behind each stage but the
    last, which tensors a gradient comes back for (None: no gradients at all); `consume(output, number)` gives what the last
    stage returns for a micro-batch."""

    inputs: Sequence[Tensors]
    needed: Sequence[Sequence[bool]] | None
    consume: Callable[[Tensors, int], Tensor]
    types: dict[tuple[int, int], list[torch.dtype]] = field(default_factory=dict)
    skipping: dict[tuple[Skip, int], torch.dtype] = field(default_factory=dict)


class PipeStage(nn.Module):
    """Runs one stage on the library's worker thread of its device.

    A partition meets the micro-batches in their order, so they are counted here, and what the library chunks is only a row of
    places, one a micro-batch: the first stage takes the micro-batch's inputs, of whatever size, from the call, and
    the last one turns its output into the loss of that micro-batch. Between two stages only floating-point tensors travel (the
    libraries' copies give gradients to all): integers and booleans go as the bits of a float and come back as what they were.
    What the stage computes in is entered here, since the worker threads know no caller's autocast.
    """

    def __init__(self, stage: Stage, index: int, count: int, recorder: GpipeRecorder) -> None:
        nn.Module.__init__(self)  # a library's own base class, if there is one, wants arguments
        self.stage, self.index, self.last = stage, index, index == count - 1
        self.recorder = recorder
        self.call: PipeCall | None = None
        self.met = 0
        for parameter in (p for p in stage.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(recorder.touch)

    def begin(self, call: PipeCall | None) -> None:
        """The library's next call works on these micro-batches."""
        self.call, self.met = call, 0

    def forward(self, given: Tensors) -> Tensors:
        """One micro-batch."""
        call, i = self.call, self.met
        assert call is not None
        self.met += 1
        recorder = self.recorder
        recorder.begin(f"{self.index}F{i}", "F", i, batch_size(call.inputs[i]))
        tensors = list(as_tuple(call.inputs[i])) if self.index == 0 else self._arrived(as_tuple(given), call, i)
        register_hooks = torch.is_grad_enabled()
        if register_hooks:
            _hook(tensors, recorder.touch, "all")
        with computing(self.stage.types.types, recorder.device) if self.stage.types is not None else nullcontext():
            output = self.stage(*tensors)
            result = call.consume(output, i).reshape(1) if self.last else output
        if register_hooks:
            _hook(as_tuple(result), lambda _: recorder.begin_backward(self.index, i), "any")
        recorder.finish()
        return result if self.last else self._leaving(as_tuple(output), call, i)

    def _leaving(self, tensors: Sequence[Tensor], call: PipeCall, i: int) -> Tensors:
        call.types[self.index, i] = [t.dtype for t in tensors]
        return as_value([_packed(t) for t in _only_needed(tensors, call, self.index)])

    def _arrived(self, tensors: Sequence[Tensor], call: PipeCall, i: int) -> list[Tensor]:
        types = call.types.pop((self.index - 1, i))
        needed = _only_needed(tensors, call, self.index - 1)
        return [_unpacked(t, dtype) for t, dtype in zip(needed, types, strict=True)]


def _only_needed(tensors: Sequence[Tensor], call: PipeCall, boundary: int) -> Sequence[Tensor]:
    if call.needed is None:
        return tensors
    return [t if needed else t.detach() for t, needed in zip(tensors, call.needed[boundary], strict=True)]


def _hook(tensors: Iterable[Tensor], function: Callable[[Any], None], mode: Any) -> None:
    watched = [t for t in tensors if t.requires_grad]
    if watched:
        register_multi_grad_hook(watched, function, mode=mode)


def _packed(tensor: Tensor) -> Tensor:
    """A floating-point tensor with the same bits (of one-byte types: the same values)."""
    if tensor.is_floating_point():
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    kind = _FLOATS[tensor.element_size()]
    return tensor.to(kind) if tensor.element_size() == 1 else tensor.view(kind)


def _unpacked(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return tensor
    if dtype.is_complex:
        return torch.view_as_complex(tensor.contiguous())
    return tensor.detach().to(dtype) if dtype.itemsize == 1 else tensor.detach().view(dtype)


class _WithGradients(torch.autograd.Function):
    """A tensor, whose backward makes gradients of others: zeros, to which others may be added."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.zeros = [(other.new_zeros(()), other.shape) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(zero.expand(shape) for zero, shape in ctx.zeros)


def _with_gradients(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    needed = [other for other in others if other.requires_grad]
    if not needed or not tensor.is_floating_point():
        return tensor
    result: Tensor = _WithGradients.apply(tensor, *needed)  # type: ignore[no-untyped-call]
    return result


def _skips_of(layers: Iterable[Any], base: Any) -> tuple[list[Skip], list[Skip]]:
    """(what leaves, what enters) these layers by skip connections; both ends inside: neither."""
    stashed: list[Skip] = []
    popped: list[Skip] = []
    for layer in layers:
        if isinstance(layer, base):
            popped += layer.poppable()
            stashed += layer.stashable()
    return [s for s in stashed if s not in popped], [s for s in popped if s not in stashed]


def skipping_stage(base: type) -> type[PipeStage]:
    """A PipeStage that tells a library, whose class of modules with skip connections is `base`, which tensors of such layers
    leave the stage and enter it.

    What skips is handed over in the layers' `dispatch`: the libraries' portals want a gradient for every tensor that they carry.
    So here, too, integers and booleans go as the bits of a float, and what is popped gets a gradient of zeros at least."""

    class SkippingStage(PipeStage, base):  # type: ignore[misc]
        stashable_names = poppable_names = frozenset[str]()

        def begin(self, call: PipeCall | None) -> None:
            super().begin(call)
            for layer in self.stage:
                if isinstance(layer, base):
                    vars(layer).pop("dispatch", None)
                    if call is not None:
                        vars(layer)["dispatch"] = partial(self._dispatch, call, layer, layer.dispatch)

        def _dispatch(self, call: PipeCall, layer: Any, dispatch: Any, given: Tensors, stash: Any, pop: Any) -> Tensors:
            names, popped = {name: (space, name) for space, name in (*layer.stashable(), *layer.poppable())}, list[Tensor]()
            i = self.met - 1

            def handle_stash(name: str, tensor: Tensor | None) -> None:
                if tensor is not None:
                    call.skipping[names[name], i] = tensor.dtype
                stash(name, None if tensor is None else _packed(tensor))

            def handle_pop(name: str) -> Tensor | None:
                tensor: Tensor | None = pop(name)
                if tensor is None:
                    return None
                popped.append(tensor)
                return _unpacked(tensor, call.skipping[names[name], i])

            output = as_tuple(dispatch(given, handle_stash, handle_pop))
            return as_value([_with_gradients(t, popped) if number == 0 else t for number, t in enumerate(output)])

        def stashable(self) -> list[Skip]:
            return _skips_of(self.stage, base)[0]

        def poppable(self) -> list[Skip]:
            return _skips_of(self.stage, base)[1]

    return SkippingStage
