"""The one way from a model, of a job or of one's own, to an engine that has joined the others: meet, prepare (measure, plan),
join. The same on one machine and under torchrun."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hetpipe.building.build import build_data, build_model, check_training
from hetpipe.building.content import Content, same_content
from hetpipe.building.datasets import DataSplits
from hetpipe.checkpoints.origin.base import check_begun, going_on
from hetpipe.checkpoints.origin.revision import check_same_revision
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job, ProfileSection
from hetpipe.documents.number_types import AS_BUILT, NumberType, NumberTypes
from hetpipe.documents.options import PlanOptions
from hetpipe.documents.plan import Backend, Plan
from hetpipe.documents.precisions import HeldTypes, decide, in_job, without_full
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.torch_named import TorchNamed
from hetpipe.files.formats import Document, flat
from hetpipe.files.messages import InputError
from hetpipe.hf.replay.rows import refuse_unseen
from hetpipe.layers.device import Emulation, module_bytes, torch_device, trained_bytes
from hetpipe.layers.model import Model, named_layers
from hetpipe.layers.numbers import frozen_low, stays, type_name
from hetpipe.measuring.cache import home_of, measured, note_arithmetic
from hetpipe.measuring.discover import as_it_is, cards, discover_cluster, note_missing_gpus, one_type_again, there, with_own_types
from hetpipe.measuring.measure import least_degree
from hetpipe.planning.partition import PartitionError
from hetpipe.planning.planner import make_plan, note_of_precisions
from hetpipe.predict.compiled import compile_when_idle
from hetpipe.predict.cost import Costs
from hetpipe.processes.arithmetic import arithmetic
from hetpipe.processes.environment import left_out
from hetpipe.processes.peers.others import showing_others
from hetpipe.processes.progress import Activity, say, warn
from hetpipe.processes.whereabouts import describe_with
from hetpipe.processes.world import World, connect, create_world
from hetpipe.runtime.backends import LOADING, check_backend, check_cluster, drives_a_replica, open_engine, seat
from hetpipe.runtime.plan_engine import PlanEngine


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Who trains what where: all that measuring, planning and joining need. `found`: no file declares the cluster. `seed`: of
    what layers draw. `held`: the number type of parameters; None, as the model was built."""

    world: World
    cluster: Cluster
    model: Model
    found: bool = False
    seed: int = 0
    held: NumberType | None = None

    def types(self, plan: Plan, device: str) -> NumberTypes:
        """In which number types a device trains by this plan."""
        precision = (plan.precision or {}).get(self.cluster.device(device).type)
        if precision is not None:
            return NumberTypes.at(precision)
        return AS_BUILT if self.held is None else NumberTypes.of(self.held)

    @property
    def held_types(self) -> HeldTypes:
        """In which number types the model holds its parameters."""
        low = frozenset(frozen_low(self.model.layers))
        if self.held is not None:
            return HeldTypes(frozenset((self.held,)), low, said=True)
        built = {type_name(p.dtype) for p in self.model.layers.parameters() if p.is_floating_point() and not stays(p)}
        return HeldTypes(frozenset(built) - low, low)

    def decided(self, plan: Plan, options: PlanOptions, profile: Profile | None = None) -> Plan:
        """The plan with what its devices compute in (see `decide`)."""
        precision = decide(options.precision, plan, profile, self.cluster, self.held_types)
        return plan.model_copy(update={"precision": precision})


@dataclass(frozen=True, kw_only=True)
class Session(Setting):
    """A running job on this rank, before planning: everything that does not depend on the plan. `content`: what is in its data;
    `evaluated`: what is in the samples that do not train (None: there are none, or they are not compared). `job` has adapters
    that began in a folder as a checkpoint has them by now."""

    job: Job
    data: DataSplits
    content: Content
    evaluated: Content | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan for, and how to measure. `profile` and `plan` are files that are used instead; where devices of that plan are
    gone, an `elastic` run plans anew."""

    global_batch: int
    options: PlanOptions
    profiler: ProfileSection
    optimizer: TorchNamed
    profile: str | None = None
    plan: str | None = None
    elastic: bool = False

    @classmethod
    def by(cls, job: Job) -> Request:
        """What a job wants."""
        return cls(
            global_batch=job.train.global_batch,
            options=job.planning,
            profiler=job.profiler,
            optimizer=job.train.optimizer,
            profile=job.profile,
            plan=job.plan.file,
            elastic=job.elastic is not None,
        )

    def measuring(self, plan: Plan | None) -> Request:
        """The same, with what is to be measured for a plan of one's own, which must be predicted, too."""
        precision = (plan.precision if plan is not None else None) or self.options.precision
        widths = {len(stage.devices) for r in plan.replicas for stage in r.stages} - {1} if plan is not None else set()
        degrees = tuple(sorted({*self.profiler.tensor_parallel, *widths}))
        profiler = self.profiler.model_copy(update={"tensor_parallel": degrees})
        return replace(self, options=self.options.changed({"precision": precision}), profiler=profiler)


