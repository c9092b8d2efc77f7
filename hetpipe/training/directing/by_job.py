"""The director of a job: the plan that was made at the begin, and after an event one for what devices have turned out to be."""

from __future__ import annotations

from hetpipe.documents.profile import Profile
from hetpipe.processes.world import World
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import Drift
from hetpipe.training.directing.rebalance import Rebalance
from hetpipe.training.observers.records import DriftRecord, StepRecord
from hetpipe.training.session import Session


class ByJob:
    """Plans as the job of this session says."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._rebalance: Rebalance | None = None

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        """See `Director`. PartitionError on every rank where no plan fits any more."""
        if event.why == "end":
            return None
        if event.why == "begin" or self._rebalance is None:
            self._rebalance = Rebalance(self.session, profile)
            return Leg(event.plan)
        if event.why == "drift":
            return self._rebalance.go_on(world)
        return self._rebalance.plan_again(event.plan, profile, world)

    def watch(self, record: StepRecord) -> Event | None:
        """See `Director`."""
        if self._rebalance is None:
            return None
        self._rebalance.stepped()
        following = self._rebalance.following
        return Event("drift", record.step, following.leg.plan) if following is not None else None

    def drifted(self, drift: Drift, world: World) -> DriftRecord | None:
        """See `Director`."""
        return self._rebalance.drifted(drift, world) if self._rebalance is not None else None
