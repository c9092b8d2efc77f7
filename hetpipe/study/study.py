"""What is known of a plan: whoever shows it is given this, and neither plans nor simulates."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.planning.front import Front
from hetpipe.predict.timeline import Timeline
from hetpipe.study.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What it is called, and its plan; or, where it has none, why."""

    name: str
    plan: Plan | None = None
    reason: str = ""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the plan; infinite where there is no plan."""
        return self.plan.predicted.step_seconds if self.plan is not None and self.plan.predicted is not None else float("inf")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What changed clusters would do, first the cluster as it is; and `how` each was planned."""

    how: str
    plans: tuple[Alternative, ...]


@dataclass(frozen=True, kw_only=True)
class MovedCut:
    """A plan with one cut moved: the cut behind stage `stage` of these replicas, by `layers` to the right; what a step of it
    takes, the greatest bytes of the two stages beside it, and whether all devices have room."""

    replicas: tuple[int, ...]
    stage: int
    layers: int
    step_seconds: float
    peak_bytes: tuple[int, int]
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan, and what was found out about it. `cluster` has the profile's links. With profile and cluster there is `predicted`,
    the simulated step with its memory over time. A `measured` step and a `front` are there if they were given; `rules` (plans of
    other partitioners), `changes` and `cuts` if they were asked for. `scene` has the numbers that pictures show."""

    plan: Plan
    scene: Scene
    profile: Profile | None = None
    cluster: Cluster | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    front: Front | None = None
    rules: tuple[Alternative, ...] = ()
    changes: Changes | None = None
    cuts: tuple[MovedCut, ...] = ()

    @property
    def problem(self) -> tuple[Profile, Cluster] | None:
        """Profile and cluster where both are known."""
        return (self.profile, self.cluster) if self.profile is not None and self.cluster is not None else None

    def too_full(self) -> dict[str, dict[str, int]]:
        """Each device that needs more memory than it has, and both."""
        if self.predicted is None or self.cluster is None:
            return {}
        limits = {device: self.cluster.type_of(device).memory for device in self.predicted.peak_bytes}
        return {
            device: {"needs_bytes": peak, "has_bytes": limits[device]}
            for device, peak in self.predicted.peak_bytes.items()
            if peak > limits[device]
        }

    def unused(self) -> list[str]:
        """The devices of the cluster that the plan leaves idle."""
        used = set(self.plan.device_ids)
        return [device.id for device in self.cluster.devices if device.id not in used] if self.cluster is not None else []