def meet(
    cluster: Cluster | None, backend: Backend = "torch", told: Mapping[str, Any] | None = None, *, elastic: bool = False
) -> tuple[World, Cluster]:
    """Join the other ranks, as the devices of `cluster` (`elastic`: of the part of it that is there); without one, of the cluster
    that they are. InputError on every rank unless all were `told` the same. Collective."""
    if cluster is not None and left_out():
        cluster = cluster.without(left_out())
    check_cluster(backend, cluster)
    emulated = cluster is not None and any(t.emulate is not None for t in cluster.device_types.values())
    connect(use_cuda=torch.cuda.is_available() and not emulated, told=told)
    if not torch.cuda.is_available() or emulated:
        torch.set_num_threads(1)  # as when it was measured; ranks that share cores get slower with more
    declared, cluster = cluster, cluster or discover_cluster(backend)
    world = create_world(cluster, partly=elastic)
    if elastic:
        cluster = there(cluster, world)
    describe_with(f"device {world.device_id}")
    if declared is not None and torch.cuda.is_available() and not emulated:
        cluster, notes = as_it_is(cluster, cards(world, backend, cluster))
        for note in notes if world.is_main else ():
            warn(note)
    if world.is_main:
        note_missing_gpus(world, cluster)
    return world, cluster


FILES: dict[str, type[Document]] = {"cluster": Cluster, "profile": Profile, "plan.file": Plan}


def told_by(job: Job) -> dict[str, Any]:
    """What a job tells a rank: every key as it was written, folders too, since hosts that differ in one do not train the same, or
    not into the same place. Files are compared by what is in them: hosts may have them in different places."""
    values = dict(flat(job.model_dump(mode="json"), "")) | {f"torch.backends.{name}": on for name, on in arithmetic().items()}
    for key, document in FILES.items():
        path = values.pop(key, None)
        if path is not None:
            content = document.load(path).to_json()
            values[f"the content of {Path(path).name} ({key})"] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return values


def open_session(job: Job) -> Session:
    """Join the other ranks, build the model (the same weights everywhere) and the data. Collective."""
    world, cluster = meet(job.read_cluster(), job.plan.backend, told_by(job), elastic=job.elastic is not None)
    check_training(job)
    job = going_on(job, world)
    evaluated: Content | None = None
    with Activity("starting", shown=world.is_main) as activity:
        activity.say(f"building the data {job.data.label!r}")
        data = build_data(job)
        activity.say(f"building the model {job.model.label!r}")
        model = build_model(job, data)
        refuse_unseen(model, data)
        activity.say("waiting for the other ranks")
        with showing_others(activity):
            check_same_revision(model.layers, world)
            check_begun(job, world)
            content = same_content(data.train, data.made_of, world, saved=job.checkpoint is not None)
            compared = job.evaluate is not None or job.loss.prefers
            if compared and data.test is not None:
                evaluated = same_content(data.test, data.made_of, world, saved=job.checkpoint is not None)
    return Session(
        job=job,
        world=world,
        cluster=cluster,
        model=model,
        data=data,
        content=content,
        evaluated=evaluated,
        found=job.cluster is None,
        seed=job.train.seed,
        held=job.train.dtype,
    )


