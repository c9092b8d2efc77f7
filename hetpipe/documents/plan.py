"""The plan file: replicas, their stages, and the sizes of their micro-batches. A plan validates itself, and, with
`check`, against the cluster and the profile it is meant for."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.number_types import Precision
from hetpipe.documents.profile import Profile
from hetpipe.documents.schedule import ScheduleName, check_depths, default_depths
from hetpipe.documents.seats import Owners, Seat, owners_of, owners_of_tied, peers_of, seats_of
from hetpipe.files.formats import Bytes, Document, Flag, LayerNumber, Name, Number, Samples, Strict
from hetpipe.files.messages import Faults, InputError, listed, nearest, shown, told

Proof = Literal["exhaustive", "search-bound", "fluid"]
Backend = Literal["torch", "fairscale", "torchgpipe"]


class StagePlan(Strict):
    """Layers [lo, hi) on one device (more than one: a tensor-parallel group). `warmup`: forwards before the first backward.
    `offload`: what autograd saves lies in the host's memory until backward."""

    layers: tuple[LayerNumber, LayerNumber]
    devices: Annotated[tuple[Name, ...], Field(min_length=1)]
    recompute: Flag = False
    offload: Flag = False
    warmup: Samples | None = None

    @model_validator(mode="after")
    def _one_way_to_save_memory(self) -> Self:
        if self.recompute and self.offload:
            raise ValueError(
                f"the stage of layers {list(self.layers)} has recompute: true and offload: true. A stage that recomputes saves "
                "nothing, so it has nothing to offload. Write one of the two"
            )
        return self

    @property
    def device(self) -> str:
        """The first (or only) device."""
        return self.devices[0]


class ReplicaPlan(Strict):
    """One pipeline and the sizes of its micro-batches."""

    microbatch_sizes: Annotated[tuple[Samples, ...], Field(min_length=1)]
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]

    @property
    def samples(self) -> int:
        """Samples of one step in this replica."""
        return sum(self.microbatch_sizes)

    @model_validator(mode="after")
    def _covers_once(self) -> Self:
        at = 0
        for s, stage in enumerate(self.stages):
            lo, hi = stage.layers
            if lo != at or hi <= lo:
                raise ValueError(
                    f"stage {s} has layers [{lo}, {hi}), expected a range that starts at {at} and is not empty: "
                    "the stages of a replica must cover all layers once, in order"
                )
            at = hi
        return self

    def depths(self, schedule: ScheduleName, m: int | None = None) -> tuple[int, ...]:
        """Warm-up depth of each stage for `m` micro-batches (default: the plan's own), within [1, m]."""
        m = len(self.microbatch_sizes) if m is None else m
        default = default_depths(schedule, len(self.stages), m)
        return tuple(
            d if stage.warmup is None else max(1, min(stage.warmup, m)) for d, stage in zip(default, self.stages, strict=True)
        )


class Prediction(Strict):
    """What the simulator says of the plan, and how far it is from the best possible: gap = step / lower bound − 1. Of a plan
    that is the cheapest under a deadline, no other within it costs less than `lower_bound_price_per_million_samples`, and gap
    and proof are of the price. `host_bytes`: of each node that stages offload to."""

    step_seconds: Number
    pipeline_seconds: Number
    gradient_sync_seconds: Number
    optimizer_seconds: Number
    samples_per_second: Annotated[Number, Field(allow_inf_nan=True, gt=0)]  # infinite where no layer takes time
    price_per_hour: Number
    price_per_million_samples: Number
    peak_bytes: dict[Name, Bytes]
    host_bytes: dict[Name, Bytes] | None = None
    lower_bound_seconds: Number | None = None
    lower_bound_price_per_million_samples: Number | None = None
    fluid_bound_seconds: Number | None = None
    gap: Number | None = None
    proof: Proof | None = None


