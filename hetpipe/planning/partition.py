"""The contract of every planner: a Problem in, a Plan out, or a PartitionError that says what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.clusters.assumed import with_assumed
from hetpipe.documents.options import EffortChoice, PlanOptions, ScheduleChoice
from hetpipe.documents.plan import Backend, Plan, Proof
from hetpipe.documents.profile import Profile
from hetpipe.files.limits import MOST_BATCH
from hetpipe.files.messages import InputError, shown


class PartitionError(Exception):
    """No plan fits, or (`out_of_time`) none was found. Commands print it and exit with 3. The message says which device type,
    which layer, how many bytes; `missing_bytes` is the last as a number, and `needed_bytes` what the stage that does not
    fit needs, where they are known. Where hosts have too little memory, `missing_bytes` is of these."""

    exit_code = 3

    def __init__(
        self, message: str, *, missing_bytes: int | None = None, needed_bytes: int | None = None, out_of_time: bool = False
    ) -> None:
        super().__init__(message)
        self.missing_bytes, self.needed_bytes, self.out_of_time = missing_bytes, needed_bytes, out_of_time


def never() -> bool:
    """Nobody wants a search to end."""
    return False


def offload_allowed(options: PlanOptions, profile: Profile, cluster: Cluster) -> bool:
    """Whether stages may offload: unless the options say so, where a device can. InputError if they ask for it, and none can."""
    copying = {x.device_type for x in profile.overheads if x.host_bytes_per_second is not None}
    hosts = [node for node in cluster.nodes if node.host_memory is not None]
    able = any(kind in copying for node in hosts for kind in node.devices)
    if not options.allow_offload:
        return options.allow_offload is None and able and options.backend == "torch"
    if options.backend != "torch":
        raise InputError(
            f"allow_offload is set, but only the back end 'torch' can offload, not {options.backend!r}. Leave one of the two out"
        )
    if not hosts:
        raise InputError(
            "allow_offload is set, but no node of the cluster says how much of its host's memory stages may "
            "offload to: give nodes a host_memory, such as 64 GiB"
        )
    if not able:
        raise InputError(
            f"allow_offload is set, but the profile of {profile.model!r} has no host_bytes_per_second of a "
            "device type whose node has a host_memory: measure again with 'hetpipe profile'"
        )
    return True


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be planned, with the options of `PlanOptions`, all decided. `cluster` already has the profile's measured
    links, and `memory_reserve` is a number (see `Problem.of`). When `stopped` says so, searches end with the plan in hand."""

    cluster: Cluster
    profile: Profile
    global_batch: int
    schedule: ScheduleChoice = "auto"
    backend: Backend = "torch"
    allow_recompute: bool = True
    allow_offload: bool = False
    memory_reserve: float = 0.0
    max_price_per_hour: float | None = None
    deadline_seconds_per_step: float | None = None
    time_limit_seconds: float | None = None
    effort: EffortChoice = "normal"
    progress: Callable[[str], None] | None = field(default=None, compare=False)
    stopped: Callable[[], bool] = field(default=never, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(f"the global batch must be at least 1, got {shown(self.global_batch)}")
        if self.global_batch > MOST_BATCH:
            raise InputError(f"the global batch must be at most {MOST_BATCH}, got {shown(self.global_batch)}")
        self.profile.check(self.cluster)
        object.__setattr__(self, "profile", self.profile.on(self.cluster))

    @property
    def sums_early(self) -> bool:
        """Whether gradients are summed while the last backward still runs (`hetpipe.predict.sums`)."""
        return self.backend == "torch" and self.cluster.runtime_overhead.bucket_bytes > 0

    @property
    def latest_step(self) -> float:
        """Seconds that a step may take under the deadline, and a rounding of sums that were made in another order; infinite
        without one."""
        return math.inf if self.deadline_seconds_per_step is None else self.deadline_seconds_per_step * (1 + 1e-12)

    @property
    def without_reserve(self) -> str:
        """What a message adds to the memory that plans may use."""
        return f" without the memory reserve of {self.memory_reserve:.0%}" if self.memory_reserve > 0 else ""

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        global_batch: int,
        options: PlanOptions,
        progress: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = never,
    ) -> Problem:
        """The problem of these options, with a profile that has one precision of each device type; on the cluster what the
        framework takes, assumed where neither the file nor a `memory_reserve` says it."""
        offloads = offload_allowed(options, profile, cluster)
        decided = {**dict(options), "memory_reserve": options.reserve(cluster), "allow_offload": offloads}
        own = {name: decided[name] for name in PlanOptions.model_fields if name not in ("partitioner", "precision")}
        if options.memory_reserve is None:
            cluster = with_assumed(cluster, profile)
        told = {"progress": progress, "stopped": stopped}
        return cls.create(cluster=cluster, profile=profile, global_batch=global_batch, **told, **own)

    @classmethod
    def create(cls, *, cluster: Cluster, profile: Profile, global_batch: int, **options: object) -> Problem:
        """A Problem whose links are the profile's measured ones, where it has them."""
        linked = profile.joined(cluster)
        return cls(cluster=linked, profile=profile, global_batch=global_batch, **options)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan and the best lower bound that the search itself proved on the step time of any plan of its class; under a
    deadline, on price per hour × seconds of a step."""

    plan: Plan
    lower_bound_seconds: float | None = None
    lower_bound_price: float | None = None
    proof: Proof | None = None


def no_plan_in_time(problem: Problem) -> PartitionError:
    """The error of a search that its time limit, who waited, or without a limit its effort ended before it had any plan."""
    if problem.stopped():
        end = "before the search was stopped"
    elif problem.time_limit_seconds is not None:
        end = f"within the time limit of {problem.time_limit_seconds:g} s"
    else:
        end = "by as much search as there is without a time limit"
    return PartitionError(
        f"no plan was found {end}, and none was ruled out; allow more time (--time-limit, time_limit_seconds)", out_of_time=True
    )


class Partitioner(Protocol):
    """One planning algorithm. `name` is how plans and commands call it."""

    @property
    def name(self) -> str: ...

    def __call__(self, problem: Problem) -> Solution:
        """Solve the problem, or raise PartitionError."""
        ...
