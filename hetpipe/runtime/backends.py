"""The back ends by name: how many processes each wants, what it cannot run, and its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module

import torch

from hetpipe.documents.cluster import Cluster, Device
from hetpipe.documents.number_types import AS_BUILT, NumberTypes
from hetpipe.documents.plan import Backend, Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.device import Emulation, is_out_of_memory
from hetpipe.layers.model import Model
from hetpipe.layers.split import refuse_skips, tied_layers
from hetpipe.processes.cards import begin_backward
from hetpipe.processes.world import World
from hetpipe.runtime.checks.shortage import Shortage, ShortMemoryError, bytes_there, words_of
from hetpipe.runtime.pipes.one_process import Library, OneProcessEngine
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.replicas import PlanGroups
from hetpipe.runtime.stages.engine import TorchEngine

LOADING = "loading its layers"  # what a process does before the first step
_LIBRARIES = {"fairscale": "hetpipe.runtime.pipes.fairscale_pipe", "torchgpipe": "hetpipe.runtime.pipes.torchgpipe_gpipe"}


def drives_a_replica(backend: Backend) -> bool:
    """Whether one process drives all devices of a replica (torch: one process a device)."""
    return backend in _LIBRARIES


def load_library(backend: Backend) -> Library:
    """The library of a back end that drives a replica; InputError if it is not installed."""
    try:
        found: Library = import_module(_LIBRARIES[backend]).library
    except ImportError as error:
        raise InputError(
            f"the back end {backend!r} cannot be loaded ({error}); install it with: pip install 'hetpipe[pipes]'"
        ) from error
    return found


def node_of(device: str) -> str:
    """The node of a device id."""
    return device.rsplit("/", 1)[0]


def check_backend(backend: Backend, plan: Plan) -> None:
    """InputError with every reason why this back end cannot run this plan."""
    if not drives_a_replica(backend):
        return
    load_library(backend)
    faults = []
    for r, replica in enumerate(plan.replicas):
        m = len(replica.microbatch_sizes)
        depths = replica.depths(plan.schedule)
        if min(depths) < m:
            faults.append(
                f"replica {r} has warm-up depths {list(depths)} for {m} micro-batches, and this back end runs gpipe only: all "
                f"{m} forwards of a stage, whose activations are kept, before its first backward"
            )
        if away := [s for s, stage in enumerate(replica.stages) if stage.offload]:
            faults.append(
                f"replica {r} offloads activations to the host in {'stages' if len(away) > 1 else 'stage'} "
                f"{', '.join(map(str, away))}, which only the back end 'torch' does"
            )
        if split := [s for s, stage in enumerate(replica.stages) if len(stage.devices) > 1]:
            faults.append(
                f"replica {r} splits {'stages' if len(split) > 1 else 'stage'} {', '.join(map(str, split))} over several devices "
                "(tensor parallelism), which only the back end 'torch' does"
            )
        nodes = list(dict.fromkeys(node_of(d) for stage in replica.stages for d in stage.devices))
        if len(nodes) > 1:
            faults.append(f"replica {r} lies on the nodes {nodes}, and one process drives all devices of a replica, on one host")
    if faults:
        raise InputError(
            f"the back end {backend!r} cannot run this plan; plan with --backend {backend}, or run it with --set "
            "plan.backend=torch:\n" + "\n".join(f"  {fault}" for fault in faults)
        )


def check_cluster(backend: Backend, cluster: Cluster | None) -> None:
    """InputError if this back end cannot use the cluster's devices."""
    if cluster is None or not drives_a_replica(backend):
        return
    emulated = [k for k in cluster.device_types if cluster.device_types[k].emulate is not None]
    if emulated:
        raise InputError(
            f"the device types {emulated} are emulated, each device paced by a process of its own; the back end {backend!r} "
            "drives a replica from one process, where their times would add up: use plan.backend=torch, or leave 'emulate' out "
            "(numbers are then right, and times those of one CPU)"
        )


def processes(backend: Backend, plan: Plan, cluster: Cluster) -> list[Device]:
    """The devices for which a process is started on one machine: all of the cluster, or, where a process drives a replica, the
    first of each replica (and one of a node without a replica, so that later nodes keep their numbers)."""
    if not drives_a_replica(backend):
        return list(cluster.devices)
    leading = [cluster.device(replica.stages[0].device) for replica in plan.replicas]
    found = []
    for node in cluster.nodes:
        own = [d for d in leading if d.node == node.name]
        found += own or [d for d in cluster.devices if d.node == node.name][:1]
    return found


