"""Gradient sums of unlike replicas. The owners of a layer are its ranks in every replica; consecutive layers with the same
owners form a segment with one process group and one flat bucket, summed while backward still runs.

Buckets are launched in one order on every rank, from the last layer to the first and tied parameters at the end, which is
acyclic over overlapping groups. A gradient lives in its bucket: `parameter.grad` is a view of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.predict.cost import owner_segments
from hetpipe.processes.world import TIMEOUT, check_devices
from hetpipe.spec.plan import Plan


class ReplicaMismatchError(RuntimeError):
    """Replicas of a layer hold different parameters."""


def is_finite(*tensors: Tensor) -> bool:
    """Whether all numbers of these tensors are. (Their sum tells: one pass, and one number to wait for.)"""
    sums = [t.sum(dtype=torch.float32 if t.element_size() < 4 else None) for t in tensors if t.is_floating_point()]
    return all(bool(torch.isfinite(s)) for s in sums)


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of the bits of these tensors, int64 [] on the first one's device, at least 0: Σ wordᵢ · oddᵢ mod 2⁶², so that two
    rows of tensors that differ in one 32-bit word never have the same; others have it by chance once in 2⁶²."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        odd = (2 * number + 1) * _ODD % 2**62
        for at, part in enumerate(torch.split(_words(tensor), _PART)):
            places = torch.arange(at * _PART, at * _PART + len(part), device=part.device)
            total += (part.long() * (places * _SPREAD + odd | 1)).sum().to(total.device)
    return total & (2**62 - 1)


_ODD, _SPREAD, _PART = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B8, 2**20  # two large numbers, the second even; words at a time


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as 32-bit words; the last ones of a few bytes filled up with zeros."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    if bits.numel() % 4:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 4))
    return bits.view(torch.int32)


class _Work(Protocol):
    def wait(self) -> object: ...


@dataclass(frozen=True)
class OwnerGroup:
    """Parameters of one segment or tie on this rank: their names, and the global ranks that own them."""

    name: str
    ranks: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]


@dataclass
class _Bucket:
    group: OwnerGroup
    flat: Tensor
    views: list[tuple[nn.Parameter, Tensor]]
    used: Tensor  # after the sum: in how many owners each parameter took part in a backward pass
    summed: Tensor  # one buffer with `flat` and `used`: what is all-reduced
    process_group: dist.ProcessGroup | None
    seen: int = 0
    touched: set[nn.Parameter] = field(default_factory=set)
    handles: list[object] = field(default_factory=list)
    copies: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # a copy, the gradient's place


def plan_groups(
    plan: Plan, rank_of: Mapping[str, int], tied: Mapping[str, Sequence[int]]
) -> list[tuple[str, tuple[int, ...]]]:
    """(name, ranks) of every owner group of a plan in launch order: segments from the last layer down, then ties. `tied` maps
    the name of a tied parameter to the layers that hold it. Pure: every rank computes the same list."""
    groups = [
        (f"layers {lo}:{hi}", tuple(rank_of[d] for d in owners))
        for lo, hi, owners in reversed(owner_segments(plan.replicas))
    ]
    for name in sorted(tied):
        ranks = {rank_of[stage.device] for replica in plan.replicas for stage in replica.stages
                 if any(stage.layers[0] <= layer < stage.layers[1] for layer in tied[name])}  # fmt: skip
        groups.append((f"tied {name}", tuple(sorted(ranks))))
    return groups


class Lanes(NamedTuple):
    """The groups in which the stages of a pipeline send: activations down, gradients up. With gloo they are one."""

    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup

    def warm_up(self, ranks: Sequence[int], device: torch.device) -> None:
        """Send a number over each boundary, each way: NCCL connects two ranks in their first message, for which both stand still.
        `ranks`: of the stages in order, this rank one of them."""
        number = torch.zeros(1, device=device)
        for group, order in ((self.activations, list(ranks)), (self.gradients, list(ranks)[::-1])):
            at = order.index(dist.get_rank())
            if at > 0:
                dist.recv(number, order[at - 1], group=group)
            if at < len(order) - 1:
                dist.send(number, order[at + 1], group=group)


@dataclass(frozen=True, kw_only=True)
class PlanGroups:
    """The process groups of a plan: the lanes of each pipeline, and one group per distinct set of owners."""

    pipelines: tuple[Lanes, ...]
    owners: Mapping[tuple[int, ...], dist.ProcessGroup]

    @classmethod
    def create(cls, plan: Plan, rank_of: Mapping[str, int], tied: Mapping[str, Sequence[int]]) -> PlanGroups:
        """Every process of the job must call this, also one that the plan does not use, since new_group is collective. All
        raise an InputError if they hold different plans, or one that uses a device which no process drives."""
        _check_same_plan(plan)
        check_devices(plan.device_ids, rank_of)
        apart = "nccl" in str(dist.get_backend_config())  # "cpu:gloo,cuda:nccl"
        pipelines = []
        for replica in plan.replicas:
            members = sorted({rank_of[s.device] for s in replica.stages})
            down = dist.new_group(members, timeout=TIMEOUT)
            pipelines.append(Lanes(down, dist.new_group(members, timeout=TIMEOUT) if apart else down))
        owners: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for _, ranks in plan_groups(plan, rank_of, tied):
            key = tuple(sorted(set(ranks)))
            if len(key) > 1 and key not in owners:
                owners[key] = dist.new_group(list(key), timeout=TIMEOUT)
        return cls(pipelines=tuple(pipelines), owners=owners)

    def warm_up(self, device: torch.device) -> None:
        """Sum a number over each set of owners that this rank is one of, in the order in which all ranks know them: NCCL connects
        a group in its first sum, for which every rank stands still until the last has come; in the midst of a backward the
        stages before would wait, too."""
        rank = dist.get_rank()
        for ranks, group in self.owners.items():
            if rank in ranks:
                dist.all_reduce(torch.zeros(1, device=device), group=group)


def _check_same_plan(plan: Plan) -> None:
    prints: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(prints, plan.fingerprint)
    if len(set(prints)) > 1:
        raise InputError(
            f"the ranks hold different plans: fingerprints {dict(enumerate(prints))}; give all the same plan file"
        )


def local_groups(
    stage: nn.Sequential,
    lo: int,
    hi: int,
    segments: Sequence[tuple[str, tuple[int, ...]]],
    plan: Plan,
    tied: Mapping[str, Sequence[int]],
    tied_names: Mapping[nn.Parameter, str],
) -> list[OwnerGroup]:
    """The owner groups that this rank's stage (layers [lo, hi)) is part of, in launch order, each parameter in exactly one."""
    children = list(stage)
    ranks = dict(segments)
    found = []
    for seg_lo, seg_hi, _ in reversed(owner_segments(plan.replicas)):
        if lo <= seg_lo and seg_hi <= hi:
            name = f"layers {seg_lo}:{seg_hi}"
            inside = dict.fromkeys(
                p
                for layer in children[seg_lo - lo : seg_hi - lo]
                for p in layer.parameters()
                if p not in tied_names
            )
            found.append(OwnerGroup(name, ranks[name], tuple(inside)))
    for tie in sorted(tied):
        parameters = tuple(p for p, name in tied_names.items() if name == tie)
        if parameters:
            found.append(OwnerGroup(f"tied {tie}", ranks[f"tied {tie}"], parameters))
    return found


