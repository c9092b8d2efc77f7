"""Sums of gradients over the owners of each layer, while backward still runs.

A group's gradients are cut into buckets (Li et al. 2020, PyTorch Distributed, section 3.2), from its last parameter to its first,
which is about the order in which backward makes them. A bucket is one tensor, of which `parameter.grad` is a view, with one
number more for each parameter that says whether it took part; it is summed as soon as the last backward of the step has made all
of its gradients. The gradients of a group with one owner are autograd's own.

Buckets are launched in one order on every rank, from the last layer to the first and tied parameters at the end, which is
acyclic over overlapping groups. Those of tied parameters wait for the end of the pipeline's step: a first stage that shares them
with the last gets its last gradient only after that stage's backward, in which a sum with it would stand in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.documents.cluster import BUCKET_BYTES
from hetpipe.layers.weights import fingerprint
from hetpipe.runtime.replicas import OwnerGroup

FOUR_BITS = getattr(torch, "float4_e2m1fn_x2", None)  # of which all numbers are finite, and none can be added up


class ReplicaMismatchError(RuntimeError):
    """Replicas of a layer hold different parameters."""


def is_finite(*tensors: Tensor) -> bool:
    """Whether all numbers of these tensors are. (Their sums tell: one pass, and one number to wait for.)"""
    numbers = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    numbers = [t for t in numbers if t.is_floating_point() and t.dtype is not FOUR_BITS]
    sums = [t.sum(dtype=torch.float32 if t.element_size() < 4 else None) for t in numbers]
    return not sums or bool(torch.isfinite(_together(sums)).all())


def _together(numbers: Sequence[Tensor]) -> Tensor:
    """Numbers of any devices as one tensor on the first one's, so that they are waited for once."""
    device = numbers[0].device
    return torch.stack([number if number.device == device else number.to(device) for number in numbers])


def counts(rank: int, owners: Collection[int]) -> bool:
    """Whether of all ranks that own the same gradients it is this one that counts them, where each shall count once.

    Of a parameter that is split each shard counts once: a piece of it has owners of its own. Of one that is replicated over the
    shards one counts: its owners are all ranks of all of them. (Where these have made parts of its gradient, only the sum of the
    parts is what they own.)"""
    return rank == min(owners)


def square_norm(held: Iterable[tuple[Collection[int], Sequence[Tensor]]], rank: int) -> float:
    """This rank's part of the global squared gradient norm, in float64, by what it holds: (owners, gradients)."""
    own = [gradient for owners, gradients in held if counts(rank, owners) for gradient in gradients]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in own]
    return sum(norm**2 for norm in _together(norms).tolist()) if norms else 0.0


class _Work(Protocol):
    def wait(self) -> object: ...


class _Handle(Protocol):
    def remove(self) -> None: ...


