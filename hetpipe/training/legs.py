"""A run is a row of legs, each under a plan, with process groups and engines of its own. What a run knows goes from leg to leg by
name, as it does from a checkpoint to a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hetpipe.checkpoints.resume import RunState
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import computing_seconds, simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.standby import Standby
from hetpipe.processes.stopping import RunStopped
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.directing.director import Director, Event, Leg
from hetpipe.training.directing.drift import Drifts
from hetpipe.training.directing.seen import Seen
from hetpipe.training.loop import Loop
from hetpipe.training.moving.carried import Handing
from hetpipe.training.observers.records import EvaluationRecord
from hetpipe.training.runlog import TrainResult
from hetpipe.training.session import Session, Setting, join, used_ranks


@contextmanager
def leg(setting: Setting, plan: Plan, profile: Profile | None) -> Iterator[PlanEngine | None]:
    """This rank's engine. None where the plan does not use the rank: when such a rank leaves this context, it waits until the
    others have left it, too. Afterwards the engine and its process groups are closed. Every rank of the job enters it."""
    engine = join(setting, plan, profile)
    standby = Standby.create(setting.world, used_ranks(setting, plan))
    try:
        yield engine
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
    """What all ranks are told of a leg that is over, by its main rank."""

    event: Event
    losses: list[float]
    samples: int
    first_step: int
    evaluations: list[EvaluationRecord]


class _Leg(NamedTuple):
    """A leg as this rank knows it when it is over (None: if it was not used). `told` and `result`: on the leg's main rank."""

    run: RunState | None
    told: _Told | None
    result: TrainResult | None


def run_legs(session: Session, event: Event, profile: Profile, director: Director) -> TrainResult | None:
    """Train leg after leg, as the director says from the begin on. The main rank of the last leg gets the result: losses, samples
    and evaluations are those of all legs, times those of the last. Collective over all ranks of the job."""
    past, last, handing = list[_Told](), _Leg(None, None, None), Handing(session)
    while (following := director.next_leg(event, session.world, profile)) is not None:
        plan = session.decided(following.plan, session.job.planning, profile)  # a director may bring any
        if past:
            run, last = last.run, _Leg(None, None, None)
            session = handing.leave(run, event.plan, plan, profile.joined(session.cluster))
            del run
            gc.collect()  # the engine of the leg before, whose parts know each other, holds memory of its device
        last = _run_leg(session, following._replace(plan=plan), profile, director, handing if past else None)
        past.append(next(told for told in session.world.gather(last.told) if told is not None))
        event = past[-1].event
    result = last.result
    if result is not None:
        result.losses = [loss for told in past for loss in told.losses]
        result.samples, result.first_step = sum(told.samples for told in past), past[0].first_step
        result.evaluations = [record for told in past for record in told.evaluations]
    return result


def _run_leg(session: Session, following: Leg, profile: Profile, director: Director, handing: Handing | None) -> _Leg:
    """One leg; `handing`: of a run that has had others. Collective over all ranks of the job."""
    with leg(session, following.plan, profile) as engine:
        loop = Loop(session.job, session, engine, director) if engine is not None else None
        done = handing.enter(loop.state if loop is not None else None) if handing is not None else None
        if engine is None or loop is None:
            return _Leg(None, None, None)
        loop.done = done
        seen = following.seen or Seen(session.cluster, profile)
        plan = seen.named(following.plan, session.cluster)
        lengths, predicted = profile.lengths or (), _predicted(plan, seen) if engine.world.is_main else None
        drifts = Drifts(engine, computing_seconds(plan, seen.profile, seen.cluster), lengths)
        result = loop.run(predicted, lengths, following.until, drifts)
    if not loop.engine.world.is_main:
        return _Leg(loop.state, None, None)
    result.seen = seen
    told = _Told(loop.over, result.losses, result.samples, result.first_step, result.evaluations)
    return _Leg(loop.state, told, result)


def _predicted(plan: Plan, seen: Seen) -> Timeline:
    """The mean step of a leg."""
    return with_footprint(simulate(plan, seen.profile, seen.cluster), plan, seen.profile, seen.cluster)
