"""What a converted job does differently from FastSpeed, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hetpipe.fastspeed.arguments import Arguments

DROPPED = "–"
SAME = "the same"


class Change(NamedTuple):
    """One key of args.json: what it is there, what the job says for it (– for nothing), and why."""

    key: str
    fastspeed: str
    job: str
    why: str


def changes(arguments: Arguments, job: Mapping[str, Any], model: str) -> list[Change]:
    """One entry for every key, in the order of args.json; those in brackets are no keys. `model` is its import path."""
    return [
        *_data_changes(arguments, job),
        *_train_changes(arguments, job),
        *_checkpoint_changes(arguments, job),
        *_strategy_changes(arguments, job, model),
    ]


def _data_changes(arguments: Arguments, job: Mapping[str, Any]) -> list[Change]:
    given, own = arguments.data, job["data"]
    source = own.get("args", {}).get("target") or own.get("target") or own["name"]
    loader = "each rank takes its own samples as it needs them"
    return [
        Change(
            "(the data)",
            "made in main.py, not named in args.json",
            f"data: {source}",
            "--data, else a function build in load_data.py, to be written: it returns (training samples, test samples), each "
            "sample a pair (inputs, target) of tensors; with --input-names the inputs are a dict",
        ),
        Change(
            "data.total_datasize",
            f"{given.total_datasize}, else the run ends",
            DROPPED,
            "the data knows its length; here it is used for checkpoint.every_steps only",
        ),
        Change("data.train_loader_pin_memory", str(int(given.train_loader_pin_memory)), DROPPED, loader),
        Change("data.train_loader_num_workers", str(given.train_loader_num_workers), DROPPED, loader),
    ]


def _train_changes(arguments: Arguments, job: Mapping[str, Any]) -> list[Change]:
    train, section, own = arguments.train, job["train"], arguments.batch_size
    steps, world = train.gradient_accumulate_step, len(arguments.strategy.manual_batchsize_list or ())
    batch = f"train.global_batch: {section['global_batch']}"
    if arguments.is_manual:
        batch_why = f"manual mode ignores it; a batch is the sum of manual_batchsize_list, {own}, times the accumulation, {steps}"
    else:
        batch_why = f"{own} samples times the accumulation, {steps}"
    portion = f"{steps}/{world if arguments.is_manual else 'W'}"
    log = job.get("log")
    return [
        Change(
            "train.epochs",
            f"{train.epochs}, and as many again after loading",
            f"train.epochs: {train.epochs}",
            "all epochs, those before a resumed checkpoint included",
        ),
        Change("train.batch_size", str(train.batch_size or DROPPED), batch, batch_why),
        Change(
            "train.gradient_accumulate_step",
            f"{steps}: gradients are added up; a remainder leaks into the next epoch",
            f"micro-batches of a device: {steps}" if arguments.is_manual else "the planner's micro-batches",
            "one step is the mean over all its samples; the remainder of an epoch is a step of its own",
        ),
        Change(
            "(the gradient)",
            f"{portion} times the true one, since DDP averages what is weighted already; wrong in direction "
            "where a batch is partial or a device has run out of data",
            "the true gradient of every batch",
            "Adam hides the factor; it is there for weight decay, clipping and other optimizers",
        ),
        Change(
            "train.iter_log_interval",
            f"{train.iter_log_interval} iterations" if log else f"{train.iter_log_interval}: off",
            f"log.every_steps: {log['every_steps']}" if log else DROPPED,
            "a line in metrics.jsonl has the loss of its step, over all devices" if log else "nothing is logged",
        ),
        Change(
            "train.epoch_log_interval",
            str(train.epoch_log_interval),
            DROPPED,
            "its 'average' is a sum over the last epoch's iterations; metrics.jsonl has the epoch in every line",
        ),
        Change(
            "train.criterion",
            train.criterion,
            "loss: cross_entropy, weight: tokens",
            "the mean over the labels that are not -100, as nn.CrossEntropyLoss; class scores in the last dimension",
        ),
        Change("train.optimizer", train.optimizer, f"train.optimizer.name: {train.optimizer}", SAME),
        Change("train.learning_rate", str(train.learning_rate), f"train.optimizer.lr: {train.learning_rate}", SAME),
    ]


def _checkpoint_changes(arguments: Arguments, job: Mapping[str, Any]) -> list[Change]:
    train, section = arguments.train, job.get("checkpoint")
    loaded = train.load_model_path if train.is_load_model else None
    return [
        Change(
            "train.isLoadModel, loadModelPath",
            f"weights and Adam's state of {loaded}" if loaded else "0",
            f"model.args.weights: {loaded}" if loaded else DROPPED,
            "the weights only, read without running what a pickle holds; Adam begins anew" if loaded else "nothing is loaded",
        ),
        Change(
            "train.saveModel",
            str(int(train.save_model)),
            "checkpoint" if section else DROPPED,
            "a run that is started again goes on from the newest checkpoint" if section else "nothing is saved",
        ),
        Change(
            "train.checkpoint_interval",
            f"{train.checkpoint_interval} epochs" if section else "not used",
            f"checkpoint.every_steps: {section['every_steps']}" if section else DROPPED,
            f"{arguments.steps_per_epoch} steps an epoch; also at the end" if section else "saveModel is 0",
        ),
        Change(
            "train.checkpoint_folder",
            str(train.checkpoint_folder) if section else "not used",
            f"checkpoint.folder: {section['folder']}" if section else DROPPED,
            "safetensors, which any plan can go on from" if section else "saveModel is 0",
        ),
    ]


def _strategy_changes(arguments: Arguments, job: Mapping[str, Any], model: str) -> list[Change]:
    strategy, manual = arguments.strategy, arguments.is_manual
    unused = f"only for {'autobalanced' if manual else 'manual'}"
    sizes = job["profiler"]["microbatch_sizes"]
    rows = [
        Change(
            "strategy.model_type",
            strategy.model_type,
            "one layer, whole on every device",
            "any nn.Module will do; an nn.Sequential as the target of a job of its own can also be cut into stages",
        ),
        Change(
            "strategy.partition_type",
            strategy.partition_type,
            f"plan.file: {job['plan']['file']}" if manual else "plan.partitioner: uneven-data-parallel",
            "the shares as given" if manual else "the shares by measured speed and memory",
        ),
        Change(
            "strategy.manual_partition_list",
            _listed(strategy.manual_partition_list),
            DROPPED,
            _partition_why(arguments) if manual else unused,
        ),
        Change(
            "strategy.manual_batchsize_list",
            _listed(strategy.manual_batchsize_list),
            "the plan's microbatch_sizes" if manual else DROPPED,
            SAME if manual else unused,
        ),
        Change(
            "strategy.unbalanced_strategy",
            str(strategy.unbalanced_strategy or DROPPED),
            DROPPED,
            unused if manual else "speed by time is the only one; memory counts too",
        ),
        Change(
            "strategy.test_batchsize_bytime",
            str(strategy.test_batchsize_bytime or DROPPED),
            DROPPED if manual else f"profiler.microbatch_sizes: {sizes}",
            unused if manual else "measured warm and several times, at its doubles too, up to batch_size or what fits",
        ),
        Change(
            "strategy.model_name, runing_dependency",
            f"{strategy.model_name}, {_listed(strategy.runing_dependency)}",
            f"model.args.target: {model}",
            "imported when the job starts, from the folder in which it is started",
        ),
        Change("strategy.model_args", _listed(strategy.model_args), "model.args.arguments", SAME),
        Change("(BatchNorm)", "each device by its own batch", "model.batch_norm: per_microbatch", SAME),
        Change("(layers that couple samples)", "each device by its own batch", "model.coupled_layers: per_microbatch", SAME),
    ]
    if strategy.work_path is not None:
        rows.append(Change("strategy.work_path", strategy.work_path, DROPPED, "no program is generated that would run there"))
    return rows


def _partition_why(arguments: Arguments) -> str:
    shares, batches = (arguments.strategy.manual_partition_list or (), arguments.strategy.manual_batchsize_list or ())
    if arguments.left_out:
        total = arguments.data.total_datasize
        return (
            f"it sums to {sum(shares)} of {total} samples, and FastSpeed's sampler ends with an AssertionError there; the job "
            f"trains on all {total}, each once an epoch, and every batch is dealt by the batch sizes"
        )
    iterations = [-(-share // batch) for share, batch in zip(shares, batches, strict=True)]
    if len(set(iterations)) == 1:
        return "every batch is dealt by the batch sizes, each sample once an epoch"
    return (
        f"every batch is dealt by the batch sizes, each sample once an epoch; in FastSpeed the devices run out of data after "
        f"{', '.join(map(str, iterations))} iterations, and go on with dummy ones"
    )


def _listed(values: Sequence[Any] | None) -> str:
    return DROPPED if values is None else str(list(values))
