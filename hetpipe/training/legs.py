"""A run is a row of legs, each under a plan, with process groups and engines of its own. What a run knows goes from leg to leg by
name, as it does from a checkpoint to a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from hetpipe.building.build import build_model
from hetpipe.checkpoints.resume import RunState, check_data
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import computing_seconds, simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.standby import Standby
from hetpipe.processes.stopping import RunStopped
from hetpipe.runtime.checks.shortage import Shortage, ShortMemoryError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.directing.director import Director, Event, Leg
from hetpipe.training.directing.drift import Drifts
from hetpipe.training.directing.memory import learned
from hetpipe.training.directing.seen import Seen
from hetpipe.training.loop import Loop
from hetpipe.training.moving.carried import Handing
from hetpipe.training.observers.records import EvaluationRecord
from hetpipe.training.runlog import TrainResult
from hetpipe.training.session import Request, Session, Setting, home_of_profile, join, used_ranks


def joined(setting: Setting, plan: Plan, profile: Profile | None) -> PlanEngine | None:
    """This rank's engine (see `join`). ShortMemoryError on every rank if one has no memory for its layers. Collective."""
    engine, short = None, tuple[Shortage, ...]()
    try:
        engine = join(setting, plan, profile)
    except ShortMemoryError as error:  # of those ranks that the plan uses
        short = error.shortages
    if told := next((found for found in setting.world.gather(short) if found), None):
        raise ShortMemoryError(told)
    return engine


@contextmanager
def leg(setting: Setting, plan: Plan, engine: PlanEngine | None) -> Iterator[None]:
    """One leg, by this rank's engine. None where the plan does not use the rank: when such a rank leaves this context, it waits
    until the others have left it, too. Afterwards the engine and its process groups are closed. Every rank of the job enters
    it."""
    standby = Standby.create(setting.world, used_ranks(setting, plan))
    try:
        yield
    except RunStopped:
        if standby is not None:
            standby.over()
        raise
    if engine is not None:
        engine.leave()
    if standby is not None:
        standby.over()
        standby.close()


class _Told(NamedTuple):
    """What all ranks are told of a leg that is over, by its main rank: `samples` of each step; `is_spoilt`: see `Loop`."""

    event: Event
    losses: list[float]
    samples: list[int]
    first_step: int
    evaluations: list[EvaluationRecord]
    is_spoilt: bool

    @classmethod
    def of(cls, loop: Loop) -> _Told:
        """Of its loop."""
        found = loop.result
        return cls(loop.over, found.losses, loop.metrics.batches, found.first_step, found.evaluations, loop.is_spoilt)

    def until(self, step: int) -> _Told:
        """The same, without what is done again where the run goes on from this step."""
        count = max(0, step - self.first_step)
        evaluations = [record for record in self.evaluations if record.step <= step]
        return self._replace(losses=self.losses[:count], samples=self.samples[:count], evaluations=evaluations)


