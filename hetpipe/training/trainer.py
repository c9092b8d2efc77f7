"""The training loop: data, optimizer, schedule, log, checkpoints, around an Engine."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetpipe.building.build import (
    DTYPES,
    as_dtype,
    build_metric,
    build_scheduler,
    check_length,
    optimizer_factory,
)
from hetpipe.building.data import EpochSampler, fetch, replica_slices
from hetpipe.checkpoints.resume import Saved
from hetpipe.files.folders import check_room
from hetpipe.files.units import human_seconds
from hetpipe.layers.layer_run import DIFFERENT
from hetpipe.layers.model import Tensors
from hetpipe.planning.shares import shares_for
from hetpipe.predict.footprint import with_memory
from hetpipe.predict.simulator import simulate
from hetpipe.predict.timeline import Span, Timeline
from hetpipe.processes.progress import Activity, duration, say
from hetpipe.processes.stopping import RunStopped, StopRequest
from hetpipe.processes.whereabouts import resume
from hetpipe.runtime.base import Evaluation
from hetpipe.runtime.finite import NonFiniteError, origin
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.reference import ReferenceEngine
from hetpipe.spec.job import Job
from hetpipe.spec.plan import Plan
from hetpipe.spec.profile import Profile
from hetpipe.training.runlog import (
    METRICS_FILE,
    SUMMARY_FILE,
    WARMUP_STEPS,
    TrainResult,
    claim,
    number,
    progress_text,
    trim_metrics,
    write_folder,
)
from hetpipe.training.session import Session, join, obtain_plan, obtain_profile, open_session, planned_by_file

EVALUATED_STEPS = 4  # unless the job says otherwise, as many test samples are evaluated as so many steps train
NOTED_STEP = 12  # of a run: after it, steps that are far from their prediction are noted


class Trainer:
    """Trains a job on this rank; every rank constructs one and calls `run`. Single process, torchrun, or `hetpipe train`."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def run(self, plan: Plan | None = None, profile: Profile | None = None) -> TrainResult | None:
        """Measure, plan (unless given) and train. The main rank gets the result, the others None."""
        session = open_session(self.job)
        with claim(self.job, session.world):
            return self._run(session, plan, profile)

    def _run(self, session: Session, plan: Plan | None, profile: Profile | None) -> TrainResult | None:
        if session.world.is_main:
            _note_modes(session)
        plan = plan or planned_by_file(session)  # a fault in it is known before anything is measured
        profile = profile or obtain_profile(session)
        plan = plan or obtain_plan(session, profile)
        plan = plan.model_copy(update={"backend": self.job.plan.backend})  # whatever it was made for
        if (section := self.job.checkpoint) is not None:
            needed = state_bytes(profile)
            session.world.on_main(lambda: check_room(section.folder, needed, "a checkpoint of this model"))
        engine = join(session, profile, plan, self.job.plan.backend)
        if engine is None:
            return None
        predicted = with_memory(simulate(plan, profile, session.cluster), plan, profile, session.cluster)
        result = _Run(self.job, session, engine, plan).train(predicted)
        if not engine.world.is_main:
            return None
        folder = Path(self.job.log.folder) if self.job.log is not None else None
        if folder is not None and (result.losses or not (folder / SUMMARY_FILE).exists()):
            write_folder(folder, plan, profile, result)  # of a run that was finished, what it left stays
        return result


def state_bytes(profile: Profile) -> int:
    """About the bytes of a checkpoint: parameters, what the optimizer keeps of them, and buffers."""
    once = {layer.tied: layer.tied_parameter_bytes for layer in profile.layers if layer.tied is not None}
    own = sum(layer.parameter_bytes - layer.tied_parameter_bytes for layer in profile.layers)
    buffers = sum(layer.buffer_bytes for layer in profile.layers)
    return round((own + sum(once.values())) * (1 + profile.optimizer.state_bytes_per_parameter_byte) + buffers)


