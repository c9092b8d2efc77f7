"""Measuring a whole cluster under torchrun or `hetpipe train`: every type measures itself, the main rank makes one profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hetpipe.documents.cluster import Cluster, Device
from hetpipe.documents.job import ProfileSection
from hetpipe.documents.number_types import Precision
from hetpipe.documents.precisions import PrecisionChoice
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.files.messages import InputError
from hetpipe.layers.device import Emulation, one_thread, torch_device
from hetpipe.layers.model import Model, named_layers
from hetpipe.layers.recipe import layer_on
from hetpipe.layers.shards.split import check_split
from hetpipe.layers.shards.styles import styles_of
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.split import tied_names
from hetpipe.layers.trials.layer_check import try_layers
from hetpipe.layers.trials.rows import cut_to_try
from hetpipe.measuring.links import Wires, measure_links, node_pairs
from hetpipe.measuring.overhead import Figure, communicator_bytes, device_overhead, transfer_overlap, with_found
from hetpipe.measuring.precision.choice import able, check_parameters, chosen_precisions
from hetpipe.measuring.precision.layer_bytes import kinds_of
from hetpipe.measuring.profiler import Measured, OptimizerFactory, assemble, check_sizes, measure_device, provenance
from hetpipe.measuring.traffic import Flow
from hetpipe.processes.arithmetic import arithmetic
from hetpipe.processes.environment import step_timeout
from hetpipe.processes.peers.others import showing_others
from hetpipe.processes.progress import Activity
from hetpipe.processes.whereabouts import during
from hetpipe.processes.world import World

HOST = "host"  # the tables by which emulated devices are paced
Hosts = dict[tuple[Precision | None, int], Measured]  # at each precision and degree


def profile_cluster(
    model: Model,
    cluster: Cluster,
    world: World,
    options: ProfileSection,
    optimizer: OptimizerFactory,
    *,
    precision: PrecisionChoice | None = None,
    whole_nodes: bool = False,
) -> Profile:
    """Collective: the first rank of each device type measures it (see `measurers` for `whole_nodes`), at each precision that
    `precision` chooses for it. Emulated types are paced by tables of this host's plain speed, measured first, by one rank alone;
    then they sleep most of the time and measure side by side. Real CPU types measure in turn."""
    sizes = check_sizes(options.microbatch_sizes)
    check_parameters(model, precision)
    if options.tensor_parallel:
        check_degrees(model, cluster, world.rank_of, options.tensor_parallel)
    who = measurers(cluster, world.rank_of, whole_nodes=whole_nodes)
    precisions = _precisions(precision, cluster, world, who)
    model = replace(model, kinds=kinds_of(model))
    _refuse_layers(model, cluster, world, *next(iter(who.values())))
    mine = [device for device, rank in who.values() if rank == world.rank]
    emulated = {kind: rank for kind, (_, rank) in who.items() if cluster.device_types[kind].emulate is not None}
    hosts = Hosts()
    runs = _Runs(model, cluster, sizes, optimizer, options.repeats, world.is_main, hosts)
    for at in dict.fromkeys(at for kind in emulated for at in precisions[kind]):
        hosts[at, 1] = _alone(world, next(iter(emulated.values())), partial(replace(runs, visible=True).host, at))
    done, overheads = list[Measured](), list[DeviceOverhead]()
    for turn in turns(cluster, {device: world.hosts[rank] for device, rank in who.values()}):
        results = list[tuple[list[Measured], DeviceOverhead]]()
        for device in (d for d in mine if d.id in turn):
            on, own = runs.place(device), [runs.device(device, at) for at in precisions[device.type]]
            measured_sizes = own[0].measurement.microbatch_sizes
            with during(f"measuring what the framework takes on {device.type}"):
                overhead = device_overhead(model, device.type, on, measured_sizes[len(measured_sizes) // 2], own[0].stretch)
            results.append((own, overhead))
        for own, overhead in (pair for part in _gathered(world, results) for pair in part):
            done += own
            overheads.append(overhead)
    if options.tensor_parallel:
        done += _measure_split(world, options.tensor_parallel, precisions, runs)
    torch.cuda.empty_cache()  # NCCL takes its memory from what the allocator leaves
    wires = measure_links(cluster, world)
    overheads = with_shared_figures(overheads, cluster, world, wires)
    here = torch_device(cluster.device_types[mine[0].type], mine[0].index) if mine else None
    notes = provenance(
        options.repeats,
        max(m.spread for m in done),
        devices={m.measurement.device_type: who[m.measurement.device_type][0].id for m in done},
        measured_layers=list(kinds_of(model).measured),
        links=wires.noted(),
        arithmetic=arithmetic(),
    )
    profile = (
        assemble(
            model,
            [m.measurement for m in done],
            max(m.state_bytes_per_parameter_byte for m in done),
            hosts=[host.measurement for host in hosts.values()],
            lengths=next((m.lengths for m in (*hosts.values(), *done) if m.lengths), ()),
            links=wires.links,
            adapters=wires.adapters,
            overheads=overheads,
            notes=notes,
            device=here,
        )
        if world.is_main
        else None
    )
    return Profile.parse(world.first(profile.model_dump(mode="json") if profile else None), "the measured profile")


def with_shared_figures(overheads: list[DeviceOverhead], cluster: Cluster, world: World, wires: Wires) -> list[DeviceOverhead]:
    """These, with what takes several devices: bytes of a communicator, and whether transfers hide behind compute: between the
    first two nodes with hosts of their own, by the types of their first devices. Collective."""
    kind_of = {rank: cluster.device(device).type for device, rank in world.rank_of.items()}
    found: dict[str, dict[str, Figure]] = {overhead.device_type: {} for overhead in overheads}
    for rank, taken in enumerate(world.gather(communicator_bytes(world))):
        if taken is not None and rank in kind_of:
            own = found[kind_of[rank]].get("communicator_bytes", Figure(taken, 0.0))
            found[kind_of[rank]]["communicator_bytes"] = Figure(max(taken, own.value), 0.0)
    apart = {adapter.node for adapter in wires.adapters}
    pairs = [pair for pair in node_pairs(cluster, world) if pair.a != pair.b and {pair.a, pair.b} <= apart]
    for pair in pairs[:1]:
        rate = next(x.bytes_per_second for x in wires.found if (x.source, x.target) == (pair.a, pair.b))
        hidden = world.gather(transfer_overlap(world, Flow(pair.left, pair.right), rate))
        for rank in (pair.left, pair.right):
            found[kind_of[rank]]["transfer_overlap"] = hidden[rank]
    return [with_found(overhead, found[overhead.device_type]) for overhead in overheads]


def measurers(cluster: Cluster, rank_of: Mapping[str, int], *, whole_nodes: bool) -> dict[str, tuple[Device, int]]:
    """Device type → the device on which it is measured, and the rank that does it: the first that stands for such a device.
    With `whole_nodes` a process may use all devices of its node (one drives a whole replica): a type that no process stands
    for is measured by the first of a node that has it. InputError if a type is beyond the reach of all. Pure."""
    found: dict[str, tuple[Device, int]] = {}
    first: dict[str, int] = {}  # node → its lowest rank
    for own in sorted(rank_of, key=lambda d: rank_of[d]):
        device = cluster.device(own)
        found.setdefault(device.type, (device, rank_of[own]))
        first.setdefault(device.node, rank_of[own])
    for device in cluster.devices if whole_nodes else ():
        if device.node in first:
            found.setdefault(device.type, (device, first[device.node]))
    beyond = [kind for kind in dict.fromkeys(d.type for d in cluster.devices) if kind not in found]
    if beyond:
        raise InputError(
            f"no process of this job can measure the device types {beyond}, because the job has only the devices "
            f"{sorted(rank_of)} of "
            f"{[d.id for d in cluster.devices]}. Start processes for the other devices, too, or give the job a profile"
        )
    return found


def _precisions(
    choice: PrecisionChoice | None, cluster: Cluster, world: World, who: Mapping[str, tuple[Device, int]]
) -> dict[str, tuple[Precision | None, ...]]:
    """At which precisions each type is measured. InputError on every rank if one cannot compute in what is asked for.
    Collective."""
    own = {}
    for kind, (device, rank) in who.items():
        if rank == world.rank:
            spec = cluster.device_types[kind]
            own[kind] = able(torch_device(spec, device.index), spec.emulate)
    found = {kind: of for part in world.gather(own) for kind, of in part.items()}
    return chosen_precisions(choice, cluster, {kind: found[kind] for kind in who})


def turns(cluster: Cluster, host_of: Mapping[Device, str]) -> list[set[str]]:
    """Ids of the devices that measure at the same time: emulated ones and GPUs together; then plain CPUs, one a host. Pure."""
    together, rounds, waiting = set[str](), list[set[str]](), Counter[str]()
    for device, host in host_of.items():
        if cluster.device_types[device.type].emulate is not None or torch.cuda.is_available():
            together.add(device.id)
            continue
        if waiting[host] == len(rounds):
            rounds.append(set())
        rounds[waiting[host]].add(device.id)
        waiting[host] += 1
    return ([together] if together else []) + rounds


def _refuse_layers(model: Model, cluster: Cluster, world: World, device: Device, rank: int) -> None:
    """InputError on every rank if a layer couples samples or keeps state, which the user has not accepted: known before anything
    is measured, by one rank on its device, which tries the layers that are measured. (The first step tries all, on the
    devices that have them.)"""
    fault = None
    if world.rank == rank and model.coupled_layers is None:
        on = torch_device(cluster.device_types[device.type], device.index)
        with Activity("trying the layers", shown=world.is_main), one_thread(on):
            given = cut_to_try(model.inputs, model.layers[0]).to(on)
            measured = [named_layers(model.layers)[index] for index in kinds_of(model).measured]
            fault = try_layers(measured, given, lambda layer: layer_on(model.layers, layer, on)).fault
    fault = next((told for told in world.gather(fault) if told is not None), None)
    if fault is not None:
        raise InputError(fault)


def _alone(world: World, rank: int, measure: Callable[[], Measured]) -> Measured:
    values = _gathered(world, measure() if world.rank == rank else None)
    measured: Measured = next(v for v in values if v is not None)
    return measured


def _gathered(world: World, value: Any) -> list[Any]:
    """What every rank has measured. The main one, which may have done sooner, shows what the others still measure."""
    if len(world.ranks) == 1:
        return [value]
    with Activity("waiting for the measurements of other ranks", shown=world.is_main) as activity, showing_others(activity):
        return world.gather(value)


@dataclass(frozen=True)
class _Runs:
    """Measures a model's layers on devices of a cluster. `hosts` are the tables of this host's plain speed that were found so
    far; `visible`: this process shows what it measures."""

    model: Model
    cluster: Cluster
    sizes: tuple[int, ...]
    optimizer: OptimizerFactory
    repeats: int
    visible: bool
    hosts: Hosts

    def place(self, device: Device) -> torch.device:
        """Where this process computes for a device."""
        return torch_device(self.cluster.device_types[device.type], device.index)

    def host(self, at: Precision | None, group: Group | None = None) -> Measured:
        """Measure this host's plain speed; with layers that are split over a group, as one of its devices."""
        return self._run(HOST, torch.device("cpu"), at, group, None, self.repeats)

    def device(self, device: Device, at: Precision | None, group: Group | None = None) -> Measured:
        """Measure a device, emulated or not; with layers that are split over a group, as one of its devices."""
        spec, degree = self.cluster.device_types[device.type], group.degree if group is not None else 1
        if spec.emulate is None:
            return self._run(device.type, self.place(device), at, group, None, self.repeats)
        slowdown, host = spec.emulate.slowdown_at(at, device.type), self.hosts[at, degree].measurement
        emulation = Emulation(slowdown=slowdown, host=host, memory_bytes=spec.memory)
        repeats = 3 if group is None else self.repeats  # a paced action hardly varies, but for sums over a link
        return self._run(device.type, self.place(device), at, group, emulation, repeats)

    def _run(
        self,
        kind: str,
        place: torch.device,
        precision: Precision | None,
        group: Group | None,
        emulation: Emulation | None,
        repeats: int,
    ) -> Measured:
        total = len(kinds_of(self.model).measured) * (len(self.sizes) + 1)
        what = "this machine's processor, which paces the emulated devices," if kind == HOST else kind
        over = f" split over {group.degree} devices" if group is not None else ""
        title = f"measuring {what}{f' in {precision}' if precision else ''}{over}"
        with Activity(title.removesuffix(","), total, shown=self.visible) as activity:
            return measure_device(
                self.model,
                kind,
                place,
                self.sizes,
                self.optimizer,
                repeats=repeats,
                emulation=emulation,
                processor_time=kind == HOST,
                advance=activity.advance,
                precision=precision,
                group=group,
            )


