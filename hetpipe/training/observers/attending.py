"""All observers of a run on this rank: hetpipe's own, and those of the packages that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

from hetpipe.documents.job import Job
from hetpipe.documents.sections.log import JSON_LINES, ObserverSection
from hetpipe.files.messages import InputError, cut, nearest
from hetpipe.planning.registry import load_point, load_target, observer_points, source_of
from hetpipe.processes.progress import say, warn
from hetpipe.processes.stopping import RunStopped
from hetpipe.processes.whereabouts import during
from hetpipe.processes.world import World
from hetpipe.training.observers.json_lines import JsonLines
from hetpipe.training.observers.loggers import LOGGERS, Logger
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import CheckpointRecord, DriftRecord, EndRecord, EvaluationRecord, RunRecord, StepRecord
from hetpipe.training.observers.screen import Outlook, Progress
from hetpipe.training.observers.watch import Watch

# Not by entry points: these are read from what was installed, and a checkout that is not, or was before, would have none.
OWN: tuple[type[Observer], ...] = (Watch, JsonLines, Outlook, Progress)


class ObserverError(RuntimeError):
    """An observer of another package failed: which, of which package, when and how."""


class Attending(NamedTuple):
    """An observer, and what it is called where another package brings it."""

    observer: Observer
    name: str | None = None


class Observers:
    """Tells all of them, in their order, what happens. ObserverError where one of another package fails."""

    def __init__(self, attending: Sequence[Attending]) -> None:
        self._attending = attending
        self._began: list[Attending] = []
        self._step = 0

    def began(self, run: RunRecord) -> None:
        """A run begins."""
        self._step = run.first_step
        for one in self._attending:
            self._tell(one, lambda o: o.began(run), "that the run began")
            self._began.append(one)

    def stepped(self, step: StepRecord) -> None:
        """A step is over."""
        self._step = step.step
        for one in self._attending:
            self._tell(one, lambda o: o.stepped(step), f"that step {step.step} was over")

    def drifted(self, drift: DriftRecord) -> None:
        """Devices have become slower or faster."""
        for one in self._attending:
            self._tell(one, lambda o: o.drifted(drift), f"of the speeds after step {drift.step}")

    def saved(self, checkpoint: CheckpointRecord) -> None:
        """A checkpoint is complete."""
        for one in self._attending:
            self._tell(one, lambda o: o.saved(checkpoint), f"that step {checkpoint.step} was saved")

    def evaluated(self, evaluation: EvaluationRecord) -> None:
        """Samples that do not train were evaluated."""
        for one in self._attending:
            self._tell(one, lambda o: o.evaluated(evaluation), "of the evaluation")

    def ended(self, error: BaseException | None) -> None:
        """The run is over, or `error` ends it; that stays what is raised, whatever else fails now."""
        words = None if error is None else str(error) if isinstance(error, RunStopped) else _told(error)
        failures = []
        while self._began:
            try:
                self._tell(self._began.pop(), lambda o: o.ended(EndRecord(step=self._step, error=words)), "that the run ended")
            except Exception as failure:
                failures.append(failure)
        if failures and error is None:
            raise failures[0]
        for other in failures:
            warn(f"note: {other}")

    def _tell(self, one: Attending, what: Callable[[Observer], None], news: str) -> None:
        if one.name is None:
            what(one.observer)
            return
        try:
            with during(f"telling the observer {one.name} {news}"):
                what(one.observer)
        except Exception as error:
            kind = InputError if isinstance(error, InputError) else ObserverError
            raise kind(f"the observer {one.name} failed when it was told {news}: {_told(error)}") from error


@contextmanager
def attending(world: World, run: RunRecord) -> Iterator[Observers]:
    """The observers of a run, told that it began, and, however this is left, that it ended. Those of other packages are said.
    InputError on every rank if one cannot be had. Collective."""
    own = [Attending(kind()) for kind in OWN if world.is_main or kind.every_rank]
    observers = Observers([*own, *_named(world, run.job), *_of_others(world, run.job)])
    error: BaseException | None = None
    try:
        observers.began(run)
        yield observers
    except BaseException as raised:
        error = raised
        raise
    finally:
        observers.ended(error)


def _named(world: World, job: Job) -> list[Attending]:
    """Those that the job's `log.to` names, with their arguments: on the main rank, or if they are for every rank, on all.
    InputError on every rank if one cannot be made. Collective."""

    def made() -> list[Attending]:
        found = [(_kind_of(each), each.args) for each in _sections(job)]
        return [_of_class(k, args, name) for (k, name), args in found if world.is_main or getattr(k, "every_rank", False)]

    return world.together(made)


def _sections(job: Job) -> list[ObserverSection]:
    return [each for each in job.log.loggers if each.name != JSON_LINES] if job.log is not None else []


def _kind_of(section: ObserverSection) -> tuple[Callable[..., Any], str]:
    """The class that a section of `log.to` names, and what it is called. InputError if there is none."""
    if section.target is not None:
        return load_target(section.target), f"log.to {section.target}"
    if section.name in LOGGERS:
        return LOGGERS[section.name], f"log.to {section.name}"
    points = {point.name: point for point in observer_points()}
    if section.name not in points:
        known = nearest(str(section.name), [JSON_LINES, *LOGGERS, *points])
        raise InputError(f"log.to: there is no logger {section.name!r}{known}")
    return load_point(points[section.name]), _called(points[section.name])


def check_loggers(job: Job) -> None:
    """InputError if `log.to` names a logger that there is not, or whose package is missing: known before anything is measured."""
    for each in _sections(job):
        kind, _ = _kind_of(each)
        if isinstance(kind, type) and issubclass(kind, Logger):
            kind(**each.args)


def _of_others(world: World, job: Job) -> list[Attending]:
    """Those of other packages that the job does not name. Only the main rank imports them all, and tells which are wanted on
    every rank. Collective."""
    found: list[Attending] = []
    named = {each.name for each in job.log.loggers} if job.log is not None else set()
    world.on_main(lambda: found.extend(_made(point) for point in observer_points() if point.name not in named))
    if found:
        say(f"observers: {'; '.join(str(one.name) for one in found)}")
    wanted = world.first([one.name for one in found if one.observer.every_rank])
    return world.together(lambda: found if world.is_main else _wanted(wanted, world.rank))


def _wanted(names: Sequence[str], rank: int) -> list[Attending]:
    here = {_called(point): point for point in observer_points()} if names else {}
    if missing := [name for name in names if name not in here]:
        raise InputError(f"the observer {missing[0]} is installed for the main rank, but not for rank {rank}")
    return [_made(here[name]) for name in names]


def _made(point: EntryPoint) -> Attending:
    """InputError if it makes no observer."""
    return _of_class(load_point(point), {}, _called(point))


def _of_class(kind: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> Attending:
    try:
        observer = kind(**arguments)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the observer {name} cannot be made: {_told(error)}") from error
    if not isinstance(observer, Observer):
        raise InputError(f"the observer {name} makes a {type(observer).__name__}, which is no hetpipe.Observer")
    return Attending(observer, name)


def _called(point: EntryPoint) -> str:
    return f"{point.name!r} ({source_of(point)})"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {cut(str(error))}"
