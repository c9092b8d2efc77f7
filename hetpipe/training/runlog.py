"""What a run leaves: its result, and the files of its log folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from hetpipe.checkpoints.best import SavedBest
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.documents.profiles.lengths import LengthFactor, length_factor
from hetpipe.documents.sections.log import LOSS_FILE, METRICS_FILE, PLAN_FILE, PROFILE_FILE, REPORT_FILE, SUMMARY_FILE, TRACE_FILE
from hetpipe.files.folders import claimed
from hetpipe.files.messages import cut
from hetpipe.files.writing import write_text
from hetpipe.predict.timeline import Timeline
from hetpipe.processes.progress import warn
from hetpipe.processes.world import World
from hetpipe.runtime.base import Evaluation
from hetpipe.show.page.report import report_page
from hetpipe.show.picture.loss import RunCurve, loss_canvas
from hetpipe.show.trace import save_trace
from hetpipe.study.make import make_study
from hetpipe.training.observers.records import EvaluationRecord

WARMUP_STEPS = 2
Number = TypeVar("Number", int, float)


@dataclass(kw_only=True)
class TrainResult:
    """What a run came to. `step_seconds` are wall times of whole steps on the main rank; `overrun_fraction` is above 0.01 where
    an emulated device was too slow for its emulated speed, which makes timings invalid; `loss_before` is the last loss of the run
    that was resumed. `step_numbers`: how many numbers a sample of each step has (left out: all as many), by which steps differ as
    the profile's `lengths` say. `best`: which evaluation was, where they were compared while the run went on. `exported`: where
    its weights are, and of which step (`exported_step`). `seen`: the cluster and profile by which its last steps were predicted,
    if these are not the run's."""

    plan: Plan | None
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    samples: int = 0
    first_step: int = 0
    loss_before: float | None = None
    evaluation: Evaluation | None = None
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    best: SavedBest | None = None
    measured: Timeline | None = None
    predicted: Timeline | None = None
    overrun_fraction: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    step_numbers: list[int] = field(default_factory=list)
    lengths: Sequence[LengthFactor] = ()
    exported: Path | None = None
    exported_step: int | None = None
    seen: tuple[Cluster, Profile] | None = None

    @property
    def usual_step_seconds(self) -> float:
        """Return the seconds of a usual step: the median of the steady steps; where the lengths of samples differ from
        step to step, the mean, in which each step counts as the median of its length."""
        alike: dict[int, list[float]] = {}
        for numbers, seconds in zip(self.steady_numbers, self.steady_seconds, strict=True):
            alike.setdefault(numbers, []).append(seconds)
        return sum(len(times) * median(times) for times in alike.values()) / max(1, len(self.steady_seconds))

    @property
    def predicted_step_seconds(self) -> float | None:
        """What was predicted of the same steps; None where nothing was."""
        if self.predicted is None:
            return None
        factors = [length_factor(self.lengths, numbers) for numbers in self.steady_numbers]
        return self.predicted.step_seconds * (fmean(factors) if factors else 1.0)

    @property
    def steady_numbers(self) -> list[int]:
        """Return how many numbers a sample has in each of the steady steps."""
        return _steady(self.step_numbers[: len(self.step_seconds)] or [0] * len(self.step_seconds))

    @property
    def steady_seconds(self) -> list[float]:
        """Steps after the warm-up (allocations, first messages), where there are more."""
        return _steady(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """Whole global batches per usual step."""
        batch = self.plan.global_batch if self.plan is not None else self.samples / max(1, len(self.losses))
        return batch / self.usual_step_seconds if self.step_seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """The result as plain numbers."""
        losses = [number(loss) for loss in self.losses]
        found: dict[str, Any] = {
            "steps": self.first_step + len(losses),
            "samples": self.samples,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else self.loss_before,
            "measured_step_seconds": self.usual_step_seconds,
            "samples_per_second": self.samples_per_second,
            "overrun_fraction": self.overrun_fraction,
            "losses": losses,
        }
        if self.predicted is not None:
            found["predicted_step_seconds"] = self.predicted_step_seconds
        if self.evaluations:
            found |= evaluation_keys(self.evaluations[-1])
        if self.best is not None:
            found["best"] = {"step": self.best.step, self.best.metric: self.best.value}
        if self.exported is not None:
            found |= {"exported": str(self.exported), "exported_step": self.exported_step}
        if self.measured is not None:
            found["peak_bytes"] = self.peak_bytes
            if self.predicted is not None:
                found["predicted_peak_bytes"] = dict(self.predicted.peak_bytes)
            found["utilisation"] = {d: 1 - b for d, b in self.measured.bubble_fraction().items()}
        return found


def evaluation_keys(found: EvaluationRecord) -> dict[str, Any]:
    """An evaluation as it stands in summary.json and metrics.jsonl."""
    keys: dict[str, Any] = {"test_loss": number(found.loss), "test_accuracy": found.accuracy, "test_samples": found.samples}
    if found.perplexity is not None:
        keys["test_perplexity"] = found.perplexity
    if found.metric is not None:
        keys[f"test_{found.metric}"] = number(found.value) if found.value is not None else None
    return keys


def _steady(steps: list[Number]) -> list[Number]:
    return steps[WARMUP_STEPS:] or steps


def curve_of(job: Job, result: TrainResult, folder: Path) -> RunCurve:
    """How the loss of a run went: of the steps before it was resumed, as its log has them."""
    first, (before, tests) = result.first_step, _logged(folder / METRICS_FILE)
    args, adapter, data = job.data.args, job.adapter, job.data.label
    if adapter is not None:
        named = adapter.weights or f"LoRA of rank {adapter.r}, alpha {adapter.alpha:g}, beside a base held {adapter.base}"
    if (files := args.get("file") or args.get("files")) is not None:
        data += f" of {files if isinstance(files, str) else ', '.join(map(str, files))}"
    own = {record.step: record.loss for record in result.evaluations}
    return RunCurve(
        model=str(job.model.args.get("weights") or job.model.label),
        data=data,
        adapter=named if adapter is not None else "",
        trained=[*(point for point in before if point[0] <= first), *enumerate(result.losses, first + 1)],
        evaluated=sorted({**dict(tests), **own}.items()),
        best=result.best.step if result.best is not None else None,
    )


def _logged(file: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, loss) of the steps and of the evaluations that a log has."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    every = [(int(line["step"]), line.get("loss"), line.get("test_loss")) for line in lines]
    return [(at, loss) for at, loss, _ in every if loss is not None], [(at, loss) for at, _, loss in every if loss is not None]


def steady_median(seconds: list[float]) -> float:
    """Of the times of a run's steps, those after the warm-up where there are more; 0 of none."""
    return median(_steady(seconds)) if seconds else 0.0


def number(value: float) -> float | None:
    """The value as JSON has it: None where it is infinite or no number."""
    return value if math.isfinite(value) else None


@contextmanager
def claim(job: Job, world: World) -> Iterator[None]:
    """The job's folders for this run alone (see `folders.claimed`): by the main rank, what it hears all hear. Collective."""
    sections = {"checkpoint.folder": job.checkpoint, "log.folder": job.log}
    folders = {key: section.folder for key, section in sections.items() if section is not None}
    with ExitStack() as stack:
        world.on_main(lambda: stack.enter_context(claimed(folders)))
        yield


def write_folder(folder: Path, plan: Plan, profile: Profile, result: TrainResult) -> None:
    """plan.json, profile.json, summary.json and trace.json (predicted beside measured)."""
    plan.save(folder / PLAN_FILE)
    profile.save(folder / PROFILE_FILE)
    write_text(folder / SUMMARY_FILE, json.dumps(result.summary(), indent=1) + "\n")
    timelines = {name: t for name, t in (("predicted", result.predicted), ("measured", result.measured)) if t is not None}
    save_trace(folder / TRACE_FILE, timelines)


def write_report(
    folder: Path,
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    measured: Timeline | None,
    run: Callable[[], RunCurve | None] = lambda: None,
) -> None:
    """report.html and loss.svg: how the loss of the `run` went; the plan, what was measured beside what was predicted, and the
    equal split; only what takes no search. The run is over and all else written: whatever fails here is told, and no fault of
    the run."""
    try:
        curve = run()
        if curve is not None and curve.points:
            write_text(folder / LOSS_FILE, loss_canvas(curve).to_svg())
        study = make_study(plan, profile=profile, cluster=cluster, measured=measured)
        write_text(folder / REPORT_FILE, report_page(study, curve))
    except Exception as error:
        warn(f"no report in {folder}: {type(error).__name__}: {cut(str(error))}")
