"""Which layers change their place from one plan to the next, and how long it takes to send them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError

FEW_BYTES = 2**20  # by which links are compared


class Move(NamedTuple):
    """A device gets a layer, from the nearest device that has it."""

    layer: int
    device: str
    source: str


def stage_of(plan: Plan, device: str | None) -> StagePlan | None:
    """What the device has of the plan; None if the plan does not use it."""
    return next((stage for replica in plan.replicas for stage in replica.stages if device in stage.devices), None)


def stay(plan: Plan, following: Plan, device: str | None) -> range:
    """The layers that a device has under both plans, whole, in a process of its own: only these can stay as they are."""
    before, after = stage_of(plan, device), stage_of(following, device)
    if before is None or after is None or {plan.backend, following.backend} != {"torch"}:
        return range(0)
    if len(before.devices) > 1 or len(after.devices) > 1:
        return range(0)
    return range(max(before.layers[0], after.layers[0]), min(before.layers[1], after.layers[1]))


def moves(plan: Plan, following: Plan, cluster: Cluster) -> list[Move]:
    """What each device of the following plan gets that it has not."""
    holders = defaultdict[int, list[str]](list)
    for device in plan.device_ids:
        for layer in range(*_layers(plan, device)):
            holders[layer].append(device)
    return [
        Move(layer, device, nearest(device, holders[layer], cluster))
        for device in following.device_ids
        for layer in range(*_layers(following, device))
        if layer not in stay(plan, following, device)
    ]


def in_place(plan: Plan, following: Plan, cluster: Cluster) -> Plan:
    """The following plan with devices of one node and type in each other's places, such that more layers stay where they are."""
    kind = {device.id: (device.node, device.type) for device in cluster.devices}
    common = {
        (there, device): len(_common(plan, device, following, there))
        for there in following.device_ids
        for device in kind
        if kind[there] == kind[device]
    }
    places = dict[str, str]()  # device of the following plan → the one that takes its place
    for there, device in sorted(common, key=lambda pair: (-common[pair], pair[0] != pair[1])):
        if there not in places and device not in places.values():
            places[there] = device
    replicas = tuple(
        replica.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(update={"devices": tuple(places[device] for device in stage.devices)})
                    for stage in replica.stages
                )
            }
        )
        for replica in following.replicas
    )
    return following.model_copy(update={"replicas": replicas})


def _common(plan: Plan, device: str, following: Plan, there: str) -> range:
    """The layers that a device has, and another will have."""
    (a, b), (c, d) = _layers(plan, device), _layers(following, there)
    return range(max(a, c), min(b, d))


def _layers(plan: Plan, device: str) -> tuple[int, int]:
    stage = stage_of(plan, device)
    return stage.layers if stage is not None else (0, 0)


def nearest(device: str, holders: Sequence[str], cluster: Cluster) -> str:
    """The one of the holders from which a device gets something soonest: itself, if it is one; of several as near, the first."""
    return device if device in holders else min(holders, key=lambda holder: _seconds(holder, device, FEW_BYTES, cluster))


def move_bytes(found: Iterable[Move], profile: Profile) -> int:
    """Bytes of parameters, buffers and optimizer state that leave a device for another."""
    return sum(_bytes(move, profile) for move in found if move.source != move.device)


def move_seconds(found: Iterable[Move], profile: Profile, cluster: Cluster) -> float:
    """Seconds until all have what they get: those of the device that sends and receives most, one layer after the other."""
    busy = defaultdict[str, float](float)
    for move in found:
        if move.source != move.device:
            seconds = _seconds(move.source, move.device, _bytes(move, profile), cluster)
            busy[move.source] += seconds
            busy[move.device] += seconds
    return max(busy.values(), default=0.0)


def _bytes(move: Move, profile: Profile) -> int:
    layer, kept = profile.layers[move.layer], profile.optimizer.state_bytes_per_parameter_byte
    return round(layer.parameter_bytes + layer.buffer_bytes + kept * layer.trained)


def _seconds(source: str, device: str, size_bytes: int, cluster: Cluster) -> float:
    """By the link of the two; where none is known inside a node, nothing."""
    ends = [cluster.device(each).node for each in (source, device)]
    try:
        return cluster.link_between(*ends).seconds(size_bytes)
    except InputError:
        if ends[0] != ends[1]:
            raise
        return 0.0
