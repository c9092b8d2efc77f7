"""Gradients go to an optimizer once, and as they were made. Both are looked at: a second step while the gradients of the first
are still there would lose them, and what changes the gradients of a rank by what it sees of them there changes them otherwise on
other ranks, as torch's own clipping does, which takes the norm of this rank's layers for that of all."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetpipe.files.messages import InputError
from hetpipe.processes.progress import warn
from hetpipe.processes.pulse import first_to_say
from hetpipe.runtime.checks.elementwise import check_elementwise

CHANGED = (
    "note: gradients were changed between engine.step and the optimizer's step. If that was torch.nn.utils.clip_grad_norm_: it "
    "sees the layers of its own rank only, and so clips by another norm on each; call engine.clip_grad_norm_(max_norm), which "
    "clips by that of the whole model"
)
LOST = (
    "the optimizer is given the gradients of the last engine.step only: those of the one before it were taken by no optimizer, "
    "and are lost. To add up the gradients of several steps, call them in 'with engine.accumulate():'; to drop those of one on "
    "purpose, call engine.zero_grad() after it"
)
GONE = (
    "the gradients of the steps before in this 'with engine.accumulate():' are gone, as after optimizer.zero_grad(), but what "
    "this step divides by counts their batches: leave it out in there, or call engine.zero_grad(), which begins the sum anew"
)
INSIDE = (
    "an optimizer steps within engine.step, as in a hook of register_post_accumulate_grad_hook: it is given the gradient of one "
    "micro-batch of this rank's, not that of the batch. Call optimizer.step() after engine.step"
)
OTHERS = (
    "note: an optimizer has stepped that has none of the parameters that the engine trains on this rank, and no other has taken "
    "the gradients of the last engine.step: nothing is trained here. Make the optimizer after hetpipe.wrap or hetpipe.auto, of "
    "engine.parameters(): layers on the meta device get other parameters when they get their values"
)
SEARCHES = (
    "optimizer 'LBFGS' cannot train a pipeline: it evaluates the model several times a step, and each rank would search in a "
    "direction of its own, by the gradients of its layers; use, for example, AdamW"
)


_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")  # asked of all parameters in each step, without calls of Python


class _Marks(NamedTuple):
    """Parameters and their gradients, and the version that each of both had."""

    parameters: Sequence[nn.Parameter]
    versions: Sequence[int]
    gradients: Sequence[Tensor]
    gradient_versions: Sequence[int]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> _Marks:
        """Return those of these parameters that have a gradient, as they are now."""
        with_gradient = [p for p in parameters if p.grad is not None]
        gradients = list(map(_GRADIENT, with_gradient))
        return cls(with_gradient, list(map(_VERSION, with_gradient)), gradients, list(map(_VERSION, gradients)))

    def stepped(self) -> bool:
        """Whether any parameter has changed."""
        return list(map(_VERSION, self.parameters)) != self.versions

    def differ(self) -> bool:
        """Whether any gradient is another, or has changed."""
        return any(map(is_not, map(_GRADIENT, self.parameters), self.gradients)) or (
            list(map(_VERSION, self.gradients)) != self.gradient_versions
        )

    def are_gone(self) -> bool:
        """Whether there were gradients, and each is dropped, or was set to zero."""
        found = zip(map(_GRADIENT, self.parameters), self.gradient_versions, strict=True)
        return bool(self.parameters) and all(_is_gone(gradient, version) for gradient, version in found)


_NO_MARKS = _Marks([], [], [], [])


class Handover:
    """Looks at what becomes of the gradients of these parameters, which train. `split`: some are shards of parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, split: bool = False) -> None:
        self._parameters, self._split = parameters, split
        self._elementwise = weakref.WeakSet[torch.optim.Optimizer]()  # those that were tried
        self._ids = {id(p) for p in self._parameters}
        self._marks = _NO_MARKS
        self._lost = self._taken = self._told = self._inside = self._left_out = False
        self._stepping = False  # whether an optimizer takes its step
        self._others = self._noted = False  # whether an optimizer has stepped that has none of them, and whether that was said
        own = weakref.ref(self)  # the hooks must not keep an engine's process groups
        self._handles = [
            register_optimizer_step_pre_hook(partial(_before, own)),
            register_optimizer_step_post_hook(partial(_after, own)),
        ]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A step, in which no optimizer may take what there is of gradients."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def begin(self, *, kept: bool) -> str | None:
        """Another step begins, which drops the gradients of the one before, or keeps them: what is said where they are gone."""
        marks = self._marks
        gone = kept and marks.are_gone()
        unused = bool(marks.parameters) and not self._taken and not marks.stepped()
        if unused and self._others and not kept and not self._noted:
            self._noted = True
            if first_to_say(OTHERS):
                warn(OTHERS)
        self._lost = not kept and (self._lost or (unused and not marks.differ()))
        self._marks, self._taken, self._others, self._left_out = _NO_MARKS, False, False, False
        return GONE if gone else None

    def made(self) -> None:
        """The gradients of a step are ready for an optimizer, as they are now."""
        self._marks = _Marks.of(self._parameters)

    def leave_out(self) -> None:
        """Gradients have overflowed: an optimizer that takes its step all the same finds none, and so leaves all parameters, and
        what it keeps of them, as they are."""
        self._left_out = True
        if self._stepping:  # by a closure, whose gradients it takes next
            self._drop()

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has one of the parameters."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to take the gradients. InputError if it is not given all that there were, or wants more."""
        if not self.has(optimizer):
            self._others = True
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError(SEARCHES)
        if self._inside:
            raise InputError(INSIDE)
        if self._split and optimizer not in self._elementwise:
            check_elementwise(optimizer)
            self._elementwise.add(optimizer)
        self._stepping = True
        if self._left_out:
            self._drop()
        if self._lost and not self._taken:
            raise InputError(LOST)
        if not self._taken and not self._told and self._marks.differ():
            self._told = True
            if first_to_say(CHANGED):
                warn(CHANGED)

    def after(self) -> None:
        """An optimizer has taken them."""
        self._taken, self._lost, self._stepping = True, False, False

    def forget(self) -> None:
        """There are none, and none is missed."""
        self._marks, self._lost = _NO_MARKS, False

    def close(self) -> None:
        """Look no longer."""
        self.forget()
        for handle in self._handles:
            handle.remove()


def _is_gone(gradient: Tensor | None, version: int) -> bool:
    return gradient is None or (gradient._version != version and not bool(gradient.any()))


def _before(own: weakref.ref[Handover], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    handover = own()
    if handover is not None:
        handover.before(optimizer)


def _after(own: weakref.ref[Handover], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    handover = own()
    if handover is not None and handover.has(optimizer):
        handover.after()
