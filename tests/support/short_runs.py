"""Runs of jobs in which devices have too little memory: several one after the other, in the same ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.planning.partition import PartitionError
from hetpipe.processes.progress import LOG
from hetpipe.processes.stopping import RunError
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.stages.engine import TorchEngine
from hetpipe.training.directing.by_job import ByJob
from hetpipe.training.directing.director import Event, Leg
from hetpipe.training.directing.drift import Drift
from hetpipe.training.moving import carried
from hetpipe.training.observers.records import DriftRecord, StepRecord
from hetpipe.training.runlog import TrainResult
from hetpipe.training.trainer import Trainer
from tests.support.shortages import Short, lack

LAYERS, STATE, EVALUATION = "layers", "state", "evaluation"  # what there is no memory for outside of steps


class Course(NamedTuple):
    """What one rank saw of a run: the events of its legs, the plan of each, and its process groups before each; what was said;
    on the main rank, the losses, that of the evaluation at the end, and how many samples were trained; and the error that ended
    it, of which kind."""

    events: list[Event]
    plans: list[Plan]
    groups: list[int]
    said: list[str]
    losses: list[float] | None = None
    evaluation: float | None = None
    samples: int = 0
    error: str = ""
    kind: str = ""


class Given:
    """Goes on by these plans, one after each event."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = list(plans)

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        return None if event.why == "end" else Leg(event.plan if event.why == "begin" else self.plans.pop(0))

    def watch(self, record: StepRecord) -> Event | None:
        return None

    def drifted(self, drift: Drift, world: World) -> DriftRecord | None:
        return None


class _Watched:
    """Another director, of which is noted what it is told and says. None: the job's."""

    def __init__(self, other: Given | None, course: Course) -> None:
        self.other: Any = other
        self.course = course

    def next_leg(self, event: Event, world: World, profile: Profile) -> Leg | None:
        self.course.events.append(event)
        self.course.groups.append(len(dist.distributed_c10d._world.pg_map))
        found: Leg | None = self.other.next_leg(event, world, profile)
        if found is not None:
            self.course.plans.append(found.plan)
        return found

    def watch(self, record: StepRecord) -> Event | None:
        found: Event | None = self.other.watch(record)
        return found

    def drifted(self, drift: Drift, world: World) -> DriftRecord | None:
        found: DriftRecord | None = self.other.drifted(drift, world)
        return found


def _lacking(left: list[Short], course: Course) -> Callable[[], None]:
    """The engines of this rank have no memory for these, each once; what is returned makes them as they were."""
    step, evaluate, meter, room = PlanEngine.step, PlanEngine.evaluate, TorchEngine._meter, vars(carried)["empty_optimizer_state"]

    def due(what: Callable[[Short], bool]) -> Short | None:
        now = len(course.plans) - 1
        found = next((one for one in left if one.rank == dist.get_rank() and one.leg in (now, None) and what(one)), None)
        if found is not None:
            left.remove(found)
        return found

    def lacking_step(engine: PlanEngine, inputs: Any, targets: Any) -> float:
        now = due(lambda one: one.step == engine.steps and one.what not in (LAYERS, STATE, EVALUATION))
        mend = lack(engine, now.what) if now is not None else lambda: None
        try:
            return step(engine, inputs, targets)
        finally:
            mend()

    def lacking_evaluate(engine: PlanEngine, *given: Any) -> Any:
        mend = lack(engine, "F0") if due(lambda one: one.what == EVALUATION) is not None else lambda: None
        try:
            return evaluate(engine, *given)
        finally:
            mend()

    def lacking_meter(engine: TorchEngine, emulation: Any) -> Any:
        if due(lambda one: one.what == LAYERS) is not None:
            raise MemoryError
        return meter(engine, emulation)

    def lacking_room(*given: Any) -> Any:
        if due(lambda one: one.what == STATE) is not None:
            raise MemoryError
        return room(*given)

    def put(*four: Any) -> None:
        PlanEngine.step, PlanEngine.evaluate, TorchEngine._meter = four[:3]  # type: ignore[method-assign]
        vars(carried)["empty_optimizer_state"] = four[3]

    put(lacking_step, lacking_evaluate, lacking_meter, lacking_room)
    return lambda: put(step, evaluate, meter, room)


def short_runs(job: Job, cases: Sequence[tuple[Job, Sequence[Short], Sequence[Plan]]]) -> list[list[Course]]:
    """Of every rank, what it saw of each job, in which ranks lack memory, and which goes on by these plans, or by its own."""
    own = [_run(*case) for case in cases]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def pipe_run(job: Job, plan: Plan | None = None, profile: Profile | None = None) -> tuple[TrainResult, list[str]] | None:
    """A run of a back end that drives a replica from one process, of which the first has no memory for its third step; and what
    was said."""
    course = Course([], [], [], [])
    handler = logging.Handler()
    handler.emit = lambda record: course.said.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    _lacking([Short(rank=0, what="all", step=2)], course)
    found = Trainer(job).run(plan, profile)
    return (found, course.said) if found is not None else None


def _run(job: Job, lacks: Sequence[Short], plans: Sequence[Plan]) -> Course:
    course = Course([], [], [], [])
    handler = logging.Handler()
    handler.emit = lambda record: course.said.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    put_back, watched = _lacking(list(lacks), course), _Watched(Given(plans) if plans else None, course)
    trainer = Trainer(job, watched)
    if watched.other is None:
        vars(trainer)["_run"] = lambda session, *given: _by_job(trainer, watched, session, given)
    try:
        found = trainer.run()
        if found is None:
            return course
        evaluation = found.evaluation.loss if found.evaluation is not None else None
        return course._replace(losses=found.losses, evaluation=evaluation, samples=found.samples)
    except (RunError, PartitionError) as error:
        return course._replace(error=str(error), kind=type(error).__name__)
    finally:
        put_back()
        LOG.removeHandler(handler)


def _by_job(trainer: Trainer, watched: _Watched, session: Any, given: Any) -> Any:
    watched.other = ByJob(session)
    return Trainer._run(trainer, session, *given)
