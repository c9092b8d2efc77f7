"""The contract of every planner: a Problem in, a Plan out, or a PartitionError that says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hetpipe.cluster import Cluster, RuntimeOverhead
from hetpipe.formats import InputError, shown
from hetpipe.limits import MOST_BATCH
from hetpipe.plan import Backend, Plan, Proof
from hetpipe.profiles import Profile

ScheduleChoice = Literal["auto", "gpipe", "1f1b"]
DEFAULT_RESERVE = 0.08  # of a GPU's memory, for the CUDA context, the libraries, communicators and fragmentation


def default_reserve(cluster: Cluster) -> float:
    """The part of each device's memory that plans leave free unless told otherwise: nothing where the cluster file says what
    the framework takes (`runtime_overhead`), or where all devices are emulated, whose memory counts tensors only."""
    emulated = all(kind.emulate is not None for kind in cluster.device_types.values())
    return 0.0 if emulated or cluster.runtime_overhead != RuntimeOverhead() else DEFAULT_RESERVE


class PartitionError(Exception):
    """No plan fits, or (`out_of_time`) none was found. Commands print it and exit with 3. The message says which device type,
    which layer, how many bytes; `missing_bytes` is the last as a number, and `needed_bytes` what the stage that does not
    fit needs, where they are known."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        missing_bytes: int | None = None,
        needed_bytes: int | None = None,
        out_of_time: bool = False,
    ) -> None:
        super().__init__(message)
        self.missing_bytes, self.needed_bytes, self.out_of_time = missing_bytes, needed_bytes, out_of_time


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be planned. `cluster` already has the profile's measured links (see `Problem.create`).

    `schedule` "auto" lets the planner choose gpipe (depth m) or 1f1b with depths n − s, 2(n − s) − 1 or 3(n − s) − 2; "1f1b"
    leaves the latter; "gpipe" only the first. `backend` torch has all of them, fairscale and torchgpipe run gpipe only, keep a
    replica on one node, and sum gradients after backward (`simulator.sync_times`).
    `memory_reserve` is the fraction of each device's memory that plans leave free (see `default_reserve`).
    `time_limit_seconds` ends a search with the best plan so far and what is proven of it (None: the partitioner's own limit).
    """

    cluster: Cluster
    profile: Profile
    global_batch: int
    schedule: ScheduleChoice = "auto"
    backend: Backend = "torch"
    allow_recompute: bool = True
    memory_reserve: float = 0.0
    max_price_per_hour: float | None = None
    deadline_seconds_per_step: float | None = None
    time_limit_seconds: float | None = None
    progress: Callable[[str], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, got {self.global_batch}")
        if self.global_batch > MOST_BATCH:
            raise InputError(f"global_batch must be at most {MOST_BATCH}, got {shown(self.global_batch)}")
        for kind in self.cluster.device_types:
            if any(kind in node.devices for node in self.cluster.nodes):
                degrees = [m.tensor_parallel for m in self.profile.measurements if m.device_type == kind]
                self.profile.measurement(kind, min(degrees, default=1))  # at some degree, or say what is measured

    @property
    def without_reserve(self) -> str:
        """What a message adds to the memory that plans may use."""
        return f" without the memory reserve of {self.memory_reserve:.0%}" if self.memory_reserve > 0 else ""

    @classmethod
    def create(cls, *, cluster: Cluster, profile: Profile, global_batch: int, **options: object) -> Problem:
        """A Problem whose links are the profile's measured ones, where it has them."""
        linked = cluster.with_links(profile.links)
        return cls(cluster=linked, profile=profile, global_batch=global_batch, **options)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan and the best lower bound that the search itself proved on the step time of any plan of its class; under a
    deadline, on price per hour × seconds of a step."""

    plan: Plan
    lower_bound_seconds: float | None = None
    lower_bound_price: float | None = None
    proof: Proof | None = None


def no_plan_in_time(seconds: float) -> PartitionError:
    """The error of a search that its time limit ended before it had any plan."""
    return PartitionError(
        f"no plan was found within the time limit of {seconds:g} s, and none was ruled out; allow more time "
        "(--time-limit, time_limit_seconds)",
        out_of_time=True,
    )


class Partitioner(Protocol):
    """One planning algorithm. `name` is how plans and commands call it."""

    name: str

    def __call__(self, problem: Problem) -> Solution:
        """Solve the problem, or raise PartitionError."""
        ...