def replica_seats(plan: Plan, rank_of: Mapping[str, int]) -> dict[str, int]:
    """Device → rank where a process drives a replica: the processes of a node, in the order of their local ranks, take its
    replicas in the order of the plan. `rank_of` has the process of local rank i as the node's device i. Pure."""
    waiting: dict[str, list[int]] = {}
    for device in sorted(rank_of, key=lambda d: int(d.rsplit("/", 1)[1])):
        waiting.setdefault(node_of(device), []).append(rank_of[device])
    wanted: dict[str, int] = {}
    for replica in plan.replicas:
        node = node_of(replica.stages[0].device)
        wanted[node] = wanted.get(node, 0) + 1
    short = {node: count for node, count in wanted.items() if len(waiting.get(node, ())) < count}
    if short:
        raise InputError(
            "one process drives each replica of the plan: "
            + "; ".join(
                f"node {node!r} has {count} replicas and {len(waiting.get(node, ()))} processes, start its agent with "
                f"--nproc-per-node={count}"
                for node, count in short.items()
            )
        )
    seats: dict[str, int] = {}
    for replica in plan.replicas:
        rank = waiting[node_of(replica.stages[0].device)].pop(0)
        seats |= {device: rank for stage in replica.stages for device in stage.devices}
    return seats


def seat(world: World, backend: Backend, plan: Plan) -> World:
    """The world with each device of the plan at the process that drives it."""
    if not drives_a_replica(backend):
        return world
    seats = replica_seats(plan, world.rank_of)
    own = next((device for device, rank in seats.items() if rank == world.rank), None)
    return replace(world, device_id=own, rank_of=seats)


def refuse_sums(plan: Plan, tied: Mapping[str, Sequence[int]], types: Callable[[str], NumberTypes]) -> None:
    """InputError if the owners of a layer, or of a parameter that layers share, would sum their gradients in different number
    types. `tied`: see `plan_groups`."""
    for owners in (*plan.owners(), *(plan.owners_of_tied(name, layers) for name, layers in tied.items())):
        first, *others = owners.everyone
        for device in others:
            if types(device).summed != types(first).summed:
                what = f"layer {owners.lo}" if owners.tied is None else f"the parameter {owners.tied!r}, which layers share,"
                raise InputError(
                    f"{what} is held in {types(first).held} by {first} and in {types(device).held} by {device}: both sum their "
                    "gradients, and hold the same numbers, so they must hold them in one type"
                )


def open_engine(
    backend: Backend,
    model: Model,
    plan: Plan,
    world: World,
    device: Callable[[str], torch.device],
    emulation: Callable[[str], Emulation | None],
    types: Callable[[str], NumberTypes] = lambda _: AS_BUILT,
) -> PlanEngine | None:
    """This process's engine; None where the plan leaves it unused. `device`, `emulation` and `types` say what a device id is.
    `world` is seated (see `seat`). ShortMemoryError on every rank that the plan uses if one has no memory for its layers.
    Collective."""
    refuse_skips(model.layers, backend)
    ties = tied_layers(model.layers)
    refuse_sums(plan, ties, types)
    groups = PlanGroups.create(plan, world.require(plan.device_ids).rank_of, ties)
    used = world.restrict(plan.device_ids)
    if used.device_id is None:
        return None
    replica = next(r for r in plan.replicas for s in r.stages if used.device_id in s.devices)
    typed = [types(stage.device) for stage in replica.stages]
    own = [stage.device for stage in replica.stages] if drives_a_replica(backend) else [used.device_id]
    devices = [device(device_id) for device_id in own]
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
        torch.cuda.empty_cache()  # of what measuring left; NCCL takes its memory beside it
        groups.warm_up(devices[0])
        for each in devices:
            begin_backward(each)
            torch.cuda.reset_peak_memory_stats(each)
    paced = emulation(own[0])

    def made() -> PlanEngine:
        if drives_a_replica(backend):
            return OneProcessEngine(model, plan, used, groups, devices, typed, load_library(backend))
        return TorchEngine(model, plan, used, groups, devices[0], typed, emulation=paced)

    place = next(seat.place for seat in plan.seats() if seat.device == used.device_id)

    def described(error: Exception) -> Shortage:
        where = f"rank {used.rank}, {place}, device {used.device_id}"
        there = paced.memory_bytes if paced is not None else bytes_there(devices[0])
        return Shortage(device=own[0], where=where, doing=LOADING, words=words_of(error, where), bytes_there=there)

    return _with_all(made, described, used, groups)


def _with_all(
    made: Callable[[], PlanEngine], described: Callable[[Exception], Shortage], used: World, groups: PlanGroups
) -> PlanEngine:
    """This process's engine, when all have theirs: steps wait for no rank that is still loading its layers. ShortMemoryError on
    each if one has no memory for them."""
    engine: PlanEngine | None = None
    short = None
    try:
        engine = made()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        short = described(error)
    found = used.patiently().gather(short)
    if engine is not None and not any(found):
        return engine
    if engine is not None:
        engine.close()
    groups.close()
    used.close()
    raise ShortMemoryError([shortage for shortage in found if shortage is not None])
