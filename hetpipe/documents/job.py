"""The job file: what to train, on what, how; and `--set key=value`, which changes it from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.guesses import KeysOf
from hetpipe.documents.number_types import TYPE_OF, Frozen, Held
from hetpipe.documents.options import PlanOptions, PlanRules
from hetpipe.documents.plan import Plan
from hetpipe.documents.precisions import PrecisionChoice, in_job, known_precision, turns
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.adapter import AdapterSection
from hetpipe.documents.sections.elastic import ElasticSection
from hetpipe.documents.sections.evaluate import EvaluateSection
from hetpipe.documents.sections.export import ExportSection
from hetpipe.documents.sections.log import LOG_FILES, LogSection
from hetpipe.documents.sections.loss import LossSection
from hetpipe.documents.sections.named import Named
from hetpipe.documents.sections.numbers import ArithmeticSection, LossScaleSection
from hetpipe.documents.sections.torch_named import SchedulerSection, TorchNamed
from hetpipe.files.formats import (
    Count,
    DeviceCount,
    Document,
    Flag,
    Name,
    Number,
    Positive,
    Samples,
    Seed,
    Strict,
    read_mapping,
    read_yaml,
)
from hetpipe.files.limits import MOST_WORKERS
from hetpipe.files.messages import InputError, shown
from hetpipe.files.writing import check_folder, check_output

BatchNorm = Literal["per_microbatch", "deferred"]
CoupledLayers = Literal["per_microbatch"]


class ModelSection(Named):
    """The model; `batch_norm: per_microbatch` accepts that BatchNorm normalises each micro-batch by itself, `deferred` that its
    running statistics are then those of the whole batch; `coupled_layers: per_microbatch` accepts that to layers that couple
    samples, or keep state, each micro-batch is a batch of its own. `tensor_parallel` says how modules are split where a plan
    splits a stage over several devices: their names, in which `*` stands for anything, and styles (`colwise`, `rowwise`, …)."""

    guesses = KeysOf("model")
    batch_norm: BatchNorm | None = None
    coupled_layers: CoupledLayers | None = None
    tensor_parallel: dict[str, str] | None = None


Workers = Annotated[int, Field(strict=True, ge=0, le=MOST_WORKERS)]


class DataSection(Named):
    """The data. So many `workers`, processes of each rank that reads samples, read them ahead of the step (0: the rank itself
    reads them, when the step begins)."""

    guesses = KeysOf("data")
    workers: Workers = 0


class PlanSection(PlanRules):
    """How to plan, or which plan `file` to use. (What devices compute in is said by `train.precision`.)"""

    guesses = KeysOf("plan")
    file: Name | None = None


# Keys of `train` that earlier versions had, with the one value that says what is done today.
GONE: dict[str, Any] = {"gradient_sums": "exact"}


class TrainSection(Strict):
    """The loop: `steps`, or `epochs` of the data. Afterwards the loss of `evaluate_samples` of the test samples is measured
    (by default as many as a few steps train). `on_nonfinite`: what a step does whose loss, or gradient, is infinite or no number:
    it ends the run, is left out, or is taken like any other.

    `precision` (of parameters in float32) is what matrix products are computed in, by torch's autocast: one for all devices, one
    for each device type (float32 for those that are not named), or "auto", on each type the fastest that is safe. Where a device
    computes in fp16, the loss is scaled by `loss_scale`, and a step whose gradients overflow is left out. `frozen_dtype`: in what
    matrices of parameters are held that do not train (vectors, as those of norms, stay as they are), where all devices compute in
    half precision. `arithmetic`: the flags of the cards' products."""

    guesses = KeysOf("train")
    global_batch: Samples
    steps: Positive | None = None
    epochs: Positive | None = None
    optimizer: TorchNamed = TorchNamed(name="AdamW")
    scheduler: SchedulerSection | None = None
    clip_norm: Annotated[Number, Field(gt=0)] | None = None
    seed: Seed = 0
    dtype: Held = "float32"
    precision: PrecisionChoice | None = None
    frozen_dtype: Frozen = "float32"
    arithmetic: ArithmeticSection = ArithmeticSection()
    loss_scale: LossScaleSection = LossScaleSection()
    evaluate_samples: Count | Literal["all"] | None = None
    check_replicas_every: Positive = 100
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"

    @model_validator(mode="after")
    def _length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either 'steps' or 'epochs', and not both")
        return self

    _known_precision = model_validator(mode="before")(known_precision)

    @model_validator(mode="before")
    @classmethod
    def _without_gone_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key not in GONE or value != GONE[key]}

    @model_validator(mode="after")
    def _one_type(self) -> Self:
        if self.frozen_dtype != "float32" and (self.dtype != "float32" or self.precision in (None, "fp32")):
            raise ValueError(
                f"frozen_dtype is {self.frozen_dtype}, which needs parameters in float32 and devices that compute in half "
                "precision. "
                "Write 'train: {dtype: float32, precision: bf16}', or fp16, with it"
            )
        if self.precision is not None and self.dtype != "float32":
            raise ValueError(
                f"precision is {shown(self.precision)}, which needs parameters in float32, but dtype, the type of the "
                f"parameters, is {self.dtype}. Leave one of the two out"
            )
        return self