class GradientSync:
    """Sums gradients over owner groups. Use: `begin(m)`, run m micro-batches of backward, `finish()`.

    A process that drives several devices gives `device`, on which all its sums are made (a NCCL communicator is bound to one),
    after backward, since its devices run backward in threads of their own; and `copies`: the copies of tied parameters in its
    other stages. A copy's gradient is added to its parameter's before the sum, and gets the sum.
    """

    def __init__(self, groups: Sequence[OwnerGroup], process_groups: Mapping[tuple[int, ...], dist.ProcessGroup], rank: int, *,
                 device: torch.device | None = None,
                 copies: Mapping[nn.Parameter, Sequence[nn.Parameter]] | None = None) -> None:  # fmt: skip
        self.rank = rank
        self._device = device
        self._copies = copies or {}
        self._buckets: list[_Bucket] = []
        self._work: list[tuple[_Work, Tensor, Tensor]] = []  # what runs, what it sums, where that belongs
        self._microbatches = 0
        for group in groups:
            trained = [p for p in group.parameters if p.requires_grad]
            for dtype in sorted({p.dtype for p in trained}, key=str):
                self._add_bucket(group, [p for p in trained if p.dtype == dtype], process_groups)
        self._next = len(self._buckets)  # a backward before the first step is not ours

    def _add_bucket(
        self,
        group: OwnerGroup,
        parameters: list[nn.Parameter],
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        size, count = sum(p.numel() for p in parameters), len(parameters)
        summed = torch.zeros(size + count, dtype=parameters[0].dtype, device=parameters[0].device)
        flat, used = summed[:size], summed[size:]
        parts = torch.split(flat, [p.numel() for p in parameters])
        views = [(p, part.view(p.shape)) for p, part in zip(parameters, parts, strict=True)]
        bucket = _Bucket(
            group, flat, views, used, summed, process_groups.get(tuple(sorted(set(group.ranks))))
        )
        hook = partial(self._count, bucket)
        for parameter, view in views:
            bucket.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            for copy in self._copies.get(parameter, ()):
                bucket.copies.append((copy, view))
                touch = partial(_touch, bucket, parameter)
                bucket.handles.append(copy.register_post_accumulate_grad_hook(touch))
        self._buckets.append(bucket)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all buckets on this rank."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def begin(self, microbatches: int) -> None:
        """Zero all gradients and expect this many backward passes (none: this replica takes part in the sums only)."""
        self._microbatches, self._next = microbatches, 0
        self._work.clear()
        for bucket in self._buckets:
            bucket.seen = 0
            bucket.touched.clear()
            bucket.summed.zero_()
            for parameter, view in bucket.views:
                parameter.grad = view
            for copy, _ in bucket.copies:
                copy.grad = None

    def _count(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        bucket.touched.add(parameter)
        if self._device is not None:
            return
        bucket.seen += 1
        while self._next < len(self._buckets):
            first = self._buckets[self._next]
            if first.seen < self._microbatches * len(first.views):
                return
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        for parameter, view in bucket.views:
            if parameter.grad is not view:  # something replaced the gradient; bring it home
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                parameter.grad = view
        for copy, place in bucket.copies:
            if copy.grad is not None:
                place.add_(copy.grad.to(place.device))
        if len(bucket.touched) == len(bucket.views):
            bucket.used.fill_(1.0)
        else:
            bucket.used.copy_(torch.tensor([p in bucket.touched for p, _ in bucket.views]))
        if bucket.process_group is not None:
            message = bucket.summed.to(self._device or bucket.summed.device)
            work = dist.all_reduce(message, op=dist.ReduceOp.SUM, group=bucket.process_group, async_op=True)
            assert work is not None
            self._work.append((work, message, bucket.summed))

    def finish(self) -> None:
        """Launch what is left (parameters that took no part in backward) and wait for every sum. A parameter that took no part
        in any replica has no gradient (None), so that an optimizer leaves it alone, as on one device."""
        while self._next < len(self._buckets):
            self._launch()
        for work, message, home in self._work:
            work.wait()
            if message is not home:
                home.copy_(message)
        self._work.clear()
        for bucket in self._buckets:
            for copy, place in bucket.copies:
                copy.grad = place.to(copy.device, copy=True)
            if len(bucket.touched) < len(bucket.views):
                for (parameter, _), used in zip(bucket.views, bucket.used.tolist(), strict=True):
                    if not used:
                        for holder in (parameter, *self._copies.get(parameter, ())):
                            holder.grad = None

    def square_norm(self) -> float:
        """This rank's part of the global squared gradient norm, in float64: only the lowest owner counts a parameter."""
        total = 0.0
        for bucket in self._buckets:
            if min(bucket.group.ranks) == self.rank:
                total += float(torch.linalg.vector_norm(bucket.flat, dtype=torch.float64)) ** 2
        return total

    def is_finite(self) -> bool:
        """Whether all numbers of this rank's gradients are."""
        return is_finite(*(bucket.flat for bucket in self._buckets))

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)
            for copy, place in bucket.copies:
                if copy.grad is not None:
                    copy.grad.copy_(place)

    def check_equal(self) -> None:
        """Compare a hash of each group's parameters over its owners; ReplicaMismatchError naming the group if they differ. The
        hashes are made where the parameters are, and are all that leaves a device."""
        different = None
        for bucket in self._buckets:
            if any(not torch.equal(copy.to(p.device), p) for p, _ in bucket.views for copy in self._copies.get(p, ())):
                different = different or bucket.group
            if bucket.process_group is None:
                continue
            own = fingerprint([parameter.detach() for parameter, _ in bucket.views]).to(self._device or bucket.flat.device)
            extremes = torch.stack([own, -own])
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=bucket.process_group)
            if different is None and int(extremes[0]) != -int(extremes[1]):
                different = bucket.group
        if different is not None:  # only now: the other owners are still in the comparisons
            raise ReplicaMismatchError(
                f"the replicas of {different.name} (ranks {list(different.ranks)}) hold different parameters: something "
                "changed them outside the optimizer step, or the optimizers differ; restart from the last checkpoint"
            )

    def forget(self) -> None:
        """No parameter has a gradient."""
        for bucket in self._buckets:
            for parameter, _ in bucket.views:
                parameter.grad = None
            for copy, _ in bucket.copies:
                copy.grad = None

    def close(self) -> None:
        """Remove the hooks, and release the buckets with the gradients in them."""
        self.forget()
        for bucket in self._buckets:
            for handle in bucket.handles:
                handle.remove()  # type: ignore[attr-defined]
        self._buckets.clear()


def _touch(bucket: _Bucket, parameter: nn.Parameter, _copy: nn.Parameter) -> None:
    """A copy of this parameter took part in backward."""
    bucket.touched.add(parameter)
