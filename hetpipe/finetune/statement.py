"""What a run will do, with which devices, in which time; and what equal data parallelism, or one device, would do instead."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hetpipe.building.feed import sampler_of
from hetpipe.checkpoints.checkpoint import list_checkpoints
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan
from hetpipe.show.report import plan_text
from hetpipe.study.make import make_study
from hetpipe.training.session import Session

EQUAL = "even-data-parallel"  # of one device, too: the whole model on it


@dataclass(frozen=True, kw_only=True)
class Instead:
    """Another way to train the same: seconds of a step, or why there are none: it needs more bytes than a device has, or a reason
    in words."""

    name: str
    seconds: float | None = None
    needs_bytes: int | None = None
    has_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The most bytes on a device, and its memory."""

    device: str
    kind: str
    bytes: int
    of_bytes: int


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What is said before training begins. `first_step`: of these steps, so many are done. `step_seconds` are those of the mean
    step where they differ (`steps_differ`), since samples have other lengths."""

    cards: tuple[str, ...]
    parameters: int
    trained: int
    data: str
    precision: str
    base: str
    plan: str
    memory: tuple[Held, ...]
    steps: int
    first_step: int
    step_seconds: float
    steps_differ: bool
    instead: tuple[Instead, ...]

    @property
    def seconds(self) -> float:
        """Of all steps that are left, as predicted."""
        return (self.steps - self.first_step) * self.step_seconds

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "seconds": self.seconds}


def make_statement(session: Session, plan: Plan, profile: Profile, data: str) -> Statement:
    """Of a plan that is to be trained, on the rank that knows all of it; `data` in words. It plans by simple rules."""
    job, cluster = session.job, session.cluster
    study = make_study(plan, profile=profile, cluster=cluster, rules=())
    assert study.predicted is not None
    assert study.problem is not None
    peaks = study.predicted.peak_bytes
    parameters, trained = parameters_of(session.model.layers)
    steps = sampler_of(session.data.train, job.train)[1]
    done = list_checkpoints(job.checkpoint.folder) if job.checkpoint is not None else []
    return Statement(
        cards=tuple(_cards(cluster)),
        parameters=parameters,
        trained=trained,
        data=data,
        precision=_precision(job, plan),
        base=job.adapter.base if job.adapter is not None else "",
        plan=plan_text(study.scene),
        memory=tuple(
            Held(device=device, kind=cluster.device(device).type, bytes=peaks[device], of_bytes=cluster.type_of(device).memory)
            for device in plan.device_ids
            if device in peaks
        ),
        steps=steps,
        first_step=min(steps, int(done[-1].name.removeprefix("step-"))) if done else 0,
        step_seconds=study.predicted.step_seconds,
        steps_differ=bool(profile.lengths),
        instead=tuple(others(*study.problem, plan.global_batch)),
    )


def _cards(cluster: Cluster) -> list[str]:
    """`2 × 1080ti (n0)`, a line for each type on each node, and whether it is emulated."""
    found = []
    for node in cluster.nodes:
        for kind, count in node.devices.items():
            played = ", emulated" if cluster.device_types[kind].emulate is not None else ""
            found.append(f"{f'{count} × ' if count > 1 else ''}{kind} on {node.name}{played}")
    return found


def parameters_of(layers: nn.Module) -> tuple[int, int]:
    """How many numbers the model has, and how many of them train; what it shares counts once."""
    every = list(layers.parameters())
    packed = sum(module.in_features * module.out_features for module in layers.modules() if isinstance(module, QuantisedLinear))
    return sum(p.numel() for p in every) + packed, sum(p.numel() for p in every if p.requires_grad)


def _precision(job: Job, plan: Plan) -> str:
    """`bf16 on 3090, fp16 on 1080ti`."""
    if plan.precision and len(set(plan.precision.values())) > 1:
        return ", ".join(f"{precision} on {kind}" for kind, precision in plan.precision.items())
    return next(iter((plan.precision or {}).values()), {"float32": "fp32"}.get(job.train.dtype, job.train.dtype))


def others(profile: Profile, cluster: Cluster, batch: int) -> list[Instead]:
    """The whole model on every device, with equal shares; and on one device of each type alone. `profile` at the plan's
    precision, `cluster` with its links."""
    found = [_planned("equal data parallel", profile, cluster, batch)] if cluster.device_count > 1 else []
    kinds = Counter(device.type for device in cluster.devices)
    for kind in kinds if cluster.device_count > 1 else ():
        node = next(node for node in cluster.nodes if kind in node.devices)
        alone = cluster.with_nodes([node.model_copy(update={"devices": {kind: 1}})])
        found.append(_planned(f"{'one ' if kinds[kind] > 1 else ''}{kind} alone", profile, alone, batch))
    return found


def _planned(name: str, profile: Profile, cluster: Cluster, batch: int) -> Instead:
    try:
        plan = make_plan(profile, cluster, batch, partitioner=EQUAL)
    except (PartitionError, InputError) as error:
        needs, missing = getattr(error, "needed_bytes", None), getattr(error, "missing_bytes", None)
        if needs is not None and missing is not None:
            return Instead(name=name, needs_bytes=needs, has_bytes=needs - missing)
        return Instead(name=name, reason=str(error))
    assert plan.predicted is not None
    return Instead(name=name, seconds=plan.predicted.step_seconds)
