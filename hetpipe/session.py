"""From a job file to ranks that know their part: world, model, profile, plan. The same on one machine and under torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from hetpipe.build import build_data, build_model, check_training, optimizer_factory
from hetpipe.cluster import Cluster
from hetpipe.config import Job, PlanSection, ProfileSection, TorchNamed
from hetpipe.cost import Costs
from hetpipe.datasets import DataSplits
from hetpipe.device import Emulation, module_bytes, torch_device, usable_bytes
from hetpipe.formats import InputError
from hetpipe.launch import describe_with, name_places
from hetpipe.measure import cache_path, profile_cluster
from hetpipe.model import Model, named_layers
from hetpipe.plan import Backend, Plan
from hetpipe.planner import make_plan
from hetpipe.profiler import default_type_name
from hetpipe.profiles import Profile
from hetpipe.runtime.backends import (
    check_backend,
    check_cluster,
    drives_a_replica,
    open_engine,
    seat,
)
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.world import World, connect, create_world


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Who trains what where: all that measuring, planning and joining need."""

    world: World
    cluster: Cluster
    model: Model


@dataclass(frozen=True, kw_only=True)
class Session(Setting):
    """A running job on this rank, before planning: everything that does not depend on the plan."""

    job: Job
    data: DataSplits


def discover_cluster(backend: Backend = "torch") -> Cluster:
    """The cluster that torchrun, or this machine, gives: each agent is a node, types are the GPUs' names. A process stands for
    the device of its local rank; where the back end drives a replica from one process, the first for all GPUs of its host.
    Of a GPU's memory, CUDA and the libraries keep a part. Collective."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    agent = int(os.environ.get("GROUP_RANK", "0"))
    own = []
    if torch.cuda.is_available():
        indices = [local]
        if drives_a_replica(backend):
            indices = list(range(torch.cuda.device_count())) if local == 0 else []
        for index in indices:
            gpu = torch.device("cuda", index)
            own.append((agent, index, default_type_name(gpu), usable_bytes(gpu)))
    else:
        per_host = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host
        own.append((agent, local, "cpu", memory))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return _cluster_of([row for part in parts for row in part])


def _cluster_of(rows: Sequence[tuple[int, int, str, int]]) -> Cluster:
    """The cluster of devices (agent, index, type, bytes of memory)."""
    nodes: dict[int, dict[str, int]] = {}
    types: dict[str, dict[str, int]] = {}
    for agent, _, kind, memory in sorted(rows):
        counts = nodes.setdefault(agent, {})
        if kind in counts and list(counts)[-1] != kind:
            order = [row[2] for row in sorted(rows) if row[0] == agent]
            raise InputError(
                f"the devices of agent {agent} are, by local rank, {order}; a node lists each type once, so put equal ones "
                "beside each other with CUDA_VISIBLE_DEVICES"
            )
        counts[kind] = counts.get(kind, 0) + 1
        types[kind] = {"memory": min(memory, types.get(kind, {}).get("memory", memory))}
    document = {
        "format": "hetpipe.cluster/1",
        "device_types": types,
        "nodes": [{"name": f"n{a}", "devices": c} for a, c in sorted(nodes.items())],
    }
    return Cluster.parse(document, "the devices found")


def meet(cluster: Cluster | None, backend: Backend = "torch") -> tuple[World, Cluster]:
    """Join the other ranks, as the devices of `cluster`; without one, of the cluster that they are. Collective."""
    check_cluster(backend, cluster)
    emulated = cluster is not None and any(t.emulate is not None for t in cluster.device_types.values())
    connect(use_cuda=torch.cuda.is_available() and not emulated)
    if not torch.cuda.is_available() or emulated:
        torch.set_num_threads(1)  # as when it was measured; ranks that share cores get slower with more
    cluster = cluster or discover_cluster(backend)
    world = create_world(cluster)
    here = f"rank {world.rank}, device {world.device_id}"
    describe_with(lambda: here)
    return world, cluster


def open_session(job: Job) -> Session:
    """Join the other ranks, build the model (the same weights everywhere) and the data. Collective."""
    world, cluster = meet(job.read_cluster(), job.plan.backend)
    check_training(job)
    data = build_data(job)
    return Session(job=job, world=world, cluster=cluster, model=build_model(job, data.train), data=data)


def obtain_profile(session: Session, *, fresh: bool = False) -> Profile:
    """The job's profile file, if it names one; else as `measured`. Collective."""
    job = session.job
    if job.profile is not None and not fresh:
        profile = Profile.load(job.profile)
        _check_profile(profile, session.model, job.profile)
        return profile
    whole_nodes = drives_a_replica(job.plan.backend)
    return measured(session, job.profiler, job.train.optimizer, fresh=fresh, whole_nodes=whole_nodes)


def measured(
    setting: Setting,
    options: ProfileSection,
    optimizer: TorchNamed,
    *,
    fresh: bool = False,
    whole_nodes: bool = False,
) -> Profile:
    """The cached profile of this model on these devices; else a new measurement, which is cached. `whole_nodes`: a process may
    use all devices of its node. Collective."""
    model, cluster, world = setting.model, setting.cluster, setting.world
    path = cache_path(model, cluster, options, repr(optimizer))
    cached = world.first(_cached(path) if world.is_main and not fresh else None)
    if cached is not None:
        return Profile.parse(cached, path)
    profile = profile_cluster(
        model, cluster, world, options, optimizer_factory(optimizer), whole_nodes=whole_nodes
    )
    if world.is_main:
        profile.save(path)
    world.barrier()
    return profile


