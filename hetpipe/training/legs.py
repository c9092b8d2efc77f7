"""A run is a row of legs, each under a plan, with process groups and engines of its own. What a run knows goes from leg to leg by
name, as it does from a checkpoint to a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetpipe.building.build import build_model
from hetpipe.checkpoints.resume import RunState
from hetpipe.checkpoints.state_tensors import empty_optimizer_state, install, model_state, optimizer_state
from hetpipe.checkpoints.stores.layout import Described
from hetpipe.checkpoints.training_state import FORMAT, TrainerState
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.standby import Standby
from hetpipe.processes.stopping import RunStopped
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.whole_state import receive_tensor, send_tensor
from hetpipe.training.director import Director, Event
from hetpipe.training.loop import Loop
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


class Carried(NamedTuple):
    """What this rank carries from a leg to the next: the step, its tensors by the whole model's names, in memory of their own on
    the CPU, and the rest of the run's state as trainer.json has it."""

    step: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]

    @classmethod
    def of(cls, run: RunState) -> Carried:
        """Of a leg that is over."""
        stage = run.engine.stage
        own = model_state(stage) | optimizer_state(stage, run.optimizer)
        return cls(run.engine.steps, {key: tensor.to("cpu", copy=True) for key, tensor in own.items()}, run.plain())


def hand_over(carried: Carried | None, run: RunState | None, world: World) -> int:
    """Let the run of this leg go on from what all ranks have carried; the step of that. None: this rank was not used, or is not.
    Collective over all ranks of the job."""
    own = carried.tensors if carried is not None else {}
    kinds = world.gather({key: (tuple(tensor.shape), tensor.dtype) for key, tensor in own.items()})
    available = {key: Described(*kind) for part in reversed(kinds) for key, kind in part.items()}
    wanted: dict[str, Tensor] = {}
    if run is not None:
        stage = run.engine.stage
        wanted = model_state(stage) | empty_optimizer_state(stage, run.optimizer, available)
    takers = world.gather(list(wanted))
    with peers_named():
        for key in sorted(available):
            source = next(rank for rank, part in zip(world.ranks, kinds, strict=True) if key in part)
            ranks = [rank for rank, keys in zip(world.ranks, takers, strict=True) if key in keys]
            _pass_on(key, own, wanted, source, ranks, world)
    step, plain = next(found for found in world.gather(carried and (carried.step, carried.plain)) if found is not None)
    if run is not None:
        install(run.engine.stage, run.optimizer, wanted)
        run.take_over(TrainerState.parse({"format": FORMAT, "step": step, **plain}, "the leg before"), "the leg before")
    found: int = step
    return found


def _pass_on(key: str, own: dict[str, Tensor], wanted: dict[str, Tensor], source: int, takers: list[int], world: World) -> None:
    """One tensor, from the first rank that has it to all that want it."""
    if source == world.rank:
        for rank in takers:
            if rank != source:
                send_tensor(own[key], rank, world)
    if world.rank in takers:
        target = wanted[key]
        with torch.no_grad():
            target.copy_(own[key] if source == world.rank else receive_tensor(target.shape, target.dtype, source, world))


class _Told(NamedTuple):
    """What all ranks are told of a leg that is over, by its main rank."""

    event: Event
    losses: list[float]
    samples: int
    first_step: int
    evaluations: list[EvaluationRecord]


def run_legs(session: Session, event: Event, profile: Profile, director: Director) -> TrainResult | None:
    """Train leg after leg, as the director says from the begin on. The main rank of the last leg gets the result: losses, samples
    and evaluations are those of all legs, times those of the last. Collective over all ranks of the job."""
    past, last = list[_Told](), None
    result: TrainResult | None = None
    while (following := director.next_leg(event, session.world, profile)) is not None:
        carried, result = Carried.of(last.state) if last is not None else None, None
        if past:  # an engine takes what it trains out of the model
            session = replace(session, model=build_model(session.job, session.data.train, session.data.names))
        plan = session.decided(following.plan, session.job.planning, profile)  # a director may bring any
        with leg(session, plan, profile) as engine:
            last = Loop(session.job, session, engine, director) if engine is not None else None
            if past:
                done = hand_over(carried, last.state if last is not None else None, session.world)
                if last is not None:
                    last.done = done
            carried = None
            if last is not None:
                found = last.run(_predicted(last, profile), profile.lengths or (), following.until)
                result = found if last.engine.world.is_main else None
        own = (
            _Told(last.over, result.losses, result.samples, result.first_step, result.evaluations)
            if last is not None and result is not None
            else None
        )
        past.append(next(told for told in session.world.gather(own) if told is not None))
        event = past[-1].event
    if result is not None:
        result.losses = [loss for told in past for loss in told.losses]
        result.samples, result.first_step = sum(told.samples for told in past), past[0].first_step
        result.evaluations = [record for told in past for record in told.evaluations]
    return result


def _predicted(loop: Loop, profile: Profile) -> Timeline | None:
    """The mean step of a leg, on its main rank."""
    if not loop.engine.world.is_main:
        return None
    plan, cluster = loop.engine.plan, loop.session.cluster
    return with_footprint(simulate(plan, profile, cluster), plan, profile, cluster)
