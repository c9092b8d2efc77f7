"""Who decides by which plan a run goes on. A run is a row of legs, each under one plan: `Director.next_leg` is asked at the
begin, and each time that a leg is over."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.processes.world import World
from hetpipe.runtime.checks.shortage import Shortage
from hetpipe.training.directing.drift import Drift
from hetpipe.training.directing.seen import Seen
from hetpipe.training.observers.records import DriftRecord, StepRecord

Why = Literal["begin", "end", "fault", "memory", "drift"]


class Event(NamedTuple):
    """Why a run needs a plan, the same on every rank: it begins, or its leg has come to its last step (`end`), has lost a device
    (`fault`), has found that a device has less `memory` than was planned with, or is no longer as fast as predicted (`drift`).
    `step`: how many steps are done. `plan`: at the begin the one that was planned, later that of the leg which is over. `told`:
    what has happened, for people. `shortages`: the devices that had too little memory."""

    why: Why
    step: int
    plan: Plan
    told: str = ""
    shortages: tuple[Shortage, ...] = ()


class Leg(NamedTuple):
    """A plan, and after which step the leg is over (None: with the run). `seen`: what the plan is predicted by (None: the
    session's cluster and profile)."""

    plan: Plan
    until: int | None = None
    seen: Seen | None = None


class Director(Protocol):
    """Decides on every rank. Each rank has one of its own."""

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        """The leg that follows on this event; None ends the run. All ranks of `world` ask, and get the same answer. A limit that
        was found of a device type's memory is planned with by `profile.limited`."""
        ...

    def watch(self, record: StepRecord) -> Event | None:
        """Called after each step, on the ranks that the plan uses. An event of any rank ends the leg after the next step on all;
        None lets it go on."""
        ...

    def drifted(self, drift: Drift, world: World) -> DriftRecord | None:
        """Called when the speeds of devices have changed, with what observers are to be told of it (None: nothing). Collective
        over `world`, the ranks that the plan uses, and the same on all of them."""
        ...