class _Course:
    """A run, leg by leg, on this rank. `handing`: from the leg that is over to the next (None: the next one begins as a run
    does); `run`: what this rank has of it, if it was used. `result`: of the last leg, on its main rank."""

    def __init__(self, session: Session, director: Director) -> None:
        self.session, self.director = session, director
        self.past = list[_Told]()
        self.run: RunState | None = None
        self.handing: Handing | None = None
        self.has_whole_model = True  # of which no engine has taken layers
        self.result: TrainResult | None = None

    def go(self, event: Event, following: Leg, profile: Profile) -> Event:
        """The leg that follows on this event; why it is over. Collective."""
        plan = self.session.decided(following.plan, self.session.job.planning, profile)  # a director may bring any
        handing = self._prepare(event.plan, plan, profile)
        self.result = None
        try:
            engine = joined(self.session, plan, profile)
        except ShortMemoryError as error:
            return self._begin_again(Event("memory", event.step, plan, str(error), error.shortages))
        with leg(self.session, plan, engine):
            loop = Loop(self.session.job, self.session, engine, self.director) if engine is not None else None
            short = self._take_over(handing, loop)
            if loop is not None and short is None:
                self.result = _run(loop, following._replace(plan=plan), profile)
        if short is not None:
            return self._begin_again(Event("memory", event.step, plan, str(short), short.shortages))
        return self._over(loop)

    def _prepare(self, before: Plan, plan: Plan, profile: Profile) -> Handing | None:
        """The session has a model for the next leg."""
        handing, run, self.run = self.handing, self.run, None
        if handing is not None:
            self.session = handing.leave(run, before, plan, profile.joined(self.session.cluster))
        elif not self.has_whole_model:
            model = build_model(self.session.job, self.session.data)
            self.session = replace(self.session, model=model)
        if run is not None or not self.has_whole_model:
            del run
            gc.collect()  # the engine of the leg before, whose parts know each other, holds memory of its device
        self.handing, self.has_whole_model = handing or Handing(self.session), False
        return handing

    def _take_over(self, handing: Handing | None, loop: Loop | None) -> ShortMemoryError | None:
        """The leg goes on from the one before, unless there is no memory for that."""
        if handing is None:
            return None
        try:
            done = handing.enter(loop.state if loop is not None else None)
        except ShortMemoryError as error:
            return error
        if loop is not None:
            loop.done = done
        return None

    def _over(self, loop: Loop | None) -> Event:
        own = _Told.of(loop) if loop is not None and self.result is not None else None
        told: _Told = next(told for told in self.session.world.gather(own) if told is not None)
        self.past.append(told)
        if told.is_spoilt:
            return self._begin_again(told.event)
        self.run = loop.state if loop is not None else None
        return told.event

    def _begin_again(self, event: Event) -> Event:
        """No rank has, or can have, what the next leg would go on from: it begins with the newest checkpoint, as a run does."""
        self.handing = self.run = None
        step = check_data(self.session.job, self.session.content, self.session.world)
        self.past = [told.until(step) for told in self.past]
        return event._replace(step=step)

    def whole(self) -> TrainResult | None:
        """The result of all legs, on the main rank of the last one: losses, samples and evaluations; times are those of that
        leg."""
        if self.result is not None:
            self.result.losses = [loss for told in self.past for loss in told.losses]
            self.result.samples, self.result.first_step = sum(sum(told.samples) for told in self.past), self.past[0].first_step
            self.result.evaluations = [record for told in self.past for record in told.evaluations]
        return self.result


def run_legs(session: Session, event: Event, profile: Profile, director: Director) -> TrainResult | None:
    """Train leg after leg, as the director says from the begin on. The main rank of the last leg gets the result. Where a device
    has too little memory, its type has a limit from then on. Collective over all ranks of the job."""
    asked = Request.by(session.job).measuring(event.plan if session.job.plan.file is not None else None)
    home = home_of_profile(session, asked, profile) if session.world.is_main else None
    course = _Course(session, director)
    while (following := director.next_leg(event, session.world, profile)) is not None:
        event = course.go(event, following, profile)
        if event.shortages:
            profile, event = learned(session, profile, event, home)
    return course.whole()


def _run(loop: Loop, following: Leg, profile: Profile) -> TrainResult | None:
    """The steps of a leg; what they came to, on its main rank."""
    cluster, is_main = loop.session.cluster, loop.engine.world.is_main
    seen = following.seen or Seen(cluster, profile)
    plan = seen.named(following.plan, cluster)
    lengths, predicted = profile.lengths or (), _predicted(plan, seen) if is_main else None
    drifts = Drifts(loop.engine, computing_seconds(plan, seen.profile, seen.cluster), lengths)
    result = loop.run(predicted, lengths, following.until, drifts)
    result.seen = seen
    return result if is_main else None


def _predicted(plan: Plan, seen: Seen) -> Timeline:
    """The mean step of a leg."""
    return with_footprint(simulate(plan, seen.profile, seen.cluster), plan, seen.profile, seen.cluster)
