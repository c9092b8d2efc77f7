"""Unlike replicas: who owns which layers, and the process groups of a plan. The owners of a layer are its ranks in every replica;
consecutive layers with the same owners form a segment with one process group, in which `gradients` sums theirs. Shards of
tensor-parallel stages are pieces of it, each with owners of its own (`spec.seats`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.documents.plan import Plan
from hetpipe.documents.seats import Owners
from hetpipe.files.messages import InputError
from hetpipe.layers.model import named_layers
from hetpipe.layers.shards.layout import Cut
from hetpipe.processes.environment import step_timeout
from hetpipe.processes.world import check_devices


@dataclass(frozen=True)
class OwnerGroup:
    """Parameters of one segment or tie on this rank, and the global ranks that own them; of a segment in the order of the
    replicas, with the names of its layers.

    Where a stage of a segment is split, pieces of its parameters have owners of their own. `piece`: which of how many equal
    pieces of what this rank has of them is meant, which `cuts` cut; parameters that are not cut have all ranks as owners. Of
    those, the gradients of the parameters in `silent` are whole on several devices of a group, and this rank is not the one
    whose count. `leads`: the first rank of each replica."""

    name: str
    ranks: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    tied: bool = False
    layers: tuple[str, ...] = ()
    piece: tuple[int, int] = (0, 1)
    cuts: Mapping[nn.Parameter, Cut] = field(default_factory=dict)
    silent: frozenset[nn.Parameter] = frozenset()
    leads: tuple[int, ...] = ()

    @property
    def in_pieces(self) -> bool:
        """Whether this rank has several pieces of these parameters, and one of them is meant."""
        return self.piece[1] > 1

    def part(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """The part of a tensor that lies as this parameter does: a view."""
        return self.cuts[parameter].piece(tensor, *self.piece) if self.in_pieces else tensor

    def numel(self, parameter: nn.Parameter) -> int:
        """The numbers of this part."""
        return parameter.numel() // self.piece[1]

    @property
    def keeper(self) -> int:
        """The rank that keeps what a step adds to: one whose gradients count."""
        return self.ranks[0]

    def lead(self, replica: int) -> int:
        """The rank of this replica whose buffers the others take."""
        return (self.leads or self.ranks)[replica]


def plan_groups(plan: Plan, rank_of: Mapping[str, int], tied: Mapping[str, Sequence[int]]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, ranks) of every owner group of a plan in launch order: segments from the last layer down, then ties; of those that
    have pieces, piece by piece, and then of what is whole on all. `tied` maps the name of a tied parameter to the layers that
    hold it. Pure: every rank computes the same list."""
    groups = []
    for owners in (*plan.owners(), *(plan.owners_of_tied(name, tied[name]) for name in sorted(tied))):
        for name, devices in zip(_names(owners), (*owners.pieces, owners.everyone), strict=False):
            ranks = tuple(rank_of[device] for device in devices)
            groups.append((name, ranks if owners.tied is None else tuple(dict.fromkeys(ranks))))
    return groups


def _names(owners: Owners) -> list[str]:
    """Of the group of each piece, and of what is whole if there are several, for messages, and to tell them apart."""
    name = f"layers {owners.lo}:{owners.hi}" if owners.tied is None else f"tied {owners.tied}"
    count = len(owners.pieces)
    return [name] if count == 1 else [*(f"{name}, piece {j} of {count}" for j in range(1, count + 1)), f"{name}{WHOLE}"]


WHOLE = ", what is not split"  # in the name of a group


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
    stages: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)  # of each (replica, stage) that is split

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
        stages = {
            (r, s): dist.new_group([rank_of[device] for device in stage.devices], timeout=timeout)
            for r, replica in enumerate(plan.replicas)
            for s, stage in enumerate(replica.stages)
            if len(stage.devices) > 1
        }
        return cls(pipelines=tuple(pipelines), owners=owners, stages=stages)

    def close(self) -> None:
        """End those that this rank is in. Every rank of the plan calls it, when it has done with all messages in them."""
        groups = [group for lanes in self.pipelines for group in lanes if group is not None]
        for group in dict.fromkeys([*groups, *self.owners.values(), *self.stages.values()]):
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


class Sharing(NamedTuple):
    """What this rank has of its stages: shard `number` of `degree`; how those parameters are cut that are, whatever the shard is;
    and the whole ones of whose gradients each device of a group makes a part."""

    number: int = 0
    degree: int = 1
    cuts: Mapping[nn.Parameter, Cut] = {}
    partial: AbstractSet[nn.Parameter] = frozenset()


WHOLE_STAGE = Sharing()


def local_groups(
    stage: nn.Sequential,
    lo: int,
    hi: int,
    segments: Sequence[tuple[str, tuple[int, ...]]],
    plan: Plan,
    tied: Mapping[str, Sequence[int]],
    tied_names: Mapping[nn.Parameter, str],
    sharing: Sharing = WHOLE_STAGE,
) -> list[OwnerGroup]:
    """The owner groups that this rank's stage (layers [lo, hi)) is part of, in launch order, each parameter in exactly one, or
    each of its pieces."""
    children, ranks = named_layers(stage), dict(segments)
    found = list[OwnerGroup]()

    def add(owners: Owners, parameters: Collection[nn.Parameter], layers: tuple[str, ...] = ()) -> None:
        names, own, tied = _names(owners), owners.in_shard(sharing.number, sharing.degree), owners.tied is not None
        cut = {p: sharing.cuts[p] for p in parameters if p in sharing.cuts} if len(names) > 1 else {}
        whole = [p for p in parameters if p not in cut]
        for at, j in enumerate(own) if cut else ():
            found.append(OwnerGroup(names[j], ranks[names[j]], tuple(cut), tied, (), (at, len(own)), cut))
        silent = frozenset(p for p in whole if p not in sharing.partial) if sharing.number else frozenset()
        found.append(OwnerGroup(names[-1], ranks[names[-1]], tuple(whole), tied, layers, silent=silent, leads=ranks[names[0]]))

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
