"""What devices there are: the cluster that torchrun, or this machine, gives; and how a cluster file compares with them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Backend, Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.messages import InputError, natural_key
from hetpipe.layers.device import torch_device
from hetpipe.measuring.profiler import default_type_name
from hetpipe.processes.environment import NODE, own_node, place
from hetpipe.processes.progress import say, warn
from hetpipe.processes.world import World
from hetpipe.runtime.backends import drives_a_replica

ALIKE = 0.05  # hosts whose times differ by no more are one type of device
NOMINAL = 1.1  # a card sold as one of 24 GB may have 22.2 GiB: by so much a cluster file may be above what CUDA says


def discover_cluster(backend: Backend = "torch") -> Cluster:
    """The cluster that torchrun, or this machine, gives: each agent is a node, types are the GPUs' names, and the CPU of each
    node, whose speed no name tells, is a type of its own (see `one_type_again`). A process stands for the device of its local
    rank; where the back end drives a replica from one process, the first for all GPUs of its host. Collective."""
    here, own = place(), list[tuple[int, int, str, int]]()
    if torch.cuda.is_available():
        indices = [here.local_rank]
        if drives_a_replica(backend):
            indices = list(range(torch.cuda.device_count())) if here.local_rank == 0 else []
        for index in indices:
            gpu = torch.device("cuda", index)
            own.append((here.agent, index, default_type_name(gpu), torch.cuda.get_device_properties(gpu).total_memory))
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here.local_size
        own.append((here.agent, here.local_rank, "cpu", memory))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return cluster_of([row for part in parts for row in part])


def cluster_of(rows: Sequence[tuple[int, int, str, int]]) -> Cluster:
    """The cluster of devices (agent, index, type, bytes of memory). Pure."""
    if len({agent for agent, _, kind, _ in rows if kind == "cpu"}) > 1:
        rows = [(agent, index, f"cpu-n{agent}" if kind == "cpu" else kind, memory) for agent, index, kind, memory in rows]
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


def there(cluster: Cluster, world: World) -> Cluster:
    """The part of a file's cluster whose nodes have processes; one rank says which have none. InputError where an agent may be a
    node that is there or one that is gone, and these are not alike. Collective."""
    present = {cluster.device(device).node for device in world.rank_of}
    gone = [node for node in cluster.nodes if node.name not in present]
    if not gone:
        return cluster
    told = set(world.gather(own_node()))
    for node in cluster.nodes:
        if node.name in present - told and node.host is None:
            other = next((o for o in gone if o.devices != node.devices and o.device_count == node.device_count), None)
            if other is not None:
                raise InputError(
                    f"{len(present)} agents came for {len(cluster.nodes)} nodes, and nothing says whether one of them is node "
                    f"{node.name!r} or {other.name!r}, which have as many devices and not the same: give nodes of the cluster "
                    f"file their host, or set {NODE} on each host to the name of its node"
                )
    if world.is_main:
        say(f"{', '.join(node.name for node in gone)} of the cluster file has no process: going on without")
    return cluster.with_nodes(node for node in cluster.nodes if node.name in present)


def as_it_is(cluster: Cluster, there: Mapping[str, tuple[str, int]]) -> tuple[Cluster, list[str]]:
    """The cluster of a file with the memory that its GPUs really have, where that is less, and notes about what is different.
    `there`: device id → name and total bytes of the card. InputError where a type has far more memory than its card, or stands
    for unlike cards, of which only one would be measured."""
    types, notes, faults = dict(cluster.device_types), list[str](), list[str]()
    cards: dict[str, dict[str, str]] = {}  # type → name of the card → the first such device
    for device, (name, size) in there.items():
        kind = cluster.device(device).type
        cards.setdefault(kind, {}).setdefault(name, device)
        declared, card = cluster.device_types[kind].memory, f"{name} with {size / 2**30:.2f} GiB"
        if declared > size * NOMINAL:
            faults.append(
                f"device {device} is of type {kind!r} with {declared / 2**30:.2f} GiB in the cluster file, but is a {card}: "
                "correct the type's memory, or write the node's devices in the order of its GPUs"
            )
        elif types[kind].memory > size:
            notes.append(f"note: device type {kind!r} counts with the {size / 2**30:.2f} GiB of {device}, a {name}")
            types[kind] = types[kind].model_copy(update={"memory": size})
    for kind, names in cards.items():
        if len(names) > 1:
            listed = ", ".join(f"{name} (device {device})" for name, device in names.items())
            faults.append(f"device type {kind!r} stands for unlike GPUs: {listed}; give each a type of its own")
        elif _plain(kind) not in _plain(name := next(iter(names))):
            notes.append(f"note: device type {kind!r} is a {name}")
    if faults:
        raise InputError("; ".join(faults))
    return cluster.model_copy(update={"device_types": types}), notes


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def cards(world: World, backend: Backend, cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Device id → name and bytes of the GPU that this job's processes drive it with. Collective."""
    own = [world.device_id] if world.device_id is not None else []
    if own and drives_a_replica(backend):
        first = cluster.device(own[0])
        own = [d.id for d in cluster.devices if d.node == first.node and first.index == 0]
    found = {}
    for device in own:
        gpu = torch_device(cluster.type_of(device), cluster.device(device).index)
        found[device] = torch.cuda.get_device_name(gpu), torch.cuda.get_device_properties(gpu).total_memory
    return {device: card for part in world.gather(found) for device, card in part.items()}