class CheckpointSection(Strict):
    """Where and how often to save; training resumes from the newest checkpoint there unless `resume` is false. Each process keeps
    a copy in host memory of what it saves, which is written beside the steps that follow; with `wait` there is no copy, and the
    steps wait until all is written."""

    guesses = KeysOf("checkpoint")
    folder: Name
    every_steps: Positive = 100
    keep: Positive = 3
    resume: Flag = True
    wait: Flag = False


class ProfileSection(Strict):
    """How to measure: micro-batch sizes (1 is always one of them) and repeats; `tensor_parallel`: also layers that are split over
    so many devices of a node, so that plans may have such stages. (At which precisions: `train.precision`.)"""

    guesses = KeysOf("profiler")
    microbatch_sizes: tuple[Samples, ...] = (1, 2, 4, 8)
    repeats: Positive = 5
    tensor_parallel: tuple[Annotated[DeviceCount, Field(ge=2)], ...] = ()
    cache: Name | None = None


class Job(Document):
    """One training run. `rebalance: auto`: when devices become slower or faster, the run plans again, and moves layers where the
    steps that are left repay that; `off`: it only says so."""

    guesses = KeysOf("job")
    format: Literal["hetpipe.job/1"]
    model: ModelSection
    adapter: AdapterSection | None = None
    data: DataSection
    loss: LossSection = LossSection(name="cross_entropy")
    cluster: Name | None = None
    profile: Name | None = None
    profiler: ProfileSection = ProfileSection()
    plan: PlanSection = PlanSection()
    train: TrainSection
    evaluate: EvaluateSection | None = None
    checkpoint: CheckpointSection | None = None
    elastic: ElasticSection | None = None
    rebalance: Literal["off", "auto"] = "off"
    log: LogSection | None = None
    export: ExportSection | None = None

    @model_validator(mode="after")
    def _exports_what_is_saved(self) -> Self:
        if self.export is not None and self.checkpoint is None:
            raise ValueError(
                "export writes the weights of the newest checkpoint, but the job saves none. Write 'checkpoint: "
                "{folder: checkpoints/NAME}', too"
            )
        if self.export is not None and self.export.merge and self.adapter is None:
            raise ValueError("export.merge adds adapters to the model, but there is no section 'adapter'. Leave export.merge out")
        return self

    @model_validator(mode="after")
    def _goes_on_from_somewhere(self) -> Self:
        if self.elastic is not None and self.checkpoint is None:
            raise ValueError(
                "elastic lets a run go on without devices that it has lost, from what is in its folder of checkpoints, but "
                "the job saves none. Write 'checkpoint: {folder: checkpoints/NAME}', too"
            )
        return self

    @model_validator(mode="after")
    def _has_a_process_for_each_device(self) -> Self:
        wanted = {"elastic": self.elastic is not None, "rebalance: auto": self.rebalance == "auto"}
        if self.plan.backend != "torch" and (key := next((key for key, there in wanted.items() if there), None)) is not None:
            raise ValueError(
                f"{key} needs a process for each device, and with plan.backend {self.plan.backend} one process drives a replica. "
                "Leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_once(self) -> Self:
        if self.evaluate is not None and self.train.evaluate_samples is not None:
            raise ValueError(
                "train.evaluate_samples and evaluate.samples both say how many samples are measured: leave the first out"
            )
        return self

    @model_validator(mode="after")
    def _base_is_computed(self) -> Self:
        base = self.adapter.base if self.adapter is not None else "as-is"
        if base not in ("bf16", "fp16"):
            return self
        if self.train.frozen_dtype != "float32":
            raise ValueError(
                f"adapter.base ({base}) and train.frozen_dtype ({self.train.frozen_dtype}) both set the type of the "
                "model's own matrices. Leave one of the two out"
            )
        if self.train.dtype != "float32" or self.train.precision in (None, "fp32"):
            raise ValueError(
                f"adapter.base is {base}, which needs adapters in float32 and devices that compute in half precision. "
                "Write 'train: {dtype: float32, precision: bf16}', or fp16, with it"
            )
        return self

    @property
    def frozen_dtype(self) -> Frozen:
        """In what matrices are held that do not train."""
        base = self.adapter.base if self.adapter is not None else "as-is"
        return TYPE_OF[base] if base in ("bf16", "fp16") else self.train.frozen_dtype  # type: ignore[return-value]

    @property
    def planning(self) -> PlanOptions:
        """How to plan for what the job trains in."""
        return PlanOptions(**{name: getattr(self.plan, name) for name in PlanRules.model_fields}, precision=self.train.precision)

    @classmethod
    def read(cls, path: str | Path, settings: Sequence[str] = ()) -> Job:
        """The job of a file, changed by `key.key=value` settings (values are YAML). Relative paths of cluster, profile and plan
        are looked up from the current folder, then from the job file's."""
        data = read_mapping(path)
        if isinstance(data, Mapping):
            data = apply_settings(dict(data), settings)
        job = cls.parse(data, str(path))
        base = Path(path).resolve().parent
        found = {
            "cluster": _locate(job.cluster, base),
            "profile": _locate(job.profile, base),
            "plan": job.plan.model_copy(update={"file": _locate(job.plan.file, base)}),
        }
        return job.model_copy(update=found)

    def with_log(self, file: str | Path) -> Job:
        """The job with a log: if it names no folder for that, in one in `runs` that is called like the job's file and the folder
        that it is named in, as runs/first-job of first/job.yaml."""
        if self.log is not None:
            return self
        named = [part for part in Path(file).with_suffix("").parts if part not in ("/", "..")]
        return self.model_copy(update={"log": LogSection(folder=str(Path("runs") / "-".join(named[-2:])))})

    def check_files(self) -> Cluster | None:
        """Read the cluster, profile and plan files and compare them, so that a fault is found before anything starts. The cluster
        with the profile's links, where both are files."""
        cluster, joined = self.read_cluster(), None
        profile = Profile.load(self.profile) if self.profile is not None else None
        plan = Plan.load(self.plan.file) if self.plan.file is not None else None
        if cluster is not None and profile is not None:
            joined = profile.joined(cluster)
            planned = plan.precision if plan is not None else None  # of the types that it uses
            asked = {k: p for k, p in planned.items() if k in joined.device_types} if planned else self.train.precision
            profile = profile.at(turns(in_job(asked, profile, joined), profile, joined)[0])
            profile.check(joined)
        if plan is not None:
            plan.check(cluster=cluster, profile=profile, global_batch=self.train.global_batch, source=str(self.plan.file))
        return joined

    def check_folders(self) -> None:
        """InputError if the log, the checkpoints or what is exported could not be written."""
        if self.checkpoint is not None:
            check_folder(self.checkpoint.folder)
        self.export_place()
        if self.log is not None:
            check_folder(self.log.folder)
            for name in LOG_FILES:
                check_output(Path(self.log.folder) / name)

    def export_place(self) -> Path | None:
        """Return where the weights go (see `ExportSection.place`); None where they are not exported."""
        own = [section.folder for section in (self.checkpoint, self.log) if section is not None]
        return self.export.place(*own) if self.export is not None else None

    def read_cluster(self) -> Cluster | None:
        """The cluster file's content; None where the job names none."""
        return Cluster.load(self.cluster) if self.cluster is not None else None


def _locate(name: str | None, base: Path) -> str | None:
    if name is None or os.path.exists(name) or not os.path.exists(base / name):
        return name
    return str(base / name)


def apply_settings(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`data` with each "a.b=value" put in its place; the values are read as YAML, an empty one as null."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read the setting {shown(setting)}. Write key=value, for example train.steps=50")
        value = read_yaml(text, f"the value of the setting {shown(setting)}")
        *path, last = key.split(".")
        place = data
        for part in path:
            inner = place.get(part)
            if inner is not None and not isinstance(inner, dict):
                raise InputError(
                    f"the setting {shown(setting)} sets a key of {shown(part)}, which is {shown(inner)} and has no keys"
                )
            place[part] = dict(inner) if inner is not None else {}
            place = place[part]
        place[last] = value
    return data
