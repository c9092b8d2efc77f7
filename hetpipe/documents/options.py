"""How to plan, the same in a job, on the command line, in `make_plan` and `make_front`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import is_assumed, says_memory
from hetpipe.documents.plan import Backend
from hetpipe.documents.precisions import PrecisionChoice, known_precision
from hetpipe.files.formats import Flag, Name, Number, Strict, explained
from hetpipe.files.messages import Faults, InputError, shown

ScheduleChoice = Literal["auto", "gpipe", "1f1b"]
EffortChoice = Literal["quick", "normal", "long"]
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
        """Return these options with others for some of them, which stand under their names in `changes`. InputError if one is
        unknown or wrong."""
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
    by its name, or "auto", for each the fastest one that is safe, or where no plan fits at these, one that takes fewer bytes (see
    `hetpipe.documents.precisions`)."""

    precision: PrecisionChoice | None = None

    _known_precision = model_validator(mode="before")(known_precision)
