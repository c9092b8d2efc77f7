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
from hetpipe.checkpoints.state_tensors import Shards, empty_optimizer_state, install, model_state, optimizer_state
from hetpipe.checkpoints.stores.layout import Described
from hetpipe.checkpoints.training_state import FORMAT, TrainerState
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.layers.shards.layout import Cut
from hetpipe.layers.shards.split import Piece
from hetpipe.predict.footprint import with_footprint
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.standby import Standby
from hetpipe.processes.stopping import RunStopped
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.whole_state import receive_tensor, send_tensor
from hetpipe.training.directing.director import Director, Event
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
    the CPU, of which of them it has `pieces` only, and the rest of the run's state as trainer.json has it."""

    step: int
    tensors: dict[str, Tensor]
    pieces: dict[str, Piece]
    plain: dict[str, Any]

    @classmethod
    def of(cls, run: RunState) -> Carried:
        """Of a leg that is over."""
        stage = run.engine.stage
        own, split = model_state(stage) | optimizer_state(stage, run.optimizer), Shards(stage)
        pieces = {key: piece for key, tensor in own.items() if (piece := split.piece(key, tensor.shape)) is not None}
        return cls(run.engine.steps, {key: tensor.to("cpu", copy=True) for key, tensor in own.items()}, pieces, run.plain())

    def kind(self, key: str) -> _Kind:
        """What there is of one of its tensors."""
        tensor, piece = self.tensors[key], self.pieces.get(key)
        if piece is None:
            return _Kind(tuple(tensor.shape), tensor.dtype)
        return _Kind(piece.whole_shape(tensor.shape), tensor.dtype, tuple(tensor.shape), piece.cut, piece.group.ranks)


class _Kind(NamedTuple):
    """The shape and type of a tensor; and if it is carried in shards, the shape of one, how it is cut, and who has them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: tuple[int, ...] = ()
    cut: Cut | None = None
    ranks: tuple[int, ...] = ()


def hand_over(carried: Carried | None, run: RunState | None, world: World) -> int:
    """Let the run of this leg go on from what all ranks have carried; the step of that. None: this rank was not used, or is not.
    Collective over all ranks of the job."""
    kinds = world.gather({key: carried.kind(key) for key in carried.tensors} if carried is not None else {})
    found: dict[str, tuple[int, _Kind]] = {}
    for rank, part in zip(world.ranks, kinds, strict=True):
        for key, kind in part.items():
            found.setdefault(key, (rank, kind))
    held, wanted = dict[str, Tensor](), dict[str, Tensor]()
    if run is not None:
        stage, there = run.engine.stage, {key: Described(kind.shape, kind.dtype) for key, (_, kind) in found.items()}
        held = model_state(stage)
        wanted = Shards(stage).room(held) | empty_optimizer_state(stage, run.optimizer, there)
    takers = world.gather(list(wanted))
    with peers_named():
        for key, (source, kind) in sorted(found.items()):
            ranks = [rank for rank, keys in zip(world.ranks, takers, strict=True) if key in keys]
            own = carried.tensors.get(key) if carried is not None else None
            _pass_on(own, wanted.get(key), kind, kind.ranks or (source,), ranks, world)
    step, plain = next(told for told in world.gather(carried and (carried.step, carried.plain)) if told is not None)
    if run is not None:
        Shards(run.engine.stage).take(held, wanted)
        install(run.engine.stage, run.optimizer, wanted)
        run.take_over(TrainerState.parse({"format": FORMAT, "step": step, **plain}, "the leg before"), "the leg before")
    done: int = step
    return done


def _pass_on(
    own: Tensor | None, target: Tensor | None, kind: _Kind, sources: tuple[int, ...], takers: list[int], world: World
) -> None:
    """One tensor, from the ranks that have it, or its shards, to all that want it."""
    parts = list[Tensor]()
    for source in sources:
        if source == world.rank:
            assert own is not None
            for rank in takers:
                if rank != source:
                    send_tensor(own, rank, world)
        if world.rank in takers:
            shape = kind.shape if kind.cut is None else kind.shard
            parts.append(own if source == world.rank and own is not None else receive_tensor(shape, kind.dtype, source, world))
    if target is not None:
        with torch.no_grad():
            target.copy_(parts[0] if kind.cut is None else kind.cut.join(parts))


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