class Plan(Document):
    """Who computes what: replicas side by side, each with its own depth, cuts and share of the global batch. `backend` is what
    it was made for, and priced as; any that can run it may. `precision`: of each device type, where the profile has several."""

    format: Literal["hetpipe.plan/1"] = "hetpipe.plan/1"
    model: Name
    global_batch: Samples
    schedule: ScheduleName = "1f1b"
    partitioner: Name = "by hand"
    backend: Backend = "torch"
    precision: dict[Name, Precision] | None = None
    replicas: Annotated[tuple[ReplicaPlan, ...], Field(min_length=1)]
    predicted: Prediction | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = []
        total = sum(replica.samples for replica in self.replicas)
        if total != self.global_batch:
            faults.append(f"the micro-batches of all replicas sum to {total} samples, but global_batch is {self.global_batch}")
        used = Counter(d for replica in self.replicas for stage in replica.stages for d in stage.devices)
        faults += told(
            [device for device in used if re.fullmatch(r"[^/\s]+/[0-9]{1,6}", device) is None],
            lambda d: f"{shown(d)} is no device: write node/index, such as n0/1",
        )
        several = [device for device, count in used.items() if count > 1]
        faults += told(several, lambda d: f"device {d!r} is used {used[d]} times; a device holds one stage")
        ends = {replica.stages[-1].layers[1] for replica in self.replicas}
        if len(ends) > 1:
            faults.append(f"the replicas cover different numbers of layers: {shown(sorted(ends))}")
        for r, replica in enumerate(self.replicas):
            try:
                check_depths(replica.depths(self.schedule))
            except ValueError as error:
                faults.append(f"replica {r}: {error}")
        if faults:
            raise Faults(faults)
        return self

    @property
    def layer_count(self) -> int:
        """L: the number of layers that every replica covers."""
        return self.replicas[0].stages[-1].layers[1]

    @property
    def device_ids(self) -> tuple[str, ...]:
        """All devices in use, replica by replica, stage by stage."""
        return tuple(d for replica in self.replicas for stage in replica.stages for d in stage.devices)

    @property
    def process_of(self) -> dict[str, str]:
        """Device → the first device of the process that drives it: itself, or, with fairscale and torchgpipe, that of its
        replica."""
        return {
            device: device if self.backend == "torch" else replica.stages[0].device
            for replica in self.replicas
            for stage in replica.stages
            for device in stage.devices
        }

    def seats(self) -> tuple[Seat, ...]:
        """Which device holds which shard of which stage, replica by replica, stage by stage."""
        return seats_of(self._stages)

    def peers(self, seat: Seat) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The devices with which a seat exchanges what enters its stage, and what leaves it: one for each of its pieces, as many
        as of each other seat of its stage."""
        stages, s = self.replicas[seat.replica].stages, seat.stage
        before = peers_of(stages[s], stages[s - 1], seat.device) if s > 0 else ()
        after = peers_of(stages[s], stages[s + 1], seat.device) if s < len(stages) - 1 else ()
        return before, after

    def owners(self) -> list[Owners]:
        """Who owns which layers' gradients, from the last layer down, as they are summed."""
        return owners_of(self._stages)

    def owners_of_tied(self, name: str, layers: Sequence[int]) -> Owners:
        """Who owns the gradient of a parameter that these layers share."""
        return owners_of_tied(self._stages, name, layers)

    @property
    def _stages(self) -> list[tuple[StagePlan, ...]]:
        return [replica.stages for replica in self.replicas]

    @property
    def fingerprint(self) -> str:
        """A hash of what is executed (not of the prediction): equal on all ranks, or they hold different plans."""
        content = self.model_dump(mode="json", exclude={"predicted", "partitioner", "backend"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def check(
        self,
        *,
        cluster: Cluster | None = None,
        profile: Profile | None = None,
        layers: int | None = None,
        global_batch: int | None = None,
        source: str = "the plan",
    ) -> None:
        """Compare the plan with what it is to run on; an InputError lists every mismatch with both numbers."""
        faults = self._cluster_faults(cluster) if cluster is not None else []
        if profile is not None:
            layers = len(profile.layers) if layers is None else layers
            faults += self._profile_faults(profile, cluster if not faults else None)
        if layers is not None and layers != self.layer_count:
            faults.append(f"its stages cover layers [0, {self.layer_count}), but the model has {layers} layers")
        if global_batch is not None and global_batch != self.global_batch:
            faults.append(
                f"its global batch is {self.global_batch}, but {global_batch} is asked for (train.global_batch or --global-batch)"
            )
        if faults:
            raise InputError(f"{source} does not fit. Make a new plan with 'hetpipe plan':\n{listed(faults)}")

    def _cluster_faults(self, cluster: Cluster) -> list[str]:
        kinds = {d.id: (d.node, d.type) for d in cluster.devices}
        strange = [device for device in self.device_ids if device not in kinds]
        faults = told(strange, lambda d: f"it was made for another cluster: {cluster.unknown(d)}")
        known = list(cluster.device_types)
        unknown = [kind for kind in self.precision or () if kind not in known]
        faults += told(unknown, lambda kind: f"its precision names the unknown device type {kind!r}{nearest(kind, known)}")
        for r, replica in enumerate(self.replicas):
            for s, stage in enumerate(replica.stages):
                if len({kinds[d] for d in stage.devices if d in kinds}) > 1:
                    group = f"the tensor-parallel group {list(stage.devices)}"
                    faults.append(f"replica {r} stage {s}: {group} mixes nodes or device types")
        return faults

    def _profile_faults(self, profile: Profile, cluster: Cluster | None) -> list[str]:
        faults = []
        if profile.model != self.model:
            faults.append(f"it is for model {self.model!r}, the profile for {profile.model!r}")
        if cluster is not None:
            try:
                profile = profile.at(self.precision)
            except InputError as error:
                return [*faults, str(error)]
            stages = [stage for replica in self.replicas for stage in replica.stages]
            for kind, degree in sorted({(cluster.device(s.device).type, len(s.devices)) for s in stages}):
                try:
                    profile.measurement(kind, degree)
                except InputError as error:
                    faults.append(str(error))
        return faults
