"""Whether a profile still holds: a short look at the devices and links that it was measured on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hetpipe.documents.cluster import AdapterOf, Cluster, Device, LinkBetween
from hetpipe.documents.number_types import NumberTypes
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.files.units import human_seconds
from hetpipe.layers.device import one_thread, torch_device
from hetpipe.layers.model import Model, as_tuple, move, named_layers
from hetpipe.layers.recipe import layer_on
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.kept import kept
from hetpipe.measuring.clock import Clock, stretch_of
from hetpipe.measuring.layer_run import DIFFERENT, LayerRun, busy_factor, loss_of, without_history
from hetpipe.measuring.links import LARGE_BYTES, Wires, measure_links, node_pairs
from hetpipe.measuring.measure import turns
from hetpipe.measuring.profiler import time_layer
from hetpipe.measuring.traffic import Pair, ping_pong
from hetpipe.processes.world import World

NEGLIGIBLE_SECONDS = 2e-4  # by which times of tiny layers and messages differ from run to run
GLANCE_SECONDS, GLANCES = 2.0, 7  # for all layers that are looked at, and how often each is at most
PROBE_SECONDS = 0.02  # for one message over a link


def unconfirmed_types(
    profile: Profile, model: Model, cluster: Cluster, world: World, who: Mapping[str, tuple[Device, int]]
) -> list[str]:
    """What is said of real device types that are not as fast now as in the profile, from a few layers each. Of several precisions
    the first is looked at: what makes a device slower than it was (heat, a quota, other work, another card) shows in each, and
    which one is trained is not known before there is a plan. Collective."""
    real = {kind: seat for kind, seat in who.items() if cluster.device_types[kind].emulate is None}
    found = list[str]()
    for turn in turns(cluster, {device: world.hosts[rank] for device, rank in real.values()}):
        own = []
        for kind, (device, rank) in real.items():
            if rank == world.rank and device.id in turn:
                on = torch_device(cluster.device_types[kind], device.index)
                measurement = next(m for m in profile.measurements if m.device_type == kind and m.tensor_parallel == 1)
                own.append((kind, device.id, glance(model, measurement, on)))
        found += [
            f"{', '.join(map(repr, seen.layers))} took {human_seconds(seen.then)} on {device} ({kind}) when measured, now "
            f"{human_seconds(seen.median)} ({seen.median / seen.then - 1:+.0%})"
            for part in world.gather(own)
            for kind, device, seen in part
            if differs(seen.then, seen.least, seen.median)
        ]
    return found


def differs(then: float, least: float, median: float) -> bool:
    """Whether what took `then` seconds (a median) now takes longer or shorter by more than 15 %. It takes longer only if even the
    fastest of the new times does: other work on the machine makes single ones long."""
    if abs(median - then) < NEGLIGIBLE_SECONDS:
        return False
    return least > (1 + DIFFERENT) * then or median * (1 + DIFFERENT) < then


def confirmed_links(profile: Profile, cluster: Cluster, world: World) -> tuple[Wires | None, list[str]]:
    """None, if a few messages over each node's links are as fast as those of the profile were; else all of them measured again,
    and what is said of those that differ. Collective."""
    before = {frozenset(link.between): link for link in profile.links}
    known, seen, off = list[Pair](), set[str](), False
    pairs = node_pairs(cluster, world)
    for pair in pairs:
        if frozenset((pair.a, pair.b)) in before and (pair.a == pair.b or not {pair.a, pair.b} <= seen):
            known.append(pair)
            seen |= {pair.a, pair.b} if pair.a != pair.b else set()
    for pair in known:
        then = before[frozenset((pair.a, pair.b))]
        size = int(min(LARGE_BYTES, PROBE_SECONDS * (then.bandwidth or LARGE_BYTES / PROBE_SECONDS)))
        times = ping_pong(world, pair, (size,), 5)[0]
        off = off or differs(both_ways(then, profile.adapters, size), min(times), statistics.median(times))
    if not pairs or (known and not off):
        return None, []
    now = measure_links(cluster, world)
    said = []
    for link in now.links:
        then = before.get(frozenset(link.between), link)
        a, b = both_ways(then, profile.adapters, LARGE_BYTES), both_ways(link, now.adapters, LARGE_BYTES)
        if differs(a, b, b):
            said.append(f"{' – '.join(dict.fromkeys(link.between))}: 4 MiB took {human_seconds(a)}, now {human_seconds(b)}")
    return now, said


def both_ways(link: LinkBetween, adapters: Sequence[AdapterOf], size_bytes: int) -> float:
    """Seconds of a message there and back over a link, halved: no adapter at its ends lets it pass faster than it is."""
    rates = {adapter.node: adapter.rates for adapter in adapters}
    (a, b), alone, halves = link.between, link.seconds(size_bytes), []
    for source, target in ((a, b), (b, a)):
        passed = [rates[source].out, rates[target].into] if a != b and {a, b} <= rates.keys() else []
        halves.append(max([alone, *(link.seconds(0) + size_bytes / rate for rate in passed)]))
    return sum(halves) / 2


class Glance(NamedTuple):
    """Seconds of forward and backward of a few layers: as a measurement has them, and now."""

    layers: tuple[str, ...]
    then: float
    least: float
    median: float


def glance(model: Model, measurement: Measurement, device: torch.device) -> Glance:
    """Time the heaviest layers whose turns fit into a second or two, at a middle size that was measured, in the way in which it
    was: with pauses, and by how much the device is slower without any."""
    size = measurement.microbatch_sizes[len(measurement.microbatch_sizes) // 2]
    then = [float(forward + backward) for forward, backward in zip(*measurement.times(size), strict=True)]
    repeats = [max(1, min(GLANCES, int(GLANCE_SECONDS / 4 / max(t, 1e-9)))) for t in then]
    costs = [(count + 1) * t for count, t in zip(repeats, then, strict=True)]
    chosen, left = list[int](), GLANCE_SECONDS
    for index in sorted(range(len(then)), key=lambda i: -then[i]):
        if len(chosen) < 3 and (costs[index] <= left or (not chosen and costs[index] == min(costs))):
            chosen.append(index)
            left -= costs[index]
    layers = named_layers(model.layers)
    mix = [(batch, trace(model.layers, batch.inputs, kinds=model.kinds).rows) for batch in model.mix(size)]
    types = NumberTypes.at(measurement.precision)
    clock = Clock(device, stretch=stretch_of(device))
    least, median, factor = 0.0, 0.0, 1.0
    with one_thread(device), kept(model.layers):
        for index in sorted(chosen):
            with layer_on(model.layers, layers[index][1], device, types) as layer:
                for number, (batch, specs) in enumerate(mix):
                    given = as_tuple(batch.inputs) if index == 0 else tuple(spec.filled() for spec in specs[index])
                    last = loss_of(model, move(batch.targets, device)) if index == len(layers) - 1 else None
                    run = LayerRun(layer, without_history([t.to(device) for t in given]), last)
                    times = _seconds(run, clock, index, size, repeats[index])
                    if index == chosen[0] and number == 0 and clock.stretch is None:
                        factor = busy_factor(run, statistics.median(times), device)
                    least, median = least + batch.share * min(times), median + batch.share * statistics.median(times)
    names = tuple(layers[i][0] for i in sorted(chosen))
    return Glance(names, sum(then[i] for i in chosen), factor * least, factor * median)


def _seconds(run: LayerRun, clock: Clock, index: int, size: int, repeats: int) -> list[float]:
    return [forward + backward for forward, backward in time_layer(run, clock, index, size, repeats)]
