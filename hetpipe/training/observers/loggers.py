"""Curves in other tools: what `log.to` of a job names. Each gets the same numbers (`curves`) every `log.every_steps`, and those
of evaluations when they are made. All work without a network."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from hetpipe.files.messages import InputError, cut
from hetpipe.training.observers.observer import Observer
from hetpipe.training.observers.records import DriftRecord, EndRecord, EvaluationRecord, RunRecord, StepRecord

Curves = Mapping[str, float]


def curves(step: StepRecord, run: RunRecord) -> dict[str, float]:
    """The numbers of a step, by what tools call them; those that are not known, or no numbers, are left out."""
    found: dict[str, float | None] = {
        "train/loss": step.loss,
        "train/learning_rate": step.learning_rate,
        "train/grad_norm": step.grad_norm,
        "train/loss_scale": step.loss_scale,
        "train/epoch": step.epoch,
        "speed/step_seconds": step.step_seconds,
        "speed/predicted_step_seconds": run.predicted_step_seconds,
        "speed/samples_per_second": step.samples_per_second,
        "speed/tokens_per_second": step.tokens_per_second,
    }
    found |= {f"busy/{device}": share for device, share in step.utilisation.items()}
    found |= {f"memory_bytes/{device}": most for device, most in step.memory_bytes.items()}
    if step.memory_bytes:
        found |= {f"predicted_memory_bytes/{device}": most for device, most in run.predicted_bytes.items()}
    return _numbers(found)


def evaluation_curves(found: EvaluationRecord) -> dict[str, float]:
    """The numbers of an evaluation, likewise."""
    known = {"loss": found.loss, "accuracy": found.accuracy, "perplexity": found.perplexity}
    if found.metric is not None:
        known[found.metric] = found.value
    return _numbers({f"test/{name}": value for name, value in known.items()})


def _numbers(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


class Logger(Observer):
    """A tool that draws curves. `arguments`: what the job gives it beside its name."""

    name: ClassVar[str]  # as jobs call it
    package: ClassVar[str]  # what is imported
    install: ClassVar[str]  # what installs it

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.tool = self._imported()

    def _imported(self) -> Any:
        try:
            return import_module(self.package)
        except ImportError as error:
            raise InputError(
                f"log.to names {type(self).name}, which needs a package that cannot be imported ({cut(str(error))}): "
                f"pip install {self.install}"
            ) from None

    def began(self, run: RunRecord) -> None:
        """Open the tool."""
        assert run.job.log is not None
        self._run, self._every, self._total = run, run.job.log.every_steps, run.total_steps
        try:
            self._open(run, Path(run.job.log.folder))
        except InputError:
            raise
        except Exception as error:  # whatever the package does
            told = f"{type(error).__name__}: {cut(str(error))}"
            raise InputError(f"log.to: {self.name} cannot begin with {self.arguments}: {told}") from error

    def stepped(self, step: StepRecord) -> None:
        """The numbers of a step, where they are due."""
        if step.step == self._total or step.step % self._every == 0:
            self._write(step.step, curves(step, self._run))

    def drifted(self, drift: DriftRecord) -> None:
        """How many times as long as before devices compute."""
        self._write(drift.step, {f"drift/{device}": factor for device, factor in drift.factors.items()})

    def evaluated(self, evaluation: EvaluationRecord) -> None:
        """The numbers of an evaluation."""
        self._write(evaluation.step, evaluation_curves(evaluation))

    def ended(self, end: EndRecord) -> None:
        """Close the tool."""
        self._close(failed=end.error is not None)

    @abstractmethod
    def _open(self, run: RunRecord, folder: Path) -> None:
        """`folder`: that of the log."""

    @abstractmethod
    def _write(self, step: int, numbers: Curves) -> None: ...

    @abstractmethod
    def _close(self, *, failed: bool) -> None: ...


def facts(run: RunRecord) -> dict[str, Any]:
    """What a tool shows as the run's configuration: the job, and the plan in short."""
    job: dict[str, Any] = run.job.model_dump(mode="json", exclude_none=True)
    return {**job, "plan_replicas": len(run.plan.replicas), "plan_devices": list(run.plan.device_ids)}


class TensorBoard(Logger):
    """Event files in the folder `tensorboard` of the log, by torch's writer. TensorBoard leaves out what an earlier run wrote of
    steps that a run which resumes trains again (`purge_step`)."""

    name, package, install = "tensorboard", "torch.utils.tensorboard", "tensorboard"

    def _open(self, run: RunRecord, folder: Path) -> None:
        given = {"log_dir": str(folder / "tensorboard"), "purge_step": run.told + 1, **self.arguments}
        self._writer = self.tool.SummaryWriter(**given)
        self._writer.add_text("job", f"```\n{run.job.model_dump_json(indent=1, exclude_none=True)}\n```", run.first_step)

    def _write(self, step: int, numbers: Curves) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _close(self, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Logger):
    """A run of Weights & Biases. Where nobody has logged in, and WANDB_MODE says nothing else, it is an offline run in the log's
    folder, which `wandb sync` uploads later. A run that resumes is a new one of the same group."""

    name, package, install = "wandb", "wandb", "wandb"

    def _open(self, run: RunRecord, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or (None if self._has_key() else "offline")
        given = {"project": "hetpipe", "group": folder.name, "dir": str(folder), "mode": mode, "config": facts(run)}
        self._session = self.tool.init(**{**given, **self.arguments})

    def _has_key(self) -> bool:
        return bool(os.environ.get("WANDB_API_KEY") or getattr(getattr(self.tool, "api", None), "api_key", None))

    def _write(self, step: int, numbers: Curves) -> None:
        self._session.log(dict(numbers), step=step)

    def _close(self, *, failed: bool) -> None:
        self._session.finish(exit_code=1 if failed else 0)


class Trackio(Logger):
    """A run of Trackio, whose calls are those of Weights & Biases, on this machine."""

    name, package, install = "trackio", "trackio", "trackio"

    def _open(self, run: RunRecord, folder: Path) -> None:
        self._session = self.tool.init(**{"project": "hetpipe", "name": folder.name, "config": facts(run), **self.arguments})

    def _write(self, step: int, numbers: Curves) -> None:
        self._session.log(dict(numbers), step=step)

    def _close(self, *, failed: bool) -> None:
        self._session.finish()


class MLflow(Logger):
    """A run of MLflow: at MLFLOW_TRACKING_URI, else in the folder `mlflow` of the log. A run that resumes is a new one."""

    name, package, install = "mlflow", "mlflow", "mlflow-skinny"

    def _open(self, run: RunRecord, folder: Path) -> None:
        given = {"experiment": "hetpipe", "run_name": folder.name, **self.arguments}
        if "MLFLOW_TRACKING_URI" not in os.environ and "tracking_uri" not in given:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            given["tracking_uri"] = (folder / "mlflow").resolve().as_uri()
        self._client = self.tool.MlflowClient(tracking_uri=given.get("tracking_uri"))
        known = self._client.get_experiment_by_name(given["experiment"])
        experiment = known.experiment_id if known is not None else self._client.create_experiment(given["experiment"])
        self._id = self._client.create_run(experiment, run_name=given["run_name"]).info.run_id
        for key, value in facts(run).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def _write(self, step: int, numbers: Curves) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._id, name, value, step=step)

    def _close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


LOGGERS: dict[str, type[Logger]] = {each.name: each for each in (TensorBoard, WeightsAndBiases, MLflow, Trackio)}