def note_missing_gpus(world: World, cluster: Cluster) -> None:
    """Say on one rank that real devices are stood for by processes on the CPU, and which of them share its cores."""
    real = [k for k, kind in cluster.device_types.items() if kind.emulate is None and not k.startswith("cpu")]
    if not real or torch.cuda.is_available():
        return
    shared = [f"{count} on {host}" for host, count in Counter(world.hosts).items() if count > 1]
    sharing = f", which share the cores of their host ({', '.join(shared)})" if shared else ""
    warn(f"note: no GPU is found, so devices of type {', '.join(real)} are plain CPU processes{sharing}")


def one_type_again(cluster: Cluster, profile: Profile) -> tuple[Cluster, Profile]:
    """The cluster and profile of CPUs that were found, in which those whose times agree within 5 % at every micro-batch size are
    one type again, with the mean of their times and the least of their memory. Fewer types are planned sooner. Pure."""
    cluster = cluster.limited(profile.memory_limits)
    own: dict[str, list[Measurement]] = {}
    for found in profile.measurements:
        own.setdefault(found.device_type, []).append(found)
    groups: list[list[str]] = []
    for kind in sorted(own, key=lambda k: sum(float((m.forward + m.backward).sum()) for m in own[k])):
        group = next((g for g in groups if _agree(own[g[0]], own[kind])), None)
        if group is None:
            groups.append([kind])
        else:
            group.append(kind)
    names = {kind: min(group, key=natural_key) for group in groups for kind in group}
    types = {
        name: cluster.device_types[name].model_copy(
            update={"memory": min(cluster.device_types[kind].memory for kind in names if names[kind] == name)}
        )
        for name in dict.fromkeys(names.values())
    }
    nodes = tuple(
        node.model_copy(update={"devices": {names[kind]: count for kind, count in node.devices.items()}})
        for node in cluster.nodes
    )
    fields = {name: getattr(cluster, name) for name in type(cluster).model_fields}
    return (
        Cluster(**{**fields, "device_types": types, "nodes": nodes}),
        profile.model_copy(
            update={
                "measurements": tuple(
                    _mean(rows, names[group[0]]) for group in groups for rows in zip(*(own[kind] for kind in group), strict=True)
                )
            }
        ),
    )


def with_own_types(plan: Plan, merged: Cluster, cluster: Cluster) -> Plan:
    """The plan with its precisions by the types of the cluster, of which some were one in what was planned for."""
    said = plan.precision or {}
    kinds = {cluster.device(device).type: merged.device(device).type for device in plan.device_ids}
    own = {kind: said[planned] for kind, planned in kinds.items() if planned in said}
    return plan.model_copy(update={"precision": own or None})


def _agree(ones: Sequence[Measurement], others: Sequence[Measurement]) -> bool:
    """Whether two types, with these measurements, at each precision one, are as fast."""
    if not (ones[0].device_type.startswith("cpu") and others[0].device_type.startswith("cpu")):
        return False  # a GPU's name tells its speed
    if [(m.precision, m.microbatch_sizes) for m in ones] != [(m.precision, m.microbatch_sizes) for m in others]:
        return False
    pairs = [[(m.forward + m.backward).sum(1) for m in pair] for pair in zip(ones, others, strict=True)]
    return all(bool((np.maximum(a, b) <= (1 + ALIKE) * np.minimum(a, b)).all()) for a, b in pairs)


def _mean(group: Sequence[Measurement], name: str) -> Measurement:
    def of(key: str) -> list[Any]:
        return list(np.mean([getattr(m, key) for m in group], axis=0).tolist())

    fields = {key: of(key) for key in ("forward_seconds", "backward_seconds", "optimizer_seconds")}
    return Measurement.model_validate({**group[0].model_dump(), **fields, "device_type": name})
