"""A job's program on every rank: in this process under torchrun, else in ranks that are started here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetpipe.checkpoints.kept import salvage
from hetpipe.checkpoints.stores.store import name_of
from hetpipe.documents.cluster import Cluster, Device
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan
from hetpipe.documents.precisions import PrecisionChoice
from hetpipe.documents.profile import Profile
from hetpipe.documents.sections.elastic import ElasticSection
from hetpipe.files.messages import InputError
from hetpipe.layers.model import unsplit_note
from hetpipe.processes.arithmetic import computing_by
from hetpipe.processes.environment import launched
from hetpipe.processes.progress import say, warn
from hetpipe.processes.ranks.launch import Elastic, Rejoin, start_ranks
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.processes.ranks.report import RankFailure
from hetpipe.processes.stopping import RunStopped
from hetpipe.runtime.backends import check_backend, check_cluster, drives_a_replica, load_library, processes
from hetpipe.training.runlog import TrainResult
from hetpipe.training.session import Request, obtain_profile, open_session, prepare


def run_everywhere(job: Job, program: Callable[..., Any], *arguments: Any) -> Any:
    """`program(job, *arguments)` on every rank: in this process under torchrun, else in ranks started here. Returns the main
    rank's result (None on other ranks of torchrun)."""
    if launched():
        return program(job, *arguments)
    return _start(program, (job, *arguments), _machine(job).devices)


def _start(
    program: Callable[..., Any],
    arguments: tuple[Job, *tuple[Any, ...]],
    devices: Sequence[Device],
    elastic: Elastic | None = None,
) -> Any:
    results = start_ranks(program, arguments, devices, modules_of(arguments[0]), elastic)
    return next((result for result in results if result is not None), None)


def _start_again(program: Callable[..., Any], job: Job, section: ElasticSection) -> Any:
    """`program(job)` on the devices of this machine, and, where some are lost, once more on those that are left."""
    cluster, lost, losses, restarts = _machine(job), list[Device](), Counter[Device](), 0
    while True:
        kept = [device for device in cluster.devices if device not in lost]
        try:
            once = [device for device in lost if losses[device] == 1]
            return _start(program, (job,), kept, Elastic(without=lost, join=section.join and bool(once)))
        except Rejoin:
            lost = [device for device in lost if losses[device] > 1]  # it did not last: it is left alone
            say("saved: trying the devices that were lost once more")
        except RunStopped as stop:
            if job.checkpoint is not None and (step := salvage(job.checkpoint.folder)) is not None:
                stop.resume = f"step {step}, {Path(job.checkpoint.folder, name_of(step))}"
            raise
        except RankFailure as failure:
            if not failure.lost or restarts == section.restarts or len(failure.lost) == len(kept):
                raise
            restarts += 1
            gone = [cluster.device(device) for device in failure.lost]
            lost, losses = [*lost, *gone], losses + Counter(gone)
            if job.checkpoint is not None:
                salvage(job.checkpoint.folder)
            say(f"{failure}; going on without {', '.join(failure.lost)} (restart {restarts} of {section.restarts})")


def _machine(job: Job) -> Cluster:
    """The job's cluster; without one, the GPUs of this machine, or its CPU."""
    cluster = job.read_cluster()
    if cluster is None:
        count = max(1, torch.cuda.device_count())
        cluster = Cluster.parse(
            {
                "format": "hetpipe.cluster/1",
                "device_types": {"here": {"memory": 0}},
                "nodes": [{"name": "n0", "devices": {"here": count}}],
            },
            "this machine",
        )
    _refuse_shared_gpus(cluster)
    return cluster


def train_rank(job: Job, plan: Plan | None = None, profile: Profile | None = None) -> TrainResult | None:
    """The program of every rank of `hetpipe train`. The process that starts ranks is spared the trainer's imports."""
    from hetpipe.training.trainer import Trainer

    return Trainer(job).run(plan, profile)


def train_everywhere(job: Job, program: Callable[..., Any]) -> Any:
    """`program(job)` on every rank, as `run_everywhere`. Where one process drives a replica, the number of processes is known
    with the plan: if it or the profile is not in a file, one process a device measures and plans first; then
    `program(job, plan, profile)` runs in one process a replica."""
    backend = job.plan.backend
    if job.elastic is not None and not launched():
        return _start_again(program, job, job.elastic)
    if launched() or not drives_a_replica(backend):
        return run_everywhere(job, program)
    cluster = _machine(job)
    check_cluster(backend, cluster)
    load_library(backend)
    if job.plan.file is not None:
        plan = Plan.load(job.plan.file)
        check_backend(backend, plan)
        if job.profile is not None:
            return _start(program, (job,), processes(backend, plan, cluster))
    plan, profile = run_everywhere(job, _plan_rank)
    return _start(program, (job, plan, profile), processes(backend, plan, cluster))


def _plan_rank(job: Job) -> tuple[Plan, Profile] | None:
    with computing_by(**job.train.arithmetic.model_dump()):
        session = open_session(job)
        found = prepare(session, Request.by(job))
    return found if session.world.is_main else None


def _refuse_shared_gpus(cluster: Cluster) -> None:
    """Several nodes of real GPUs are several machines: started on one, their ranks would share its GPUs without a word."""
    real = [node.name for node in cluster.nodes if any(cluster.device_types[k].emulate is None for k in node.devices)]
    if torch.cuda.is_available() and len(real) > 1:
        raise InputError(
            f"the cluster file has real devices on the nodes {real}, and this is one machine: start the command under torchrun "
            f"on each of them (torchrun --nnodes={len(cluster.nodes)} --nproc-per-node=… -m hetpipe …), or leave one node"
        )


def _profile_rank(job: Job, precision: PrecisionChoice | None = None) -> Profile | None:
    request = Request.by(job)
    if precision is not None:
        request = replace(request, options=request.options.model_copy(update={"precision": precision}))
    with computing_by(**job.train.arithmetic.model_dump()):
        session = open_session(job)
        if session.world.is_main and (note := unsplit_note(session.model.layers)):
            warn(f"note: {note}")
        profile = obtain_profile(session, request, fresh=True)
    return profile if session.world.is_main else None


def profile_everywhere(job: Job, precision: PrecisionChoice | None = None) -> Profile | None:
    """A new measurement of the job's model on all its device types, at these precisions, or at those that the job trains in: in
    the process that started the ranks, or on the main rank. The job's own files of a profile and a plan need not be there."""
    measured = job.model_copy(update={"profile": None, "plan": job.plan.model_copy(update={"file": None})})
    result: Profile | None = run_everywhere(measured, _profile_rank, precision)
    return result
