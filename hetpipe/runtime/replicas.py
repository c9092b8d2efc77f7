"""Unlike replicas: who owns which layers, and the process groups of a plan. The owners of a layer are its ranks in every replica;
consecutive layers with the same owners form a segment with one process group, in which `gradients` sums theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.predict.sums import owner_segments
from hetpipe.processes.environment import step_timeout
from hetpipe.processes.world import check_devices
from hetpipe.spec.plan import Plan


@dataclass(frozen=True)
class OwnerGroup:
    """Parameters of one segment or tie on this rank, and the global ranks that own them; of a segment in the order of the
    replicas, with the names of its layers."""

    name: str
    ranks: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    tied: bool = False
    layers: tuple[str, ...] = ()


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
    """The groups in which the stages of a pipeline send: activations down, gradients up; and one for what hosts say, if these
    are of NCCL. With gloo they are one."""

    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    hosts: dist.ProcessGroup | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether of what was begun one may run only after the other, as kernels do, which transfers of NCCL are."""
        return self.hosts is not None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Over the stages: the same bits on each."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, group=self.hosts or self.activations)
        found: list[float] = tensor.tolist()
        return found

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
        timeout, apart = step_timeout(), "nccl" in str(dist.get_backend_config())  # "cpu:gloo,cuda:nccl"
        pipelines = []
        for replica in plan.replicas:
            members = sorted({rank_of[s.device] for s in replica.stages})
            down = dist.new_group(members, timeout=timeout)
            others = [dist.new_group(members, timeout=timeout, backend=name) for name in ((None, "gloo") if apart else ())]
            pipelines.append(Lanes(down, *(others or [down])))
        owners: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for _, ranks in plan_groups(plan, rank_of, tied):
            key = tuple(sorted(set(ranks)))
            if len(key) > 1 and key not in owners:
                owners[key] = dist.new_group(list(key), timeout=timeout)
        return cls(pipelines=tuple(pipelines), owners=owners)

    def close(self) -> None:
        """End those that this rank is in. Every rank of the plan calls it, when it has done with all messages in them."""
        groups = [group for lanes in self.pipelines for group in lanes if group is not None]
        for group in dict.fromkeys([*groups, *self.owners.values()]):
            dist.destroy_process_group(group)

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
    children, ranks = named_layers(stage), dict(segments)
    found = []
    for seg_lo, seg_hi, _ in reversed(owner_segments(plan.replicas)):
        if lo <= seg_lo and seg_hi <= hi:
            name = f"layers {seg_lo}:{seg_hi}"
            own = children[seg_lo - lo : seg_hi - lo]
            inside = dict.fromkeys(p for _, layer in own for p in layer.parameters() if p not in tied_names)
            found.append(OwnerGroup(name, ranks[name], tuple(inside), layers=tuple(child for child, _ in own)))
    for tie in sorted(tied):
        parameters = tuple(p for p, name in tied_names.items() if name == tie)
        if parameters:
            found.append(OwnerGroup(f"tied {tie}", ranks[f"tied {tie}"], parameters, tied=True))
    return found