WHO_ASKS = "profiler.tensor_parallel, or the plan, asks for them"
Measure = Callable[[Device, Precision | None, Group], Measured]  # as one of the devices of a group


def groups_of(cluster: Cluster, rank_of: Mapping[str, int], degrees: Sequence[int]) -> dict[tuple[str, int], list[Device]]:
    """(device type, degree) → the devices that measure it: the first of a node that has so many which processes stand for.
    InputError where a degree is asked for that no node has. Pure."""
    found = dict[tuple[str, int], list[Device]]()
    for node in cluster.nodes:
        for kind in node.devices:
            own = [d for d in cluster.devices if d.node == node.name and d.type == kind and d.id in rank_of]
            for degree in degrees:
                if len(own) >= degree:
                    found.setdefault((kind, degree), own[:degree])
    missing = [degree for degree in degrees if degree not in {d for _, d in found}]
    if missing:
        raise InputError(
            f"layers split over {missing[0]} devices are to be measured ({WHO_ASKS}), "
            "but no node of the job has so many of one type"
        )
    return found


def check_degrees(model: Model, cluster: Cluster, rank_of: Mapping[str, int], degrees: Sequence[int]) -> None:
    """InputError if no node has so many devices, or a layer cannot be split over so many."""
    groups_of(cluster, rank_of, degrees)
    tied = tied_names(model.layers)
    for degree in degrees:
        for name, layer in named_layers(model.layers):
            try:
                check_split(name, layer, degree, tied)
            except InputError as error:
                raise InputError(f"layers split over {degree} devices are to be measured ({WHO_ASKS}): {error}") from error


