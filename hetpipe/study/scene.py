"""The numbers of a plan's picture, once: every picture, table, page and description is made of these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.documents.profile import Profile
from hetpipe.predict.cost import Costs
from hetpipe.predict.idle import CAUSES, Cause, idle_seconds
from hetpipe.predict.timeline import Timeline

Part = Literal["embedding", "head", ""]
_EMBEDDING = re.compile(r"emb|wte|wpe|patch|token", re.IGNORECASE)
_HEAD = re.compile(r"head|logits|classif|score|(^|[._])(fc|out|output)$", re.IGNORECASE)
_SAME = "{:.9g}"  # replicas that agree to so many digits are alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One layer of a stage: `seconds` of forward, backward and recompute in a step; None where no times are known."""

    layer: int
    name: str
    part: Part
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """What goes over the link behind a stage in a step: activations, and back their gradients, where these are needed; and how
    long that takes if nothing shares the way."""

    bytes: int
    seconds: float
    between: tuple[str, str]  # nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageScene:
    """One stage. `work` is its part of all that is computed in a step, in the time that the fastest type would take for it (in
    layers × samples where no times are known). Seconds are of a step: computing `forward`, `backward` (without what is run
    again), `recompute`, `optimizer`; `idle` by its cause. None, or empty, where not known; `limit` is the device's memory in
    bytes. `twins` are this stage's devices in all replicas that are shown together, in the order of the cluster."""

    number: int
    devices: tuple[str, ...]
    kind: str
    node: str
    layers: tuple[int, int]
    tiles: tuple[Tile, ...]
    depth: int
    recomputed: bool
    work: float
    offloaded: bool = False
    forward: float | None = None
    backward: float = 0.0
    recompute: float = 0.0
    optimizer: float = 0.0
    idle: Mapping[Cause, float] = field(default_factory=dict)
    memory: int | None = None
    limit: int | None = None
    limits_step: bool = False
    edge: Edge | None = None
    twins: tuple[tuple[str, ...], ...] = ()

    @property
    def busy(self) -> float:
        """Seconds of a step in which it computes."""
        return (self.forward or 0.0) + self.backward + self.recompute + self.optimizer

    @property
    def idle_total(self) -> float:
        """Seconds of a step in which it does not."""
        return sum(self.idle.values())

    @property
    def fullness(self) -> float | None:
        """Memory over its limit."""
        return self.memory / self.limit if self.memory is not None and self.limit else None

    @property
    def named(self) -> str:
        """The stage's devices in words: all of a tensor-parallel group."""
        return " + ".join(self.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneScene:
    """A replica, or several that are alike: their numbers, the stages of the first, the samples of each, and the sizes of
    its micro-batches."""

    replicas: tuple[int, ...]
    sizes: tuple[int, ...]
    stages: tuple[StageScene, ...]

    @property
    def samples(self) -> int:
        """Samples of one replica in a step."""
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """How many replicas."""
        return len(self.replicas)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A plan as it is shown. `seconds` of a step, its parts, and the bound are None where nothing is known; `equal` is the
    equal split of the same work on the same devices, `unused` are devices of the cluster that the plan leaves idle, `speeds`
    the seconds that one sample takes on each type in use, forward and backward through all layers, at its best measured
    micro-batch size."""

    plan: Plan
    lanes: tuple[LaneScene, ...]
    memories: Mapping[str, int]
    unused: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    pipeline_seconds: float = 0.0
    sync_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    equal: Scene | None = None

    @property
    def stages(self) -> list[tuple[LaneScene, StageScene]]:
        """All stages with their lanes."""
        return [(lane, stage) for lane in self.lanes for stage in lane.stages]

    @property
    def device_count(self) -> int:
        """Devices that the plan uses."""
        return len(self.plan.device_ids)

    @property
    def bound(self) -> float | None:
        """A step below which no plan (of the class that the proof names) is."""
        return self.plan.predicted.lower_bound_seconds if self.plan.predicted is not None else None

    @property
    def speedup(self) -> float | None:
        """How many times as long the equal split takes."""
        if self.equal is None or not self.seconds or self.equal.seconds is None:
            return None
        return self.equal.seconds / self.seconds

    def idle_shares(self) -> dict[Cause, float]:
        """Each cause's part of all device time (of the devices in use)."""
        total = (self.seconds or 0.0) * self.device_count
        if total <= 0:
            return {}
        sums = dict.fromkeys(CAUSES, 0.0)
        for lane, stage in self.stages:
            for cause, seconds in stage.idle.items():
                sums[cause] += seconds * lane.count * len(stage.devices)
        return {cause: seconds / total for cause, seconds in sums.items()}

    @property
    def limiting(self) -> list[tuple[LaneScene, StageScene]]:
        """The stages that compute longest."""
        return [(lane, stage) for lane, stage in self.stages if stage.limits_step]

    def types(self) -> list[str]:
        """The types of device in use, in the order of the cluster."""
        used = {stage.kind for _, stage in self.stages}
        return [kind for kind in self.memories if kind in used]


def make_scene(
    plan: Plan,
    *,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    timeline: Timeline | None = None,
    equal: Scene | None = None,
) -> Scene:
    """The scene of a plan: the more is given the more it says. `timeline` is the plan's simulated step, from which all times
    come; with it, profile and cluster (with the profile's links) are needed. InputError if they do not belong together."""
    plan.check(profile=profile, cluster=cluster)
    costs = Costs(profile, cluster) if profile is not None and cluster is not None and timeline is not None else None
    found = _Numbers(plan, profile, cluster, costs, timeline)
    lanes = [
        LaneScene(replicas=(r,), sizes=replica.microbatch_sizes, stages=tuple(found.stages(r, replica)))
        for r, replica in enumerate(plan.replicas)
    ]
    unused: dict[str, int] = {}
    for device in cluster.devices if cluster is not None else ():
        if device.id not in plan.device_ids:
            unused[device.type] = unused.get(device.type, 0) + 1
    step = timeline
    return Scene(
        plan=plan,
        lanes=tuple(_alike(lanes, cluster)),
        unused=unused,
        equal=equal,
        speeds={kind: sum(layers) for kind, layers in _speeds(plan, profile, cluster).items()},
        memories={kind: own.memory for kind, own in cluster.device_types.items()} if cluster is not None else {},
        seconds=step.step_seconds if step else None,
        pipeline_seconds=step.pipeline_seconds if step else 0.0,
        sync_seconds=step.sync_seconds if step else 0.0,
        optimizer_seconds=step.optimizer_seconds if step else 0.0,
    )


def _speeds(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> dict[str, tuple[float, ...]]:
    """Seconds of one sample, forward and backward, of each layer, on each type of device in use."""
    found: dict[str, tuple[float, ...]] = {}
    if profile is None or cluster is None:
        return found
    for kind, degree in {(cluster.device(s.device).type, len(s.devices)) for r in plan.replicas for s in r.stages}:
        own = profile.measurement(kind, degree)
        for size, forward, backward in zip(own.microbatch_sizes, own.forward_seconds, own.backward_seconds, strict=True):
            layers = tuple((f + b) / size for f, b in zip(forward, backward, strict=True))
            if kind not in found or sum(layers) < sum(found[kind]):
                found[kind] = layers
    return found


def _parts(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> tuple[float, ...]:
    """Each layer's part of a sample's work, on the fastest type; all alike where no times are known."""
    speeds = _speeds(plan, profile, cluster)
    layers = min(speeds.values(), key=sum, default=())
    whole = sum(layers)
    return tuple(x / whole for x in layers) if whole > 0 else (1 / plan.layer_count,) * plan.layer_count


class _Numbers:
    """What is known of a plan, looked up by replica and stage."""

    def __init__(
        self, plan: Plan, profile: Profile | None, cluster: Cluster | None, costs: Costs | None, timeline: Timeline | None
    ) -> None:
        self.plan, self.profile, self.cluster, self.costs = plan, profile, cluster, costs
        self.seconds: dict[tuple[str, str], float] = {}
        for span in timeline.spans if timeline is not None and costs is not None else ():
            key = (span.device, span.kind)
            self.seconds[key] = self.seconds.get(key, 0.0) + span.end - span.start
        self.idle = idle_seconds(timeline) if timeline is not None and costs is not None else {}
        self.peaks = dict(timeline.peak_bytes) if timeline is not None else {}
        if not self.peaks and plan.predicted is not None:
            self.peaks = dict(plan.predicted.peak_bytes)
        self.parts = _parts(plan, profile, cluster)
        busy = [self._busy(device) for device in plan.device_ids]
        self.most = max(busy, default=0.0)

    def _busy(self, device: str) -> float:
        return sum(self.seconds.get((device, kind), 0.0) for kind in ("F", "B", "optimizer"))

    def stages(self, r: int, replica: ReplicaPlan) -> Iterable[StageScene]:
        """The stages of one replica."""
        depths = replica.depths(self.plan.schedule)
        for s, stage in enumerate(replica.stages):
            device, cluster = stage.device, self.cluster
            again = self._again(replica, stage)
            timed = self.costs is not None
            yield StageScene(
                number=s,
                devices=stage.devices,
                layers=stage.layers,
                depth=depths[s],
                recomputed=stage.recompute,
                offloaded=stage.offload,
                kind=cluster.device(device).type if cluster else "",
                node=cluster.device(device).node if cluster else "",
                tiles=tuple(self._tiles(replica, stage)),
                work=replica.samples / self.plan.global_batch * sum(self.parts[stage.layers[0] : stage.layers[1]]),
                forward=self.seconds.get((device, "F"), 0.0) if timed else None,
                backward=max(0.0, self.seconds.get((device, "B"), 0.0) - again),
                recompute=again,
                optimizer=self.seconds.get((device, "optimizer"), 0.0),
                idle=self.idle.get(device, {}),
                memory=max((self.peaks[d] for d in stage.devices if d in self.peaks), default=None),
                limit=cluster.type_of(device).memory if cluster else None,
                limits_step=timed and self.most > 0 and self._busy(device) >= self.most * (1 - 1e-9),
                edge=self._edge(replica, s),
            )

    def _again(self, replica: ReplicaPlan, stage: StagePlan) -> float:
        """Seconds of a step in which forwards are run again."""
        if self.costs is None or not stage.recompute:
            return 0.0
        kind, degree = self.costs.cluster.device(stage.device).type, len(stage.devices)
        total = 0.0
        for size in replica.microbatch_sizes:
            plain = self.costs.stage_seconds(kind, *stage.layers, size, degree=degree)[1]
            total += self.costs.stage_seconds(kind, *stage.layers, size, recompute=True, degree=degree)[1] - plain
        return total

    def _tiles(self, replica: ReplicaPlan, stage: StagePlan) -> Iterable[Tile]:
        lo, hi = stage.layers
        seconds: list[float] | None = None
        if self.costs is not None:
            seconds = [0.0] * (hi - lo)
            kind, degree = self.costs.cluster.device(stage.device).type, len(stage.devices)
            for size in replica.microbatch_sizes:
                forward, backward = self.costs.time_prefix(kind, size, degree)
                before = forward + backward + (self.costs.again(forward) if stage.recompute else 0.0)
                own = before[lo + 1 : hi + 1] - before[lo:hi]
                seconds = [a + float(b) for a, b in zip(seconds, own, strict=True)]
            whole, inside = sum(self.seconds.get((stage.device, k), 0.0) for k in ("F", "B")), sum(seconds)
            seconds = [x * whole / inside if inside > 0 else whole / (hi - lo) for x in seconds]
        for i in range(lo, hi):
            name = self.profile.layers[i].name if self.profile is not None else str(i)
            yield Tile(layer=i, name=name, part=self._part(i, name), seconds=seconds[i - lo] if seconds else None)

    def _part(self, i: int, name: str) -> Part:
        if self.profile is None:
            return ""
        if i == 0 and _EMBEDDING.search(name):
            return "embedding"
        return "head" if i == len(self.profile.layers) - 1 and _HEAD.search(name) else ""

    def _edge(self, replica: ReplicaPlan, s: int) -> Edge | None:
        if self.costs is None or s + 1 == len(replica.stages):
            return None
        here, there = replica.stages[s], replica.stages[s + 1]
        degrees, seconds = (len(here.devices), len(there.devices)), 0.0
        ways = 1 + self.costs.has_backward(here.layers[1])
        for size in replica.microbatch_sizes:
            seconds += ways * sum(self.costs.transfer(here.device, there.device, here.layers[1], size, degrees))
        cluster = self.costs.cluster
        return Edge(
            bytes=round(ways * float(self.costs.profile.output_bytes[here.layers[1] - 1]) * replica.samples),
            seconds=seconds,
            between=(cluster.device(here.device).node, cluster.device(there.device).node),
        )


def _alike(lanes: Sequence[LaneScene], cluster: Cluster | None) -> list[LaneScene]:
    """Lanes that show the same, together: in the order of their first ones."""
    places = {device.id: i for i, device in enumerate(cluster.devices if cluster is not None else ())}
    groups: dict[object, list[LaneScene]] = {}
    for lane in lanes:
        groups.setdefault(_looks(lane), []).append(lane)
    return [
        LaneScene(
            replicas=tuple(r for lane in group for r in lane.replicas),
            sizes=group[0].sizes,
            stages=tuple(
                replace(stages[0], twins=tuple(sorted((twin.devices for twin in stages), key=lambda own: places.get(own[0], 0))))
                for stages in zip(*(lane.stages for lane in group), strict=True)
            ),
        )
        for group in groups.values()
    ]


def _looks(lane: LaneScene) -> object:
    def numbers(stage: StageScene) -> list[str]:
        values = [stage.forward or 0.0, stage.backward, stage.recompute, stage.optimizer, *stage.idle.values()]
        return [_SAME.format(x) for x in [*values, stage.edge.seconds if stage.edge else 0.0]]

    turns = tuple(a.node == b.node for a, b in pairwise(lane.stages))
    return (
        lane.sizes,
        turns,
        tuple(
            (s.layers, s.kind, len(s.devices), s.recomputed, s.offloaded, s.depth, s.memory, s.limits_step, *numbers(s))
            for s in lane.stages
        ),
    )