def _check_profile(profile: Profile, model: Model, source: str) -> None:
    """A profile of another model, or of this one with other arguments, would plan and pace something else."""
    faults = []
    if profile.model != model.name:
        faults.append(f"it is of model {profile.model!r}, the job's is {model.name!r}")
    measured = [(layer.name, layer.parameter_bytes) for layer in profile.layers]
    own = [(name, module_bytes(layer)[0]) for name, layer in named_layers(model.layers)]
    if len(measured) != len(own):
        faults.append(f"it has {len(measured)} layers, the model {len(own)}")
    else:
        faults += [
            f"layer {i} is {there!r} with {there_bytes} parameter bytes, in the model {here!r} with {here_bytes}"
            for i, ((there, there_bytes), (here, here_bytes)) in enumerate(zip(measured, own, strict=True))
            if (there, there_bytes) != (here, here_bytes)
        ][:1]
    if faults:
        raise InputError(
            f"{source} is not a profile of this model ({'; '.join(faults)}); measure it with 'hetpipe profile'"
        )


def _cached(path: str) -> Any:
    """The profile in the cache; None where there is none, or one that is no longer readable."""
    try:
        return Profile.load(path).model_dump(mode="json") if Path(path).exists() else None
    except InputError:
        return None


def planned_by_file(session: Session) -> Plan | None:
    """The job's plan file, if it names one, checked against everything but the profile."""
    job = session.job
    if job.plan.file is None:
        return None
    plan = Plan.load(job.plan.file)
    plan.check(
        cluster=session.cluster,
        layers=len(session.model.layers),
        global_batch=job.train.global_batch,
        source=job.plan.file,
    )
    check_backend(job.plan.backend, plan)
    return plan


def obtain_plan(session: Session, profile: Profile) -> Plan:
    """A new plan by the job's partitioner. Collective."""
    return planned(session, profile, session.job.train.global_batch, session.job.plan)


def planned(setting: Setting, profile: Profile, global_batch: int, options: PlanSection) -> Plan:
    """A new plan, made by the main rank. Collective."""
    world = setting.world
    outcome: Any = None
    if world.is_main:
        outcome = _try_plan(profile, setting.cluster, global_batch, options)
    outcome = world.first(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return Plan.parse(outcome, "the new plan")


def _try_plan(profile: Profile, cluster: Cluster, global_batch: int, options: PlanSection) -> Any:
    console = Console(stderr=True)
    try:
        with console.status("planning") as status:
            plan = make_plan(
                profile,
                cluster,
                global_batch,
                partitioner=options.partitioner,
                schedule=options.schedule,
                backend=options.backend,
                allow_recompute=options.allow_recompute,
                memory_reserve=options.memory_reserve,
                progress=lambda message: status.update(f"planning: {message}"),
            )
        return plan.model_dump(mode="json")
    except Exception as error:  # goes to every rank, which raises it
        return error


def join(setting: Setting, profile: Profile, plan: Plan, backend: Backend = "torch") -> PlanEngine | None:
    """This process's engine; None where the plan leaves it unused (it may end). Collective."""
    cluster, model = setting.cluster, setting.model
    plan.check(cluster=cluster, profile=profile, layers=len(model.layers))
    check_backend(backend, plan)
    world = seat(setting.world, backend, plan)
    if world.is_main:
        name_places(_places(plan))
    if world.device_id in plan.device_ids:
        place = _places(plan)[world.device_id]
        here = f"rank {world.rank}, {place}, device {world.device_id}"
        describe_with(lambda: here)

    def device(device_id: str) -> torch.device:
        found = cluster.device(device_id)
        return torch_device(cluster.device_types[found.type], found.index)

    engine = open_engine(backend, model, plan, world, device, lambda d: _emulation(cluster, profile, plan, d))
    if engine is not None:
        describe_with(lambda: f"{engine.name}, in {engine.doing}")
    return engine


def _places(plan: Plan) -> dict[str, str]:
    """Device → "replica 0 stage 1"."""
    return {
        stage.device: f"replica {r} stage {s}"
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
    }


def _emulation(cluster: Cluster, profile: Profile, plan: Plan, device_id: str) -> Emulation | None:
    spec = cluster.type_of(device_id)
    if spec.emulate is None:
        return None
    if profile.host is None:
        raise InputError(
            f"device {device_id} is emulated, but the profile has no 'host' measurement to pace it by; "
            "measure again with 'hetpipe profile'"
        )
    stage, samples = next((s, r.samples) for r in plan.replicas for s in r.stages if s.device == device_id)
    memory = Costs(profile, cluster).stage_memory(
        cluster.device(device_id).type, *stage.layers, samples=samples, recompute=stage.recompute
    )
    largest = max(max(r.microbatch_sizes) for r in plan.replicas if stage in r.stages)
    return Emulation(
        slowdown=spec.emulate.slowdown,
        host=profile.host,
        memory_bytes=spec.memory,
        transient_bytes=round(memory.transient_per_sample * largest),
    )