@dataclass(eq=False)
class _Bucket:
    """`summed` is what several owners add up: all gradients, and then in how many owners each parameter took part."""

    group: OwnerGroup
    parameters: list[nn.Parameter]
    process_group: dist.ProcessGroup | None
    seen: int = 0  # gradients that the last backward has made
    touched: set[nn.Parameter] = field(default_factory=set)  # what took part here

    def __post_init__(self) -> None:
        self.summed, self.views = None, list[Tensor]()
        if self.process_group is not None:
            sizes = list(map(self.group.numel, self.parameters))
            self.summed = self.parameters[0].new_zeros(sum(sizes) + len(sizes))
            parts = torch.split(self.summed.detach(), [*sizes, len(sizes)])
            shapes = [self.group.part(p, p).shape for p in self.parameters]
            self.views = [part.view(shape) for shape, part in zip(shapes, parts, strict=False)]

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients lie in it. Those of which it sums a piece are autograd's own."""
        return self.summed is not None and not self.group.in_pieces

    def gradients(self) -> list[Tensor]:
        """All numbers of the gradients that its parameters have now, which a user may have replaced, in few tensors."""
        if self.holds_gradients and all(p.grad is view for p, view in zip(self.parameters, self.views, strict=True)):
            assert self.summed is not None
            return [self.summed[: -len(self.parameters)]]
        return [self.group.part(p, p.grad) for p in self.parameters if p.grad is not None]

    def begin(self) -> None:
        """There are no gradients."""
        self.seen = 0
        self.touched.clear()
        if self.holds_gradients:
            assert self.summed is not None
            self.summed.zero_()
            for parameter, view in zip(self.parameters, self.views, strict=True):
                _give(parameter, view)

    def go_on(self, factor: float, *, holds: bool) -> None:
        """The gradients that there are, times `factor`, are a part of those that come: on the one of their owners that `holds`
        them, since all of them will be summed."""
        self.seen = 0
        self.touched.difference_update([p for p in self.parameters if p.grad is None])
        if self.holds_gradients:
            self._gather()
        if holds:
            _scale(self.gradients(), factor)
        elif self.summed is not None:
            for gradient in self.gradients():
                gradient.zero_()  # (times 0, what is infinite would be no number)

    def home(self) -> Tensor:
        """All gradients are in their places, and the numbers of what took part."""
        assert self.summed is not None
        self._gather()
        for parameter, view in zip(self.parameters, self.views, strict=True) if self.group.silent else ():
            if parameter in self.group.silent:
                view.zero_()
        used = self.summed[-len(self.parameters) :]
        if len(self.touched) == len(self.parameters):
            used.fill_(1.0)  # (copying numbers to a GPU waits for all that it was given)
        else:
            used.copy_(torch.tensor([p in self.touched for p in self.parameters]))
        return self.summed

    def _gather(self) -> None:
        """Gradients that something has replaced, or dropped, are in their places; so are copies of pieces."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                if parameter.grad is not None:
                    view.copy_(self.group.part(parameter, parameter.grad.detach()))
                else:
                    view.zero_()
                if self.holds_gradients:
                    _give(parameter, view)

    def give_back(self) -> None:
        """The sums of pieces are where the pieces were."""
        for parameter, view in zip(self.parameters, self.views, strict=True) if not self.holds_gradients else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.group.part(parameter, parameter.grad.detach()).copy_(view)


@torch.no_grad()  # what a user has put there may have a graph
def _scale(gradients: Iterable[Tensor], factor: float) -> None:
    for gradient in gradients:
        gradient.mul_(factor)


def _give(parameter: nn.Parameter, gradient: Tensor) -> None:
    """It has this gradient; none if it was converted since (`model.double()`), which the end of the step tells on every rank."""
    if gradient.dtype == parameter.dtype and gradient.device == parameter.device:
        parameter.grad = gradient


def _cut(group: OwnerGroup) -> Iterator[list[nn.Parameter]]:
    """Buckets of one dtype each, from the last parameter that trains to the first: a bucket ends where it would become larger
    than BUCKET_BYTES, so only a single parameter may be."""
    open_: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed([p for p in group.parameters if p.requires_grad]):
        size = group.numel(parameter) * parameter.element_size()
        bucket, filled = open_.get(parameter.dtype, ([], 0))
        if bucket and filled + size > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        open_[parameter.dtype] = ([*bucket, parameter], filled + size)
    for bucket, _ in open_.values():
        yield bucket


class GradientSync:
    """Sums gradients over owner groups. Use: `begin()`, run all backward passes of the step, with `last_backward()` before the
    last one, `finish()`. Without `last_backward` all sums are launched by `finish`.

    A process that drives several devices gives `device`, on which all its sums are made (a NCCL communicator is bound to one),
    and `copies`: the copies of tied parameters in its other stages. A copy's gradient is added to its parameter's before the sum,
    and gets the sum. `ready`, if set, is called with a bucket's parameters before it is summed in the midst of a backward."""

    ready: Callable[[Sequence[nn.Parameter]], None] | None = None

    def __init__(
        self,
        groups: Sequence[OwnerGroup],
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        rank: int,
        *,
        device: torch.device | None = None,
        copies: Mapping[nn.Parameter, Sequence[nn.Parameter]] | None = None,
    ) -> None:
        self.rank = rank
        self.groups, self._process_groups, self._device = groups, process_groups, device
        self._copies = copies or {}
        self._work: list[tuple[_Work, Tensor, Tensor]] = []  # what runs, what it sums, where that belongs
        self._last = False  # a backward that runs now is the last of a step
        self._buckets = [
            _Bucket(group, bucket, process_groups.get(tuple(sorted(set(group.ranks)))))
            for group in groups
            for bucket in _cut(group)
        ]
        self._next = len(self._buckets)
        self._hooks: list[_Handle] = []
        for bucket in self._buckets:
            for parameter in bucket.parameters if bucket.process_group is not None else ():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._made, bucket)))
                for copy in self._copies.get(parameter, ()):
                    self._hooks.append(copy.register_post_accumulate_grad_hook(partial(_touch, bucket, parameter)))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients on this rank."""
        return sum(bucket.group.numel(p) * p.element_size() for bucket in self._buckets for p in bucket.parameters)

    def begin(self, kept: float | None = None) -> None:
        """A new step: there are no gradients; or, times `kept`, those that there are, to which its own are added."""
        self._work.clear()
        self._last = False
        self._next = 0
        if kept is None:
            self.forget()
        for copies in self._copies.values():
            for copy in copies:
                copy.grad = None  # it has had the sum
        if kept is not None:
            self._separate()
        for bucket in self._buckets:
            if kept is None:
                bucket.begin()
            else:
                bucket.go_on(kept, holds=self.rank == bucket.group.keeper)

    def _separate(self) -> None:
        """A gradient in another's place, into which something has put it, has one of its own."""
        places = {bucket.summed.untyped_storage().data_ptr() for bucket in self._buckets if bucket.summed is not None}
        own = {p: view for bucket in self._buckets for p, view in zip(bucket.parameters, bucket.views, strict=False)}
        for parameter in (p for bucket in self._buckets for p in bucket.parameters):
            grad = parameter.grad
            if grad is not None and grad is not own.get(parameter) and grad.untyped_storage().data_ptr() in places:
                parameter.grad = grad.detach().clone()

    def last_backward(self) -> None:
        """The next backward is the last of the step: a gradient that it has made is complete."""
        self._last = True

    def _made(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        bucket.touched.add(parameter)
        if not self._last:
            return
        bucket.seen += 1
        while self._next < len(self._buckets):
            first = self._buckets[self._next]
            if first.process_group is not None and (first.group.tied or first.seen < len(first.parameters)):
                return
            if first.process_group is not None and self.ready is not None:
                self.ready(first.parameters)
            self._launch()

    def _launch(self) -> None:
        """Sum the next bucket."""
        bucket = self._buckets[self._next]
        if bucket.process_group is None:  # its gradients need not be complete yet
            self._next += 1
            return
        home = bucket.home()
        self._gather(bucket.parameters)
        message = home.to(self._device or home.device)
        self._next += 1  # which nobody launches again
        work = dist.all_reduce(message, op=dist.ReduceOp.SUM, group=bucket.process_group, async_op=True)
        assert work is not None
        self._work.append((work, message, home))

    def _gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make sparse gradients dense, and add the gradients of the parameters' copies to them."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                parameter.grad = gradient.to_dense()
        for parameter in parameters if self._copies else ():
            for copy in self._copies.get(parameter, ()):
                if copy.grad is not None:
                    own = copy.grad.to(parameter.device)
                    parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)

    def finish(self) -> None:
        """Launch what is left and wait for every sum. A parameter that took no part in any replica has no gradient (None), so
        that an optimizer leaves it alone, as on one device."""
        self._settle()
        for bucket in self._buckets:
            if bucket.summed is None:
                self._gather(bucket.parameters)
                continue
            bucket.give_back()
            if len(bucket.touched) < len(bucket.parameters):
                used = bucket.summed[-len(bucket.parameters) :].tolist()
                for parameter, owners in zip(bucket.parameters, used, strict=True):
                    if not owners:
                        parameter.grad = None
        for parameter, copies in self._copies.items():
            for copy in copies:
                copy.grad = None if parameter.grad is None else parameter.grad.to(copy.device, copy=True)

    def give_up(self) -> None:
        """There are no gradients, and the other owners, who wait for the sums, get what is no use."""
        self.forget()
        self._settle()

    def _settle(self) -> None:
        self._last = False
        while self._next < len(self._buckets):
            self._launch()
        for work, message, home in self._work:
            work.wait()
            if message is not home:
                home.copy_(message)
        self._work.clear()

    def square_norm(self) -> float:
        """This rank's part of the global squared gradient norm, in float64: each parameter counts once."""
        return square_norm(((bucket.group.ranks, bucket.gradients()) for bucket in self._buckets), self.rank)

    def is_finite(self) -> bool:
        """Whether all numbers of this rank's gradients are."""
        return is_finite(*(gradient for bucket in self._buckets for gradient in bucket.gradients()))

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        copied = [copy.grad for copies in self._copies.values() for copy in copies if copy.grad is not None]
        _scale((*(g for bucket in self._buckets for g in bucket.gradients()), *copied), factor)

    def difference(self) -> str | None:
        """What is said where the owners of a group hold different parameters, by a hash of them. The hashes are made where the
        parameters are, and are all that leaves a device. Collective over each group."""
        different = None
        for group in self.groups:
            if any(not torch.equal(copy.to(p.device), p) for p in group.parameters for copy in self._copies.get(p, ())):
                different = different or group
            process_group = self._process_groups.get(tuple(sorted(set(group.ranks))))
            if process_group is None or not group.parameters:
                continue
            own = fingerprint([group.part(parameter, parameter.detach()) for parameter in group.parameters])
            extremes = torch.stack([own, -own]).to(self._device or own.device)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=process_group)
            if different is None and int(extremes[0]) != -int(extremes[1]):
                different = group
        if different is None:
            return None
        return (
            f"the replicas of {different.name} (ranks {list(different.ranks)}) hold different parameters: something "
            "changed them outside the optimizer step, or the optimizers differ; restart from the last checkpoint"
        )

    def forget(self) -> None:
        """No parameter has a gradient."""
        self._last = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        for copies in self._copies.values():
            for copy in copies:
                copy.grad = None

    def close(self) -> None:
        """Remove the hooks, and release the gradients."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._buckets.clear()


def _touch(bucket: _Bucket, parameter: nn.Parameter, _copy: nn.Parameter) -> None:
    """A copy of this parameter took part in backward."""
    bucket.touched.add(parameter)
