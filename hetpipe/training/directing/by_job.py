"""The director of a job: the plan that was made at the begin, and after an event one for what devices have turned out to be."""

from __future__ import annotations

from hetpipe.documents.profile import Profile
from hetpipe.processes.world import World
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.observers.records import StepRecord
from hetpipe.training.session import Request, Session, new_plan


class ByJob:
    """Plans as the job of this session says."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        """See `Director`. PartitionError on every rank where no plan fits any more."""
        if event.why in ("begin", "end"):
            return Leg(event.plan) if event.why == "begin" else None
        return Leg(new_plan(self.session, profile, Request.by(self.session.job)))

    def watch(self, record: StepRecord) -> Event | None:
        """See `Director`."""
        return None
