"""args.json → a job, a plan where the shares are given by hand, and what is different."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hetpipe.documents.job import Job
from hetpipe.documents.plan import Plan, ReplicaPlan, StagePlan
from hetpipe.fastspeed.arguments import Arguments
from hetpipe.fastspeed.changes import Change, changes
from hetpipe.fastspeed.import_path import import_path
from hetpipe.files.messages import InputError

MODEL = "hetpipe.fastspeed:one_layer"
SAMPLES = "hetpipe.fastspeed:dict_samples"
BY_DEVICE: Literal["per_microbatch"] = "per_microbatch"
"""Layers that couple samples do so on each device by itself, as under DistributedDataParallel."""
DATA = {"target": "load_data:build"}


class Converted(NamedTuple):
    """The content of job.yaml and, for shares given by hand, of plan.json; where the model comes from; and the changes."""

    job: dict[str, Any]
    plan: Plan | None
    model: str
    changes: tuple[Change, ...]


def convert(
    arguments: Arguments,
    *,
    data: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    cluster: str | None = None,
    devices: Sequence[str] | None = None,
    plan_file: str = "plan.json",
) -> Converted:
    """The job that does what `arguments` mean. `data` is the job's data section, which args.json does not hold; `input_names` are
    the keys of the samples' inputs where these are dicts; `cluster` is the cluster file, whose `devices` take the manual
    lists in order (default: those of one node, n0/0, n0/1, …)."""
    train, strategy = arguments.train, arguments.strategy
    model = import_path(strategy.model_name, strategy.runing_dependency)
    plan = None
    if strategy.manual_batchsize_list is not None and arguments.is_manual:
        devices = devices or [f"n0/{r}" for r in range(len(strategy.manual_batchsize_list))]
        plan = accumulated(manual_plan(strategy.manual_batchsize_list, devices), train.gradient_accumulate_step)
    job = {
        "format": "hetpipe.job/1",
        "model": _model(arguments, model, input_names),
        "data": _data(data or DATA, input_names),
        "loss": {"name": "cross_entropy", "weight": "tokens"},
        "cluster": cluster,
        "profiler": {"microbatch_sizes": list(measured_sizes(arguments))},
        "plan": {"file": plan_file} if plan is not None else {"partitioner": "uneven-data-parallel"},
        "train": {
            "global_batch": arguments.batch_size * train.gradient_accumulate_step,
            "epochs": train.epochs,
            "optimizer": {"name": train.optimizer, "lr": train.learning_rate},
        },
        "checkpoint": _checkpoint(arguments),
        "log": _log(arguments),
    }
    job = {key: value for key, value in job.items() if value is not None}
    Job.parse(job, "the converted job")
    return Converted(job, plan, model, tuple(changes(arguments, job, model)))


def manual_plan(shares: Sequence[int], devices: Sequence[str]) -> Plan:
    """The whole model, one layer, on every device; device r takes shares[r] samples."""
    if len(shares) != len(devices):
        raise InputError(
            f"strategy.manual_batchsize_list has {len(shares)} entries, but there are {len(devices)} devices "
            f"({', '.join(devices)}). Give one batch size for each"
        )
    replicas = tuple(
        ReplicaPlan(microbatch_sizes=(share,), stages=(StagePlan(layers=(0, 1), devices=(device,)),))
        for share, device in zip(shares, devices, strict=True)
    )
    return Plan(model=MODEL, global_batch=sum(shares), partitioner="FastSpeed's manual lists", replicas=replicas)


def accumulated(plan: Plan, steps: int) -> Plan:
    """The plan of one step that is `steps` batches of this plan."""
    replicas = tuple(r.model_copy(update={"microbatch_sizes": r.microbatch_sizes * steps}) for r in plan.replicas)
    return plan.model_copy(update={"global_batch": plan.global_batch * steps, "replicas": replicas, "predicted": None})


def measured_sizes(arguments: Arguments) -> tuple[int, ...]:
    """The micro-batch sizes to measure: the manual ones; or the test size and its doubles up to the whole batch, which one device
    alone may get. (A device measures those that its memory holds.)"""
    strategy, batch = arguments.strategy, arguments.batch_size
    if arguments.is_manual:
        return tuple(sorted(set(strategy.manual_batchsize_list or ())))
    sizes, size = [batch], strategy.test_batchsize_bytime or batch
    while size < batch:
        sizes.append(size)
        size *= 2
    return tuple(sorted(sizes))


def _data(section: Mapping[str, Any], input_names: Sequence[str] | None) -> dict[str, Any]:
    """The data section; of a function of the user's, with the tensors taken out of its dicts."""
    if input_names is None or "target" not in section:
        return dict(section)
    inner = {"target": section["target"], "input_names": list(input_names), "arguments": section.get("args")}
    return {"target": SAMPLES, "args": {key: value for key, value in inner.items() if value}}


def _model(arguments: Arguments, path: str, input_names: Sequence[str] | None) -> dict[str, Any]:
    options: dict[str, Any] = {"target": path, "arguments": list(arguments.strategy.model_args)}
    if input_names is not None:
        options["input_names"] = list(input_names)
    if arguments.train.is_load_model:
        options["weights"] = arguments.train.load_model_path
    return {"target": MODEL, "args": options, "batch_norm": BY_DEVICE, "coupled_layers": BY_DEVICE}


def _checkpoint(arguments: Arguments) -> dict[str, Any] | None:
    train = arguments.train
    if not train.save_model or train.checkpoint_interval is None:
        return None
    return {
        "folder": train.checkpoint_folder,
        "every_steps": train.checkpoint_interval * arguments.steps_per_epoch,
        "keep": -(-train.epochs // train.checkpoint_interval),
    }


def _log(arguments: Arguments) -> dict[str, Any] | None:
    train = arguments.train
    if train.iter_log_interval <= 0:
        return None
    every = max(1, train.iter_log_interval // train.gradient_accumulate_step)
    return {"folder": str(Path("runs") / arguments.strategy.model_name), "every_steps": every}
