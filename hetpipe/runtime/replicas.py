"""Unlike replicas: who owns which layers, and the process groups of a plan. The owners of a layer are its ranks in every replica;
consecutive layers with the same owners form a segment with one process group, in which `gradients` sums theirs. Shards of
tensor-parallel stages are pieces of it, each with owners of its own (`spec.seats`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hetpipe.documents.plan import Plan
from hetpipe.documents.seats import Owners
from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.processes.environment import step_timeout
from hetpipe.processes.world import check_devices


@dataclass(frozen=True)
class OwnerGroup:
    """Parameters of one segment or tie on this rank, and the global ranks that own them; of a segment in the order of the
    replicas, with the names of its layers. `piece`: which of how many equal pieces of what this rank has of them is meant."""

    name: str
    ranks: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    tied: bool = False
    layers: tuple[str, ...] = ()
    piece: tuple[int, int] = (0, 1)


def plan_groups(plan: Plan, rank_of: Mapping[str, int], tied: Mapping[str, Sequence[int]]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, ranks) of every owner group of a plan in launch order: segments from the last layer down, then ties, of each piece
    by piece. `tied` maps the name of a tied parameter to the layers that hold it. Pure: every rank computes the same list."""
    groups = []
    for owners in (*plan.owners(), *(plan.owners_of_tied(name, tied[name]) for name in sorted(tied))):
        for name, devices in zip(_names(owners), owners.pieces, strict=True):
            ranks = tuple(rank_of[device] for device in devices)
            groups.append((name, ranks if owners.tied is None else tuple(sorted(set(ranks)))))
    return groups


def _names(owners: Owners) -> list[str]:
    """Of the group of each piece, for messages, and to tell them apart."""
    whole = f"layers {owners.lo}:{owners.hi}" if owners.tied is None else f"tied {owners.tied}"
    count = len(owners.pieces)
    return [whole] if count == 1 else [f"{whole}, piece {j} of {count}" for j in range(1, count + 1)]


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

    def warm_up(self, before: Sequence[int], after: Sequence[int], device: torch.device) -> None:
        """Send a number over each boundary, each way: NCCL connects two ranks in their first message, for which both stand still.
        `before` and `after` are this rank's peers in the stages beside it."""
        number = torch.zeros(1, device=device)
        for group, sources, targets in ((self.activations, before, after), (self.gradients, after, before)):
            for rank in dict.fromkeys(sources):
                dist.recv(number, rank, group=group)
            for rank in dict.fromkeys(targets):
                dist.send(number, rank, group=group)


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
            members = sorted({rank_of[device] for stage in replica.stages for device in stage.devices})
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
        raise InputError(f"the ranks hold different plans: fingerprints {dict(enumerate(prints))}; give all the same plan file")


def local_groups(
    stage: nn.Sequential,
    lo: int,
    hi: int,
    segments: Sequence[tuple[str, tuple[int, ...]]],
    plan: Plan,
    tied: Mapping[str, Sequence[int]],
    tied_names: Mapping[nn.Parameter, str],
    shard: tuple[int, int] = (0, 1),
) -> list[OwnerGroup]:
    """The owner groups that this rank's stage (layers [lo, hi)) is part of, in launch order, each parameter in exactly one, or
    each of its pieces. `shard`: which of how many the rank has of the stage."""
    children, ranks = named_layers(stage), dict(segments)
    found = list[OwnerGroup]()

    def add(owners: Owners, parameters: Collection[nn.Parameter], layers: tuple[str, ...] = ()) -> None:
        names, own, tied = _names(owners), owners.in_shard(*shard), owners.tied is not None
        for at, j in enumerate(own):
            found.append(OwnerGroup(names[j], ranks[names[j]], tuple(parameters), tied, layers, (at, len(own))))

    for owners in plan.owners():
        if lo <= owners.lo and owners.hi <= hi:
            own = children[owners.lo - lo : owners.hi - lo]
            inside = dict.fromkeys(p for _, layer in own for p in layer.parameters() if p not in tied_names)
            add(owners, inside, tuple(child for child, _ in own))
    for tie in sorted(tied):
        parameters = [p for p, name in tied_names.items() if name == tie]
        if parameters:
            add(plan.owners_of_tied(tie, tied[tie]), parameters)
    return found