def _note_modes(session: Session) -> None:
    """Say which modules the model's function left in evaluation mode, since they train so."""
    still = [name for name, module in session.model.layers.named_modules() if name and not module.training]
    if still:
        say(f"note: {len(still)} modules are in evaluation mode and stay in it (the first: {still[0]!r}); where that is not "
             "meant, call .train() on the model where it is built")  # fmt: skip


def train_reference(job: Job) -> TrainResult:
    """The same job on one plain device with the whole batch at once, in this process: what every plan must reproduce."""
    torch.set_num_threads(1)  # one order of summation, and no spinning threads where cores are shared
    job = job.model_copy(update={"cluster": None, "log": None, "checkpoint": None})
    joined = dist.is_initialized()
    session = open_session(job)
    try:
        return _Run(job, session, ReferenceEngine(session.model.layers, session.model.loss), None).train()
    finally:
        if not joined:
            dist.destroy_process_group()


class _Run:
    """One run of the loop, on one rank."""

    def __init__(
        self, job: Job, session: Session, engine: PlanEngine | ReferenceEngine, plan: Plan | None
    ) -> None:
        self.job, self.session, self.engine, self.plan = job, session, engine, plan
        self.train_job = job.train
        self.parallel = engine if isinstance(engine, PlanEngine) else None
        self.world = self.parallel.world if self.parallel else session.world
        self.optimizer = optimizer_factory(job.train.optimizer)(list(engine.parameters()))
        self.scheduler = build_scheduler(job.train.scheduler, self.optimizer)
        self.sampler = EpochSampler(len(session.data.train), job.train.global_batch, seed=job.train.seed)  # type: ignore[arg-type]
        self.total = job.train.steps or job.train.epochs * self.sampler.batches_per_epoch  # type: ignore[operator]
        check_length(self.scheduler, self.total)
        self.result = TrainResult(plan=plan)
        self.saved: Saved | None = None
        if self.parallel is not None and job.checkpoint is not None:
            self.saved = Saved(job=job, section=job.checkpoint, engine=self.parallel, model=session.model.layers,
                               optimizer=self.optimizer, scheduler=self.scheduler, sampler=self.sampler)  # fmt: skip
        self._batches: list[int] = []
        self._log_seconds = 0.0
        self._stepped = False

    def train(self, predicted: Timeline | None = None) -> TrainResult:
        """All steps, then the evaluation. RunStopped where a signal asked for the end, after the step in which it did."""
        start = self._resume()
        self.result.first_step, self.result.predicted = start, predicted
        if self.world.is_main and predicted is not None and start < self.total:
            say(_outlook(self.total - start, predicted.step_seconds))
        if self.world.is_main and self.job.log is not None:
            trim_metrics(Path(self.job.log.folder) / METRICS_FILE, start)
        batches = self.sampler.forever()
        began = None
        with self._activity("training", self.total, done=start, lasting=True) as activity, StopRequest() as stop:
            if self.parallel is not None:
                self.parallel.steps, self.parallel.ask_to_stop = start, lambda: bool(stop)
            for step in range(start, self.total):
                now = time.perf_counter()
                if began is not None:
                    self.result.step_seconds.append(now - began - self._log_seconds)
                began, self._log_seconds = now, 0.0
                loss, norm = self._step(step, next(batches))
                if step == start + WARMUP_STEPS - 1 and self.parallel is not None:
                    for recorder in self.parallel.recorders:
                        recorder.pacer.overrun_seconds = 0.0
                self._after(step, loss, norm, activity)
                if self.parallel is not None and self.parallel.asked_to_stop:
                    raise RunStopped(stop.number or signal.SIGTERM, step + 1, resume())
        self._finish_timing(began)
        self.result.evaluation = self._evaluate()
        self._collect()
        return self.result

    def _finish_timing(self, began: float | None) -> None:
        self.world.barrier()
        if began is not None:
            self.result.step_seconds.append(time.perf_counter() - began - self._log_seconds)

    def _step(self, step: int, batch: torch.Tensor) -> tuple[float, float | None]:
        torch.manual_seed((self.train_job.seed + self.world.rank) * 1_000_003 + step)
        share = self._share(self.session.data.train, batch)
        loss, norm = self.engine.step(*share), None
        if self._goes_on(step + 1, loss, share):
            if self.train_job.clip_norm is not None:
                norm = self.engine.clip_grad_norm_(self.train_job.clip_norm)
            self._optimize()
        if self.scheduler is not None:
            self.scheduler.step()
        self.result.losses.append(loss)
        self._batches.append(len(batch))
        self.result.samples += len(batch)
        return loss, norm

    def _goes_on(self, step: int, loss: float, share: tuple[Tensors | None, Tensors | None]) -> bool:
        """Whether the optimizer takes this step; NonFiniteError where the run is to stop. The same on all ranks."""
        if self.parallel is None or self.parallel.finite or self.train_job.on_nonfinite == "ignore":
            return True
        what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        if self.train_job.on_nonfinite == "skip":
            if self.world.is_main:
                say(f"note: step {step} is left out: {what}", style="yellow")
            return False
        raise NonFiniteError(
            f"step {step}: {what}; the first number that is not finite is in {origin(self.parallel, *share)}; a smaller "
            "train.optimizer.lr or train.clip_norm may help; train.on_nonfinite: skip leaves such a step out"
        )

    def _share(self, dataset: Any, batch: torch.Tensor) -> tuple[Tensors | None, Tensors | None]:
        """This rank's inputs and targets of a global batch: the first stage's, the last stage's, both, or none."""
        if self.parallel is not None:
            assert self.plan is not None
            counts = [sum(sizes) for sizes in shares_for(self.plan, len(batch))]
            batch = replica_slices(batch, counts)[self.parallel.replica]
            if not (self.parallel.is_first or self.parallel.is_last) or len(batch) == 0:
                return None, None
        inputs, targets = fetch(dataset, batch)
        dtype = DTYPES[self.train_job.dtype]
        return as_dtype(inputs, dtype), as_dtype(targets, dtype)

    def _optimize(self) -> None:
        if self.parallel is None:
            self.optimizer.step()
            return
        for recorder in self.parallel.recorders:
            recorder.begin("optimizer")
        self.optimizer.step()
        for recorder in self.parallel.recorders:
            recorder.finish("optimizer", 0, 0)
        meter = self.parallel.recorders[0].meter  # of an emulated device, which has a process of its own
        if not self._stepped and meter is not None:
            state = sum(
                t.numel() * t.element_size()
                for s in self.optimizer.state.values()
                for t in s.values()
                if isinstance(t, torch.Tensor)
            )
            meter.add(state, "optimizer state")
        self._stepped = True

    def _after(self, step: int, loss: float, norm: float | None, activity: Activity) -> None:
        """Log, check and save; its time is not part of the step."""
        began, done = time.perf_counter(), step + 1
        log = self.job.log
        last = done == self.total
        due = last or (log is not None and done % log.every_steps == 0)
        whole = (
            self._batches[-1] == self.train_job.global_batch
        )  # a partial batch is no step to compare with the plan's
        if self.parallel is not None:
            if done % self.train_job.check_replicas_every == 0:
                self.parallel.sync.check_equal()
            if due and (whole or self.result.measured is None):
                self.result.measured = self._measured()
        if self.world.is_main and log is not None and due:
            self._write_line(Path(log.folder), done, loss, norm)
        stopping = self.parallel is not None and self.parallel.asked_to_stop
        if self.saved is not None and (last or stopping or done % self.saved.section.every_steps == 0):
            self.saved.save(done, loss)
        if self.world.is_main:
            activity.advance(progress_text(loss, self.result))
            if done - self.result.first_step == NOTED_STEP:
                self._note_difference()
        self._log_seconds = time.perf_counter() - began

    def _note_difference(self) -> None:
        predicted, measured = self.result.predicted, self.result.median_step_seconds
        if predicted is not None and measured > (1 + DIFFERENT) * predicted.step_seconds:
            times = f"{human_seconds(measured)}, predicted {human_seconds(predicted.step_seconds)}"
            say(
                f"note: a step takes {times}: the profile no longer holds, or other work keeps the machines busy; 'hetpipe "
                "profile' measures the devices and links as they are now",
                style="yellow",
            )

    def _write_line(self, folder: Path, done: int, loss: float, norm: float | None) -> None:
        line: dict[str, Any] = {
            "step": done,
            "epoch": self.sampler.epoch,
            "loss": number(loss),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        if norm is not None:
            line["grad_norm"] = number(norm)
        if self.result.step_seconds:
            line |= {
                "step_seconds": self.result.step_seconds[-1],
                "samples_per_second": self._batches[-2]
                / self.result.step_seconds[-1],  # both of the step before
            }
        if self.result.measured is not None:
            line["utilisation"] = {
                d: round(1 - b, 4) for d, b in self.result.measured.bubble_fraction().items()
            }
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _measured(self) -> Timeline:
        """The step just done, as it was: every rank's actions, in seconds since its step began. Collective."""
        assert self.parallel is not None and self.plan is not None
        spans = tuple(
            Span(
                device=d,
                replica=r,
                stage=s,
                kind=kind,
                microbatch=i if kind in "FB" else None,
                start=a,
                end=b,
            )
            for part in self.world.gather(self.parallel.spans())
            for d, r, s, kind, i, a, b in part
        )
        pipeline = max((s.end for s in spans if s.kind in "FB"), default=0.0)
        first = min((s.start for s in spans if s.kind == "optimizer"), default=pipeline)
        end = max((s.end for s in spans), default=0.0)
        return Timeline(
            spans=spans,
            step_seconds=end,
            pipeline_seconds=pipeline,
            sync_seconds=max(0.0, first - pipeline),
            optimizer_seconds=end - max(first, pipeline),
        )

    def _evaluate(self) -> Evaluation | None:
        """The test samples (as many as `evaluate_samples` says) in global batches: mean loss and, for classes, accuracy."""
        test, wanted = self.session.data.test, self.train_job.evaluate_samples
        count = self.result.test_samples = len(test) if test is not None else 0  # type: ignore[arg-type]
        if wanted != "all":
            count = min(count, EVALUATED_STEPS * self.train_job.global_batch if wanted is None else wanted)
        if count == 0:
            return None
        self.result.evaluated_samples = count
        metric = build_metric(self.session.model.loss)
        losses, weight, hits, counted = 0.0, 0.0, 0.0, 0.0
        batches = torch.split(torch.arange(count), self.train_job.global_batch)
        with self._activity("evaluating", len(batches)) as activity:
            for batch in batches:
                found = self.engine.evaluate(*self._share(test, batch), metric)
                losses, weight = losses + found.loss * found.weight, weight + found.weight
                hits, counted = hits + (found.metric or 0.0) * found.counted, counted + found.counted
                activity.advance(f"loss {losses / (weight or 1.0):.4f}")
        mean = hits / (counted or 1.0) if metric is not None else None
        return Evaluation(losses / (weight or 1.0), mean, weight, counted)

    def _collect(self) -> None:
        """Overruns and peak bytes of all ranks. Collective."""
        if self.parallel is None:
            return
        rows = [row for part in self.world.gather(self.parallel.usage()) for row in part]
        if not self.result.losses:
            return
        elapsed = max(sum(self.result.steady_seconds), 1e-9)
        self.result.overrun_fraction = max(row[2] for row in rows) / elapsed
        self.result.peak_bytes = {row[0]: row[1] for row in rows if row[1] is not None}

    def _resume(self) -> int:
        state = self.saved.restore(self.total) if self.saved is not None else None
        if state is None:
            return 0
        self.result.loss_before = state.loss
        return state.step

    def _activity(self, title: str, total: int, *, done: int = 0, lasting: bool = False) -> Activity:
        return Activity(title, total, done=done, lasting=lasting, shown=self.world.is_main)


def _outlook(steps: int, seconds: float) -> str:
    """How long a run is going to take."""
    text = f"{steps} steps of {human_seconds(seconds)} (predicted): about {duration(steps * seconds)}"
    return text + ("; --set train.steps=N trains fewer" if steps * seconds > 3600 else "")
