"""The training loop: data, optimizer and schedule around an engine; stops, skips, saves and tells as the job says."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from hetpipe.building.build import build_scheduler, optimizer_factory
from hetpipe.building.data import Ragged
from hetpipe.building.feed import Batch, Feed, Reading, sampler_of
from hetpipe.checkpoints.checkpoint import CheckpointError
from hetpipe.checkpoints.resume import Complete, RunState, Saved
from hetpipe.checkpoints.training_state import LastStep
from hetpipe.documents.job import Job
from hetpipe.documents.profiles.lengths import LengthFactor
from hetpipe.files.messages import InputError
from hetpipe.layers.numbers import as_type
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.progress import say, warn
from hetpipe.processes.pulse import hang_up_on_loss, is_of_another
from hetpipe.processes.stopping import RunError, RunStopped, StopRequest
from hetpipe.processes.whereabouts import during, resume
from hetpipe.runtime.checks.agreement import DifferentSamplesError, different_samples
from hetpipe.runtime.checks.finite import goes_on
from hetpipe.runtime.checks.shortage import ShortMemoryError
from hetpipe.runtime.gradients import ReplicaMismatchError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.precision.loss_scale import LossScale
from hetpipe.training.directing.by_job import ByJob
from hetpipe.training.directing.director import Director, Event
from hetpipe.training.directing.drift import Drifts
from hetpipe.training.evaluation import Evaluator
from hetpipe.training.metrics import Metrics
from hetpipe.training.observers.attending import Observers, attending
from hetpipe.training.observers.records import CheckpointRecord, RunRecord, StepRecord
from hetpipe.training.reference import find_reference
from hetpipe.training.runlog import TrainResult
from hetpipe.training.session import Session
from hetpipe.training.undo import Undo

ADVICE = (
    "What a data set draws from torch's, numpy's or Python's own generator is the same wherever the sample is fetched; what it "
    "takes from elsewhere (a generator of its own, a clock, a file that is written meanwhile) is not: draw from these"
)


class Taken(NamedTuple):
    """A step that is over, the `number`-th of the run. `stops`: a rank has asked to end the leg with it; `moves`: only since
    layers change their place, for which nothing need be saved; `is_end`: the leg was to end with it."""

    number: int
    loss: float
    norm: float | None
    batch: Batch
    stops: bool
    moves: bool = False
    is_end: bool = False


class Asked(NamedTuple):
    """Why a rank asks to end the leg: whether a signal stopped it, and what its director found."""

    stopped: bool
    event: Event | None


class Loop:
    """One leg of a run, on one rank: all steps, or those until the leg is over. `after`: what is done behind each step, in this
    order, and when; its time is not part of the step. `over`: why it has ended. `is_spoilt`: in the midst of a step that cannot
    be put back here."""

    is_spoilt = False

    def __init__(self, job: Job, session: Session, engine: PlanEngine, director: Director | None = None) -> None:
        self.job, self.session, self.engine, self.section = job, session, engine, job.train
        self.director: Director = director or ByJob(session)
        self.done: int | None = None  # steps of the legs before; in the first leg, a checkpoint knows
        self.over = Event("begin", 0, engine.plan)
        self._found: Event | None = None  # by this rank's director
        self._last: LastStep | None = None  # unless what comes behind it is known to have been done
        self._has_moved = False  # whether the optimizer has taken a step of this leg
        self._end = 0  # the step after which the leg is over
        optimizer = optimizer_factory(job.train.optimizer)(list(engine.trained_parameters()))
        convert = partial(as_type, name=job.train.dtype)
        reads = engine.is_first or engine.is_last
        self.reading = Reading(convert=convert, workers=job.data.workers if reads else 0, pinned=engine.device.type == "cuda")
        sampler, self.total = sampler_of(session.data.train, job.train)
        self.feed = Feed(session.data.train, sampler, self._own, self.reading)
        begin = job.train.scheduler.from_step if job.train.scheduler is not None else 0
        scheduler = build_scheduler(job.train.scheduler, optimizer, self.total - begin)
        self.evaluator = Evaluator(job, session, engine, self.reading, self._own)
        self.state = RunState(
            train=job.train, engine=engine, optimizer=optimizer, scheduler=scheduler, feed=self.feed, best=self.evaluator.best
        )
        self.undo = Undo(self.state)
        engine.loss_scale = LossScale(**job.train.loss_scale.model_dump())
        self.result = TrainResult(plan=engine.plan)
        self.metrics = Metrics(engine, self.result, job.log)
        self.saved = None
        if job.checkpoint is not None:
            self.saved = Saved(job=job, section=job.checkpoint, run=self.state, content=session.content)
        self.drifts: Drifts | None = None
        self.after: list[tuple[Callable[[Taken], bool], Callable[[Taken, Observers], None]]] = [
            (lambda step: self.drifts is not None, self._look_for_drift),
            (lambda step: True, self._tell),
            (lambda step: self._evaluates(step.number), lambda step, observers: self._evaluate(step.number, observers)),
            (self._is_last, self._compare_replicas),
            (self._is_written, self._complete),
            (self._saves, self._save),
            (lambda step: step.stops or step.is_end or self._is_last(step), self._complete),
        ]

    def run(
        self,
        predicted: Timeline | None = None,
        lengths: Sequence[LengthFactor] = (),
        until: int | None = None,
        drifts: Drifts | None = None,
    ) -> TrainResult:
        """Run all steps, then the evaluation; or the steps up to `until`, or to that in which the director ends the leg.
        RunStopped where a signal asked for the end, after the step in which it did. `predicted`: the mean step; the `lengths`
        of a profile say how others differ. `drifts`: whether devices compute as fast as they did (None: nobody looks)."""
        self.drifts = drifts
        if self.job.elastic is not None:
            hang_up_on_loss()
        start = self._resume()
        self.total = max(self.total, start)  # a job may ask for fewer steps than its run has done
        find_reference(self.job, self.session, self.engine, self.reading, self._own, self.state.beside, begins=start == 0)
        self.metrics.begin(start, predicted, lengths)
        self.undo.moved(start)
        with attending(self.engine.world, self._facts(start)) as observers:
            with StopRequest() as stop, self._saving(observers):
                if self._last is not None:
                    self._tell_again(start, self._last, observers)
                end = self.total if until is None else min(self.total, until)
                self.over = self._train(start, end, stop, observers)
            if drifts is not None:
                drifts.close()
            self.metrics.end()
            if self.over.step < self.total:
                self.metrics.collect()
                return self.result
            if self.evaluator.done is None or self.evaluator.done[0] != self.total:
                self._note_evaluation(self.total, observers)
            self.metrics.collect()
        return self.result

    def _facts(self, start: int) -> RunRecord:
        predicted = self.result.predicted
        return RunRecord(
            job=self.job,
            plan=self.engine.plan,
            cluster=self.session.cluster,
            first_step=start,
            told_again=self._last is not None,
            total_steps=self.total,
            predicted_step_seconds=predicted.step_seconds if predicted is not None else None,
            peak_bytes={device: peak for device, peak, _ in self.engine.usage()},
            is_main=self.engine.world.is_main,
            steps_differ=isinstance(self.session.data.train, Ragged),
            predicted_bytes=dict(predicted.peak_bytes) if predicted is not None else {},
        )

    def _keep(self) -> None:
        """Another rank is lost: keep what this one has of the run, if it may go on without that one."""
        done = self.undo.whole() if self.saved is not None and self.job.elastic is not None else None
        if done is None or self.engine.has_half_a_step:
            return
        assert self.saved is not None
        loss = self.result.losses[-1] if self.result.losses else self.result.loss_before
        with during(f"keeping its layers as they were after step {done}"):
            try:
                self.saved.keep(done, loss, self._last)
            except (OSError, InputError) as error:
                warn(f"note: rank {self.engine.world.rank} cannot keep its layers as they were after step {done}: {error}")

    def _train(self, start: int, end: int, stop: StopRequest, observers: Observers) -> Event:
        engine = self.engine
        engine.steps, engine.ask_to_stop = start, lambda: bool(stop) or self._found is not None
        self._end = end
        engine.is_busy_beside = lambda: self.saved is not None and self.saved.writing is not None and self.saved.writing.is_busy
        engine.check_replicas_every = self.section.check_replicas_every
        with self.feed.open(max(0, end - start), lambda: f"samples of step {engine.steps + 1}") as batches:
            for step in range(start, end):
                self.metrics.begin_step()
                self.undo.begin(step)
                batch = next(batches)
                try:
                    loss, norm = self._step(step, batch)
                except ShortMemoryError as error:
                    return self._taken_back(batch, error, stop, observers)
                asked = engine.world.gather(Asked(bool(stop), self._found)) if engine.asked_to_stop else []
                moves = all(not each.stopped and (each.event is None or each.event.why == "drift") for each in asked)
                taken = Taken(step + 1, loss, norm, batch, engine.asked_to_stop, moves, step + 1 == end)
                self._after(taken, observers)
                if asked and (found := self._ended(step + 1, stop, asked)) is not None:
                    return found
                if step + 1 == self.total:  # by now, if the run ends early
                    return Event("end", step + 1, engine.plan)
        return Event("end", max(start, end), engine.plan)

    def _taken_back(self, batch: Batch, error: ShortMemoryError, stop: StopRequest, observers: Observers) -> Event:
        """Why the leg ends with the steps that were done before this one, for which a device had no memory. They are saved, as
        nobody knows yet whether another plan fits. RunStopped if a signal has asked any rank for the end. Collective."""
        self.metrics.take_back()
        spoilt = any(shortage.spoils for shortage in error.shortages) or not self.undo.put_back()
        asked = self.engine.world.gather((bool(stop), spoilt))
        self.is_spoilt = any(spoilt for _, spoilt in asked)
        self.engine.steps -= 1
        done = self.engine.steps
        if self.result.losses and not self.is_spoilt and self.saved is not None:
            before = Taken(done, self.result.losses[-1], None, batch, stops=False)
            if not self._saves(before):
                self._save(before, observers)
        self._complete(None, observers)
        if any(stops for stops, _ in asked):
            raise RunStopped(stop.number or signal.SIGTERM, done, resume())
        return Event("memory", done, self.engine.plan, str(error), error.shortages)

    def _ended(self, done: int, stop: StopRequest, asked: Sequence[Asked]) -> Event | None:
        """Why ranks have asked to end the leg; RunStopped if a signal asked one to. None if the run is over anyway."""
        if any(each.stopped for each in asked):
            raise RunStopped(stop.number or signal.SIGTERM, done, resume())
        found = next(each.event for each in asked if each.event is not None)
        return found._replace(step=done, plan=self.engine.plan) if done < self.total else None

    def _step(self, step: int, batch: Batch) -> tuple[float, float | None]:
        try:
            loss, norm = self.engine.step(batch.inputs, batch.targets), None
        except DifferentSamplesError as error:
            number = int(batch.numbers[self.engine.row_of(len(batch.numbers), error.replica, error.row)])
            raise different_samples(error.replica, error.row, f"sample {number} of the data", ADVICE) from None
        taken = goes_on(self.engine, step + 1, loss, batch.inputs, batch.targets, self.section.on_nonfinite)
        if taken:
            if self.section.clip_norm is not None:
                norm = self.engine.clip_grad_norm_(self.section.clip_norm)
            self.undo.moves()
            self.engine.optimize(self.state.optimizer, told=self._is_looked_at(step + 1))
            self._has_moved = True
        if self.state.scheduler is not None:
            with warnings.catch_warnings():  # a first step that is left out is no mistake in the order of calls
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                self.state.scheduler.step()
        self.undo.moved(step + 1)
        finite = norm if norm is not None and math.isfinite(norm) else None
        self._last = LastStep(epoch=batch.epoch, samples=len(batch.numbers), grad_norm=finite, left_out=not taken)
        self.metrics.took(loss, len(batch.numbers), left_out=not taken)
        return loss, norm

    def _own(self, batch: torch.Tensor) -> torch.Tensor | None:
        """The numbers of this rank's samples of a global batch: those of the first stage's, or the last stage's; or none."""
        own = self.engine.share(batch)
        assert isinstance(own, torch.Tensor)
        return own if self.engine.is_first or self.engine.is_last else None

    def _after(self, step: Taken, observers: Observers) -> None:
        began = time.perf_counter()
        for due, action in self.after:
            if due(step):
                action(step, observers)
        self.metrics.pause(began)

    def _is_looked_at(self, done: int) -> bool:
        """Whether more becomes of this step than that it is told and the next one follows, so that all must know how it ended. In
        the first step that an optimizer takes it makes what it keeps, for which there may be no memory."""
        every = self.saved.section.every_steps if self.saved is not None else None
        saved = every is not None and done % every == 0
        ends = done == self._end or self.engine.asked_to_stop
        return not self._has_moved or ends or saved or self.evaluator.is_due(done, last=done == self.total)

    def _is_last(self, step: Taken) -> bool:
        return step.number == self.total

    def _compare_replicas(self, step: Taken, observers: Observers) -> None:
        self.engine.check_replicas()

    def _tell(self, step: Taken, observers: Observers) -> None:
        rate = self.state.optimizer.param_groups[0]["lr"]
        record = self.metrics.record(step.number, step.batch, last=self._is_last(step), learning_rate=rate, norm=step.norm)
        observers.stepped(record)
        self._found = self._found or self.director.watch(record)

    def _tell_again(self, step: int, last: LastStep, observers: Observers) -> None:
        """What comes behind the step that this run goes on from. It was done by one that has lost a rank, perhaps before that."""
        record = StepRecord(
            step=step,
            epoch=last.epoch,
            samples=last.samples,
            loss=math.nan if self.result.loss_before is None else self.result.loss_before,
            learning_rate=self.state.optimizer.param_groups[0]["lr"],
            grad_norm=last.grad_norm,
            loss_scale=self.engine.loss_scale.scale if self.engine.scaled else None,
            left_out=last.left_out,
            fetch_seconds=0.0,
        )
        observers.stepped(record)
        if self._evaluates(step):
            self._evaluate(step, observers)

    def _look_for_drift(self, step: Taken, observers: Observers) -> None:
        assert self.drifts is not None
        self.drifts.stepped(whole=len(step.batch.numbers) == self.engine.plan.global_batch)
        if (found := self.drifts.look(step.number, self.total - step.number)) is None:
            return
        if (record := self.director.drifted(found, self.engine.world)) is not None:
            self.drifts.again = record.again
            observers.drifted(record)

    def _saves(self, step: Taken) -> bool:
        if self.saved is None:
            return False
        is_best = self.evaluator.best.saved is not None and self.evaluator.best.saved.step == step.number
        return (
            is_best or self._is_last(step) or (step.stops and not step.moves) or step.number % self.saved.section.every_steps == 0
        )

    def _save(self, step: Taken, observers: Observers) -> None:
        assert self.saved is not None
        self._complete(step, observers)  # the one before
        self._tell_saved(self.saved.save(step.number, step.loss), observers)

    def _is_written(self, step: Taken) -> bool:
        """Whether no rank writes any more of a checkpoint that is under way."""
        return self.saved is not None and self.saved.writing is not None and not self.engine.any_busy_beside

    def _complete(self, step: Taken | None, observers: Observers) -> None:
        """Wait for a checkpoint that is under way."""
        if self.saved is not None:
            self._tell_saved(self.saved.complete(), observers)

    def _tell_saved(self, found: Complete | None, observers: Observers) -> None:
        if found is not None:
            observers.saved(CheckpointRecord(step=found.step, where=str(found.checkpoint)))

    @contextmanager
    def _saving(self, observers: Observers) -> Iterator[None]:
        """A checkpoint that is under way when the leg ends is completed; but where this rank alone has an error, nothing of it is
        left, as far as this rank can."""
        try:
            yield
            self._complete(None, observers)
        except (RunError, ReplicaMismatchError):  # of all ranks
            try:
                self._complete(None, observers)
            except CheckpointError as failed:
                if self.engine.world.is_main:
                    warn(f"note: {failed}")
            raise
        except BaseException as error:
            if is_of_another(error):
                self._keep()
            if self.saved is not None:
                self.saved.abandon()
            raise
        finally:
            if self.saved is not None:
                self.saved.copies.give_back()

    def _evaluates(self, step: int) -> bool:
        return self.evaluator.is_due(step, last=step == self.total)

    def _evaluate(self, step: int, observers: Observers) -> None:
        self._note_evaluation(step, observers, inner=True)
        if self.evaluator.best.is_over and step < self.total:
            if self.engine.world.is_main:
                say(f"the run ends early, after step {step} of {self.total}: {self.evaluator.best.told}")
            self.total = step

    def _note_evaluation(self, step: int, observers: Observers, *, inner: bool = False) -> None:
        record = self.evaluator.run(step, inner=inner)
        if record is not None:
            assert self.evaluator.done is not None
            self.result.evaluation = self.evaluator.done[1]
            self.result.evaluations.append(record)
            self.result.best = self.evaluator.best.saved if self.evaluator.section.every_steps is not None else None
            observers.evaluated(record)

    def _resume(self) -> int:
        if self.done is not None:
            return self.done
        state = self.saved.restore(self.total) if self.saved is not None else None
        if state is None:
            return 0
        self.result.loss_before, self._last = state.loss, state.last
        if self.evaluator.best.is_over:
            self.total = min(self.total, state.step)
        return state.step