def least_degree(model: Model, cluster: Cluster, rank_of: Mapping[str, int]) -> int | None:
    """The least number of devices over which layers could be split and measured; None if a node has no two of one type, or
    nothing says how the layers are split."""
    if not any(styles_of(name, layer) for name, layer in named_layers(model.layers)):
        return None
    for degree in range(2, max(count for node in cluster.nodes for count in node.devices.values()) + 1):
        try:
            check_degrees(model, cluster, rank_of, [degree])
        except InputError:
            continue
        return degree
    return None


def _measure_split(
    world: World, degrees: Sequence[int], precisions: Mapping[str, Sequence[Precision | None]], runs: _Runs
) -> list[Measured]:
    """Measure split layers on each type of which a node has so many devices; first, where such are emulated, the tables of this
    host's plain speed. Collective."""
    groups = groups_of(runs.cluster, world.rank_of, degrees)
    emulated = [key for key in groups if runs.cluster.device_types[key[0]].emulate is not None]
    every = list(dict.fromkeys(at for kind, _ in emulated for at in precisions[kind]))
    first = {degree: groups[kind, degree] for kind, degree in reversed(emulated)}
    hosts = measure_degrees(world, [(of, every) for of in first.values()], lambda _, at, group: runs.host(at, group))
    runs.hosts.update({(m.measurement.precision, m.measurement.tensor_parallel): m for m in hosts})
    return measure_degrees(world, [(of, precisions[kind]) for (kind, _), of in groups.items()], runs.device)


def measure_degrees(
    world: World, groups: Sequence[tuple[Sequence[Device], Sequence[Precision | None]]], measure: Measure
) -> list[Measured]:
    """Measure split layers on each group of devices, at these precisions. Collective."""
    done = list[Measured]()
    for devices, precisions in groups:
        ranks = [world.rank_of[device.id] for device in devices]
        processes = dist.new_group(ranks, timeout=step_timeout())
        own = list[Measured]()
        if world.rank in ranks:
            number = ranks.index(world.rank)
            own = [measure(devices[number], at, Group(ranks, number, processes)) for at in precisions]
        told = [found for rank, found in zip(world.ranks, world.gather(own), strict=True) if rank == ranks[0]]
        done += [measured for part in told for measured in part]
        if world.rank in ranks:
            dist.destroy_process_group(processes)
    return done
