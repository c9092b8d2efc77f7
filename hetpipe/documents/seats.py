"""Seats: which device holds which shard of which stage, and who owns which gradients. What runs a plan and what predicts it both
ask here.

A stage of degree t has a seat for each of its t devices, which hold t equal shards of its layers. What several stages hold is cut
into T equal pieces, T the least common multiple of their degrees: of each stage, piece j lies in shard ⌊j·t / T⌋.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol


class SeatedStage(Protocol):
    """What is asked of a stage: its layers [lo, hi) and its devices."""

    @property
    def layers(self) -> tuple[int, int]: ...

    @property
    def devices(self) -> tuple[str, ...]: ...


class Seat(NamedTuple):
    """The device that holds one of the `degree` equal shards of a stage."""

    replica: int
    stage: int
    shard: int
    degree: int
    device: str

    @property
    def place(self) -> str:
        """`replica 0 stage 1`, for messages."""
        return f"replica {self.replica} stage {self.stage}"


class Owners(NamedTuple):
    """Who owns the gradients of layers [lo, hi), which one stage of each replica holds: `holders` are these stages, as (replica,
    stage), and each of `pieces` has a device of each holder. Of a tied parameter, which `tied` names, [lo, hi) is the hull of its
    layers, and all stages that hold any of them are holders."""

    lo: int
    hi: int
    holders: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[str, ...], ...]
    tied: str | None = None

    @property
    def everyone(self) -> tuple[str, ...]:
        """The owners of what is not split: every shard of every holder has it."""
        return tuple(dict.fromkeys(device for piece in self.pieces for device in piece))

    def in_shard(self, shard: int, degree: int) -> range:
        """The numbers of the pieces that lie in this shard of a holder of so many."""
        count = len(self.pieces)
        return range(shard * count // degree, (shard + 1) * count // degree)


def seats_of(replicas: Sequence[Sequence[SeatedStage]]) -> tuple[Seat, ...]:
    """All seats, replica by replica, stage by stage."""
    return tuple(
        Seat(r, s, shard, len(stage.devices), device)
        for r, stages in enumerate(replicas)
        for s, stage in enumerate(stages)
        for shard, device in enumerate(stage.devices)
    )


def pieces_of(stages: Sequence[SeatedStage]) -> tuple[tuple[str, ...], ...]:
    """Who holds each piece of what these stages all hold: a device of each. [T][stages]"""
    devices = [stage.devices for stage in stages]
    count = math.lcm(*map(len, devices))
    return tuple(tuple(own[j * len(own) // count] for own in devices) for j in range(count))


def peers_of(own: SeatedStage, other: SeatedStage, device: str) -> tuple[str, ...]:
    """The other ends of what crosses a boundary, for a device of the stage `own`: one for each of its pieces, in order."""
    return tuple(there for here, there in pieces_of([own, other]) if here == device)


def owners_of(replicas: Sequence[Sequence[SeatedStage]]) -> list[Owners]:
    """Of runs of consecutive layers with the same owners, from the last layer down, as their gradients are summed: at most
    1 + Σ(n_r − 1)."""
    cuts = sorted({end for stages in replicas for stage in stages for end in stage.layers}, reverse=True)
    return [_owners(replicas, lo, hi, _at(replicas, lo)) for hi, lo in pairwise(cuts)]


def owners_of_tied(replicas: Sequence[Sequence[SeatedStage]], name: str, layers: Sequence[int]) -> Owners:
    """Of a tied parameter of this name, which these layers share."""
    holders = tuple(
        (r, s)
        for r, stages in enumerate(replicas)
        for s, stage in enumerate(stages)
        if any(stage.layers[0] <= layer < stage.layers[1] for layer in layers)
    )
    return _owners(replicas, min(layers), max(layers) + 1, holders, name)


def _at(replicas: Sequence[Sequence[SeatedStage]], layer: int) -> tuple[tuple[int, int], ...]:
    """The stage of each replica that holds this layer."""
    return tuple((r, next(s for s, stage in enumerate(stages) if layer < stage.layers[1])) for r, stages in enumerate(replicas))


def _owners(
    replicas: Sequence[Sequence[SeatedStage]], lo: int, hi: int, holders: tuple[tuple[int, int], ...], tied: str | None = None
) -> Owners:
    return Owners(lo, hi, holders, pieces_of([replicas[r][s] for r, s in holders]), tied)