def prepare(setting: Setting, request: Request, plan: Plan | None = None, profile: Profile | None = None) -> tuple[Plan, Profile]:
    """The plan and the profile that it is for: those given, those of the files, or measured and planned anew. A fault in a plan
    file is known before anything is measured. Collective."""
    if (plan := plan or _plan_of_file(setting, request)) is not None:
        setting.decided(plan, request.options)  # says what does not go together
    asked = request.measuring(plan)
    profile = profile or obtain_profile(setting, asked)
    plan = setting.decided(plan or new_plan(setting, profile, request), asked.options, profile)
    return plan.model_copy(update={"backend": request.options.backend}), profile  # whatever it was made for


def obtain_profile(setting: Setting, request: Request, *, fresh: bool = False) -> Profile:
    """The profile file, if there is one (and it is not to be `fresh`); else as `measured`. Collective."""
    if request.profile is not None and not fresh:
        profile = Profile.load(request.profile)
        _check_profile(profile, setting.model, request.profile)
        note_arithmetic(profile, setting.world, request.profile)
        return profile
    whole_nodes = drives_a_replica(request.options.backend)
    return measured(
        setting.model,
        setting.cluster,
        setting.world,
        request.profiler,
        request.optimizer,
        precision=request.options.precision,
        fresh=fresh,
        whole_nodes=whole_nodes,
    )


def home_of_profile(setting: Setting, request: Request, profile: Profile) -> str | None:
    """Where this profile is cached, of a model of which no engine has taken layers; None if it is a file of one's own."""
    if request.profile is not None:
        return None
    given = setting.model, setting.cluster, setting.world, request.profiler, request.optimizer
    return home_of(profile, *given, precision=request.options.precision)


def _check_profile(profile: Profile, model: Model, source: str) -> None:
    """A profile of another model, or of this one with other arguments, would plan and pace something else."""
    faults = []
    if profile.model != model.name:
        faults.append(f"it is of model {profile.model!r}, the job's is {model.name!r}")
    measured = [(layer.name, layer.parameter_bytes) for layer in profile.layers]
    own = [(name, module_bytes(layer)[0]) for name, layer in named_layers(model.layers)]
    if len(measured) != len(own):
        faults.append(f"it has {len(measured)} layers, the model {len(own)}")
    else:
        faults += [
            f"layer {i} is {there!r} with {there_bytes} parameter bytes, in the model {here!r} with {here_bytes}"
            for i, ((there, there_bytes), (here, here_bytes)) in enumerate(zip(measured, own, strict=True))
            if (there, there_bytes) != (here, here_bytes)
        ][:1]
        training = zip(profile.layers, map(trained_bytes, (layer.parameters() for layer in model.layers)), strict=True)
        faults += [
            f"of layer {i}, {there.name!r}, {there.trained_bytes} parameter bytes train, in the model {here}"
            for i, (there, here) in enumerate(training)
            if there.trained_bytes not in (None, here)
        ][:1]
    if faults:
        raise InputError(f"{source} is not a profile of this model ({'; '.join(faults)}); measure it with 'hetpipe profile'")


def _plan_of_file(setting: Setting, request: Request) -> Plan | None:
    """Checked against everything but the profile."""
    if request.plan is None:
        return None
    plan = Plan.load(request.plan)
    absent = left_out() or tuple(d for d in plan.device_ids if d not in {device.id for device in setting.cluster.devices})
    if request.elastic and absent:
        if setting.world.is_main:
            say(f"{', '.join(absent)} of the plan {request.plan} cannot be had: planning anew for the devices that are there")
        return None
    plan.check(cluster=setting.cluster, layers=len(setting.model.layers), global_batch=request.global_batch, source=request.plan)
    check_backend(request.options.backend, plan)
    return plan


