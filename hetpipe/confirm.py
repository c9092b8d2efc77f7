"""Whether a profile still holds: a short look at the devices and links that it was measured on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hetpipe.cluster import Cluster, Device, LinkBetween
from hetpipe.device import one_thread, torch_device
from hetpipe.layer_run import DIFFERENT, WINDOW_SECONDS, WINDOWS, layer_alone, middle_times, without_pause
from hetpipe.measure import LARGE_BYTES, Pair, measure_links, node_pairs, ping_pong, turns
from hetpipe.model import Model, named_layers
from hetpipe.profiles import Measurement, Profile
from hetpipe.report import human_seconds
from hetpipe.split import trace_boundaries, unchanged_buffers
from hetpipe.world import World

NEGLIGIBLE_SECONDS = 2e-4  # by which times of tiny layers and messages differ from run to run
GLANCE_SECONDS = 2.0  # for all layers that are looked at
PROBE_SECONDS = 0.02  # for one message over a link


def unconfirmed_types(
    profile: Profile, model: Model, cluster: Cluster, world: World, who: Mapping[str, tuple[Device, int]]
) -> list[str]:
    """What is said of real device types that are not as fast now as in the profile, from a few layers each. Collective."""
    real = {kind: seat for kind, seat in who.items() if cluster.device_types[kind].emulate is None}
    found = list[str]()
    for turn in turns(cluster, {device: world.hosts[rank] for device, rank in real.values()}):
        own = []
        for kind, (device, rank) in real.items():
            if rank == world.rank and device.id in turn:
                on = torch_device(cluster.device_types[kind], device.index)
                own.append((kind, device.id, glance(model, profile.measurement(kind), on)))
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


def confirmed_links(links: Sequence[LinkBetween], cluster: Cluster, world: World) -> tuple[list[LinkBetween], list[str]]:
    """These links, if a few messages over each node's are as fast as they were; else all of them measured again, and what is
    said of those that differ. Collective."""
    before = {frozenset(link.between): link for link in links}
    known, seen, off = list[Pair](), set[str](), False
    for pair in node_pairs(cluster, world):
        if frozenset((pair.a, pair.b)) in before and (pair.a == pair.b or not {pair.a, pair.b} <= seen):
            known.append(pair)
            seen |= {pair.a, pair.b} if pair.a != pair.b else set()
    for pair in known:
        then = before[frozenset((pair.a, pair.b))]
        size = int(min(LARGE_BYTES, PROBE_SECONDS * (then.bandwidth or LARGE_BYTES / PROBE_SECONDS)))
        times = ping_pong(world, pair, (size,), 5)[0]
        off = off or differs(then.seconds(size), min(times), statistics.median(times))
    if known and not off:
        return list(links), []
    now = measure_links(cluster, world)
    said = []
    for link in now:
        then = before.get(frozenset(link.between), link)
        a, b = (x.seconds(LARGE_BYTES) for x in (then, link))
        if differs(a, b, b):
            said.append(f"{' – '.join(dict.fromkeys(link.between))}: 4 MiB took {human_seconds(a)}, now {human_seconds(b)}")
    return now, said


class Glance(NamedTuple):
    """Seconds of forward and backward of a few layers: as a measurement has them, and now."""

    layers: tuple[str, ...]
    then: float
    least: float
    median: float


def glance(model: Model, measurement: Measurement, device: torch.device) -> Glance:
    """Time the heaviest layers whose turns fit into a second or two, at a middle size that was measured."""
    size, then = middle_times(measurement)
    costs = [(1 + WINDOWS) * WINDOW_SECONDS if t < WINDOW_SECONDS else 2 * t for t in then]
    chosen, left = list[int](), GLANCE_SECONDS
    for index in sorted(range(len(then)), key=lambda i: -then[i]):
        if len(chosen) < 3 and (costs[index] <= left or (not chosen and costs[index] == min(costs))):
            chosen.append(index)
            left -= costs[index]
    specs, least, median = trace_boundaries(model.layers, model.sample(size)[0]), 0.0, 0.0
    with one_thread(device), unchanged_buffers(model.layers):
        for index in sorted(chosen):
            with layer_alone(model, specs, index, size, device) as run:
                times = without_pause(run, device, then[index])
            least, median = least + min(times), median + statistics.median(times)
    names = [name for name, _ in named_layers(model.layers)]
    return Glance(tuple(names[i] for i in sorted(chosen)), sum(then[i] for i in chosen), least, median)
