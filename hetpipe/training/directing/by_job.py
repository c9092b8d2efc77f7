"""The director of a job: the plan that was made at the begin, and after an event one for what devices have turned out to be."""

from __future__ import annotations

from collections import Counter

from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.planning.partition import PartitionError
from hetpipe.processes.progress import say
from hetpipe.processes.stopping import RunError
from hetpipe.processes.world import World
from hetpipe.runtime.backends import seat
from hetpipe.show.report import plan_text
from hetpipe.study.scene import make_scene
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import Drift
from hetpipe.training.directing.rebalance import Rebalance
from hetpipe.training.observers.records import DriftRecord, StepRecord
from hetpipe.training.session import Session

MOST_REPLANS = 3  # in a run, since devices of one type had too little memory
LESS_MEMORY = (
    "Less memory is used with a smaller train.global_batch, with fewer bits (train.precision, adapter.base), or with activations "
    "in the memory of hosts (host_memory of a node in the cluster file)"
)


class ByJob:
    """Plans as the job of this session says."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._rebalance: Rebalance | None = None
        self._short = Counter[str]()  # how often devices of a type had too little memory
        self._in_step = set[tuple[str, int]]()  # of which types that was, and in which step

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        """See `Director`. PartitionError on every rank where no plan fits any more; RunError where a plan does, and the run
        nevertheless does not go on by it."""
        if event.why == "end":
            return None
        if event.why == "begin" or self._rebalance is None:
            self._rebalance = Rebalance(self.session, profile)
            return Leg(event.plan)
        if event.why == "drift":
            return self._rebalance.go_on(world)
        if event.why == "memory":
            return self._by_less_memory(self._rebalance, event, profile, world)
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

    def _by_less_memory(self, rebalance: Rebalance, event: Event, profile: Profile, world: World) -> Leg:
        job, step = self.session.job, event.step + 1
        try:
            found = rebalance.plan_again(event.plan, profile, world)
        except PartitionError as error:
            raise PartitionError(
                f"{event.told}. With that there is no plan: {error}. {LESS_MEMORY}",
                missing_bytes=error.missing_bytes,
                needed_bytes=error.needed_bytes,
            ) from None
        words = plan_text(make_scene(found.plan, cluster=self.session.cluster))
        if job.plan.file is not None:
            raise RunError(f"{event.told}. {job.plan.file} is not changed. If plan.file is left out, this plan fits: {words}")
        if (again := self._again(event)) is not None:
            raise RunError(
                f"{event.told}. This is {again}, so the run ends. By the new limit this plan fits: {words}. {LESS_MEMORY}"
            )
        try:
            seat(world, found.plan.backend, found.plan)
        except InputError as error:
            raise RunError(f"{event.told}. This plan fits, once the run is started again: {words} ({error})") from None
        if world.is_main:
            spoilt = any(shortage.spoils for shortage in event.shortages)
            repeated = f"The run goes on from step {step}" if spoilt else f"Step {step} is repeated"
            say(f"{event.told}. {repeated} by a new plan: {words}")
        return found

    def _again(self, event: Event) -> str | None:
        """Why the run does not try another plan, if it does not."""
        kinds = {self.session.cluster.device(shortage.device).type for shortage in event.shortages}
        again = next((kind for kind in sorted(kinds) if (kind, event.step) in self._in_step), None)
        self._in_step |= {(kind, event.step) for kind in kinds}
        self._short.update(kinds)
        if again is not None:
            return f"the second time in step {event.step + 1} that a {again!r} has too little memory"
        most = next((kind for kind in sorted(kinds) if self._short[kind] > MOST_REPLANS), None)
        return f"the {self._short[most]}th time in this run that a {most!r} has too little memory" if most is not None else None