def new_plan(setting: Setting, profile: Profile, request: Request) -> Plan:
    """Made by the main rank. Collective."""
    outcome: Any = None
    if setting.world.is_main:
        if request.options.precision == "auto" and frozen_low(setting.model.layers):
            profile = without_full(profile)
        named = isinstance(request.options.precision, Mapping)  # types by the names that they were found with
        merged = one_type_again(setting.cluster, profile) if setting.found and not named else (setting.cluster, profile)
        outcome = _with_hint(_try_plan(profile=merged[1], cluster=merged[0], request=request), setting, profile)
        if isinstance(outcome, Plan):
            outcome = with_own_types(outcome, merged[0], setting.cluster).model_dump(mode="json")
    outcome = setting.world.first(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    return Plan.parse(outcome, "the new plan")


def _with_hint(outcome: Plan | Exception, setting: Setting, profile: Profile) -> Plan | Exception:
    """What came of planning; where whole layers do not fit, with how split ones could be planned for."""
    if not isinstance(outcome, PartitionError) or outcome.missing_bytes is None:
        return outcome
    if any(m.tensor_parallel > 1 for m in profile.measurements):
        return outcome
    degree = least_degree(setting.model, setting.cluster, setting.world.rank_of)
    if degree is None:
        return outcome
    return PartitionError(
        f"{outcome}. Layers were planned whole: {degree} devices of one type in a node could also split each between them. To "
        f"let plans do so, write profiler: {{tensor_parallel: [{degree}]}} in the job "
        f"(hetpipe finetune --tensor-parallel {degree})",
        missing_bytes=outcome.missing_bytes,
        needed_bytes=outcome.needed_bytes,
    )


def _try_plan(profile: Profile, cluster: Cluster, request: Request) -> Plan | Exception:
    try:
        options = request.options.changed({"precision": in_job(request.options.precision, profile, cluster)})
        try:
            with Activity("planning") as activity:
                plan = make_plan(profile, cluster, request.global_batch, options, progress=activity.say)
        finally:
            compile_when_idle()  # processors are for training now
        if note := note_of_precisions(plan, profile, cluster, options):
            warn(f"note: {note}")
        return plan
    except Exception as error:  # goes to every rank, which raises it
        return error


def join(setting: Setting, plan: Plan, profile: Profile | None) -> PlanEngine | None:
    """This process's engine; None where the plan leaves it unused. `profile` paces emulated devices; without one, or types of
    devices in the cluster, none is emulated. Collective."""
    cluster, model, backend = setting.cluster, setting.model, plan.backend
    if profile is not None:
        plan.check(cluster=cluster, profile=profile, layers=len(model.layers))
    check_backend(backend, plan)
    world = seat(setting.world, backend, plan)
    if world.device_id in plan.device_ids:
        describe_with(f"{_place(plan, world.device_id)}, device {world.device_id}", lambda: LOADING)
    else:
        describe_with(f"device {world.device_id}, which the plan does not use", needed=False)

    def device(device_id: str) -> torch.device:
        found = cluster.device(device_id)
        return torch_device(cluster.device_types.get(found.type), found.index)

    def emulation(device_id: str) -> Emulation | None:
        return _emulation(cluster, profile, plan, device_id) if profile is not None else None

    with Activity("starting: loading the layers", shown=setting.world.is_main) as activity, showing_others(activity):
        engine = open_engine(backend, model, plan, world, device, emulation, lambda device_id: setting.types(plan, device_id))
    if engine is not None:
        engine.seed = setting.seed
        describe_with(engine.place, lambda: engine.doing, lambda: engine.waits)
    return engine


def used_ranks(setting: Setting, plan: Plan) -> list[int]:
    """The ranks that the plan uses."""
    rank_of = seat(setting.world, plan.backend, plan).rank_of
    return sorted({rank_of[device] for device in plan.device_ids})


def _place(plan: Plan, device: str) -> str:
    """`replica 0 stage 1`."""
    return next(seat.place for seat in plan.seats() if seat.device == device)


def _emulation(cluster: Cluster, profile: Profile, plan: Plan, device_id: str) -> Emulation | None:
    spec = cluster.type_of(device_id)
    if spec.emulate is None:
        return None
    kind = cluster.device(device_id).type
    precision = (plan.precision or {}).get(kind)
    stage, samples = next((s, r.samples) for r in plan.replicas for s in r.stages if device_id in s.devices)
    degree = len(stage.devices)
    memory = Costs(profile.at(plan.precision), cluster).stage_memory(
        kind, *stage.layers, samples=samples, recompute=stage.recompute, degree=degree
    )
    largest = max(max(r.microbatch_sizes) for r in plan.replicas if stage in r.stages)
    return Emulation(
        slowdown=spec.emulate.slowdown_at(precision, kind),
        host=profile.host_at(precision, degree),
        memory_bytes=spec.memory,
        transient_bytes=round(memory.backward_per_sample * largest),
        lengths=profile.lengths or (),
        frozen=profile.first_trained,
    )
