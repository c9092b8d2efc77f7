"""How to plan, the same in a job, on the command line, in `make_plan` and `make_front`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from hetpipe.files.formats import Flag, Name, Number, Strict, explained
from hetpipe.files.messages import Faults, InputError, nearest, shown
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.clusters.assumed import is_assumed, says_memory
from hetpipe.spec.number_types import Precision
from hetpipe.spec.plan import Backend
from hetpipe.spec.profile import Profile
from hetpipe.spec.profiles.measurement import Measurement

ScheduleChoice = Literal["auto", "gpipe", "1f1b"]
EffortChoice = Literal["quick", "normal", "long"]
PrecisionChoice = Precision | Literal["auto"] | dict[Name, Precision]  # for all device types, or for each
Limit = Annotated[Number, Field(gt=0)]
DEFAULT_RESERVE = 0.08  # of a GPU's memory, for the CUDA context, the libraries, communicators and fragmentation
LIMITS = ("max_price_per_hour", "deadline_seconds_per_step", "time_limit_seconds")


class PlanRules(Strict):
    """`partitioner`: the algorithm by its name. `schedule` "auto" lets it choose gpipe (depth m) or 1f1b with depths n − s,
    2(n − s) − 1 or 3(n − s) − 2; "1f1b" leaves the latter; "gpipe" only the first. `backend` torch has all of them, fairscale
    and torchgpipe run gpipe only, keep a replica on one node, and sum gradients after backward.
    `allow_offload`: whether stages may offload activations to host memory: None where nodes say their `host_memory` and the
    profile has the speed of copies; true refuses a problem in which no device has both.
    `memory_reserve`: the fraction of each device's memory that is left free (None: see `reserve`). `max_price_per_hour`: of the
    devices that a plan uses. `deadline_seconds_per_step` asks for the cheapest plan that meets it. `time_limit_seconds` ends
    the search with the best plan so far and what is proven of it (None: the partitioner's own limit). `effort`: how much "auto"
    tries, counted, so that the same problem has the same plan on any machine."""

    partitioner: Name = "auto"
    schedule: ScheduleChoice = "auto"
    backend: Backend = "torch"
    allow_recompute: Flag = True
    allow_offload: Flag | None = None
    memory_reserve: Annotated[Number, Field(ge=0, lt=1)] | None = None
    max_price_per_hour: Limit | None = None
    deadline_seconds_per_step: Limit | None = None
    time_limit_seconds: Limit | None = None
    effort: EffortChoice = "normal"

    @model_validator(mode="before")
    @classmethod
    def _in_range(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            given = {key: data[key] for key in ("memory_reserve", *LIMITS) if isinstance(data.get(key), int | float)}
            reserve, faults = given.pop("memory_reserve", 0), []
            if not 0 <= reserve < 1:
                faults.append(f"memory_reserve is a fraction of a device's memory, at least 0 and below 1, got {shown(reserve)}")
            for name, value in given.items():
                if not (value > 0 and math.isfinite(value)):
                    faults.append(f"{name} must be a positive number, got {shown(value)}")
            if faults:
                raise Faults(faults)
        return data

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """These options with others for some of them, which stand under their names in `changes`. InputError if one is unknown or
        wrong."""
        if not changes:
            return self
        try:
            return type(self).model_validate({**dict(self), **changes})
        except ValidationError as error:
            raise InputError("; ".join(fault.removeprefix("top level: ") for fault in explained(error))) from None

    def reserve(self, cluster: Cluster) -> float:
        """The fraction of each device's memory that plans leave free. Unless told otherwise: nothing where the cluster file says
        what the framework takes (`runtime_overhead`), where that is assumed (`clusters.assumed`), or where all devices are
        emulated, whose memory counts tensors only."""
        if self.memory_reserve is not None:
            return self.memory_reserve
        emulated = all(kind.emulate is not None for kind in cluster.device_types.values())
        told = is_assumed(cluster) or says_memory(cluster.runtime_overhead)
        return 0.0 if emulated or told else DEFAULT_RESERVE


class PlanOptions(PlanRules):
    """How to plan, and for which precision. `precision`, of a profile that holds several: one for all device types, one for each
    by its name, or "auto", for each the fastest one that is safe (see `safe`), or where no plan fits at these, one that takes
    fewer bytes (see `in_turn`)."""

    precision: PrecisionChoice | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_precision(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (faults := precision_faults(data.get("precision"))):
            raise Faults(faults)
        return data

    def precisions(self, profile: Profile | None, cluster: Cluster) -> dict[str, Precision]:
        """The precision of each device type of the cluster, of those that `precision` says something of; of "auto" by the
        profile."""
        kinds = list(dict.fromkeys(device.type for device in cluster.devices))
        if self.precision is None:
            return {}
        if self.precision != "auto":
            if isinstance(self.precision, str):
                return dict.fromkeys(kinds, self.precision)
            strange = [kind for kind in self.precision if kind not in cluster.device_types]
            if strange:
                known = nearest(strange[0], list(cluster.device_types))
                raise InputError(f"precision: unknown device type {strange[0]!r}{known}")
            return {kind: self.precision[kind] for kind in kinds if kind in self.precision}
        assert profile is not None, "what is fastest is known once it is measured"
        fastest = {kind: _fastest(profile, kind) for kind in kinds}
        return {kind: precision for kind, precision in fastest.items() if precision is not None}

    def trained(self, profile: Profile, cluster: Cluster) -> dict[str, Precision]:
        """What a job trains in: as `precisions`; of what was measured at several and is not mentioned there, fp32."""
        full = {kind: precision for kind, precision in profile.in_full().items() if kind in cluster.device_types}
        return {**full, **self.precisions(profile, cluster)}

    def in_turn(self, profile: Profile, cluster: Cluster) -> list[Self]:
        """These options; where "auto" chooses, with each choice of precisions, to plan with one after the other until a plan
        fits."""
        if self.precision != "auto":
            return [self]
        return [self.changed({"precision": each}) for each in in_turn(profile, self.precisions(profile, cluster))]


def precision_faults(given: Any) -> list[str]:
    """What is wrong with an option `precision`."""
    each = given.values() if isinstance(given, Mapping) else [given] if given not in (None, "auto") else []
    known = "fp32, fp16 or bf16, for all or for each device type by its name, or auto"
    return [f"precision is {known}, got {shown(x)}" for x in each if x not in get_args(Precision)]


def safe(precisions: Collection[Precision | None]) -> list[Precision | None]:
    """Those of which "auto" takes the fastest: not fp16 where there is bf16, which is as fast, has the range of float32, and
    needs no scale of the loss (Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training).

    >>> safe(["fp32", "fp16", "bf16"]), safe(["fp32", "fp16"])
    (['fp32', 'bf16'], ['fp32', 'fp16'])
    """
    return [precision for precision in precisions if precision != "fp16" or "bf16" not in precisions]


def in_turn(profile: Profile, fastest: Mapping[str, Precision]) -> list[dict[str, Precision]]:
    """With which precisions to plan, one choice after the other, until a plan fits: the fastest, then on one device type more
    each time its other safe one, where that can take fewer bytes; first on the type that loses least time by it. (The first
    choice with which a plan fits need not be that of the fastest plan that fits, and a type may change that was not short.)"""
    others = list[tuple[float, str, Precision]]()
    for kind, precision in fastest.items():
        measured = _measured(profile, kind)
        own = next(m for m in measured if m.precision == precision)
        others += [
            (_seconds(m) / _seconds(own), kind, m.precision)
            for m in measured
            if m.precision is not None and _fewer_bytes(profile, m, own)
        ]
    found = [dict(fastest)]
    for _, kind, precision in sorted(others):
        found.append({**found[-1], kind: precision})
    return found


def _measured(profile: Profile, device_type: str) -> list[Measurement]:
    """A type at each safe precision, of the least tensor-parallel degree that was measured; where it was at none that is said, at
    that."""
    said = [precision for precision in profile.precisions(device_type) if precision is not None]
    found = safe(said or [None])
    own = [m for m in profile.measurements if m.device_type == device_type and m.precision in found]
    least = min((m.tensor_parallel for m in own), default=1)
    return [m for m in own if m.tensor_parallel == least]


def _fastest(profile: Profile, device_type: str) -> Precision | None:
    """The safe precision that takes least time (see `_seconds`)."""
    best = min(_measured(profile, device_type), key=_seconds, default=None)
    return None if best is None else best.precision


def _seconds(m: Measurement) -> float:
    """Of the whole model for a sample, forward and backward, at the micro-batch size that is best for it."""
    return float(min((m.forward + m.backward).sum(axis=1) / m.microbatch_sizes))


def _fewer_bytes(profile: Profile, m: Measurement, other: Measurement) -> bool:
    """Whether a precision takes fewer bytes than another where many samples are in flight, since each leaves less for backward,
    or where it is one micro-batch of the least size, since there are no copies of weights."""
    samples = m.microbatch_sizes[0]

    def saved(one: Measurement) -> int:
        return sum(one.saved_bytes_per_sample or [layer.saved_bytes_per_sample for layer in profile.layers])

    def least(one: Measurement) -> int:
        return sum(one.cast_bytes or ()) + samples * saved(one)

    return saved(m) < saved(other) or least(m) < least(other)


def parse_precision(text: str | None) -> str | dict[str, str] | None:
    """`fp16` as it is, and `T4=fp16,A100=bf16` by device types.

    >>> parse_precision("T4=fp16,A100=bf16")
    {'T4': 'fp16', 'A100': 'bf16'}
    """
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    kinds = [kind.strip() for kind, _, _ in pairs]
    if len(set(kinds)) < len(kinds) or not all(kind and precision.strip() for kind, _, precision in pairs):
        raise InputError(f"--precision {shown(text)}: expected each device type once, as in 'T4=fp16,A100=bf16'")
    return {kind: precision.strip() for kind, (_, _, precision) in zip(kinds, pairs, strict=True)}
