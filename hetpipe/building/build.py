"""Job → Model, data, optimizer, schedule: every name of the job file turned into the object it means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hetpipe.building.called import called_with, masked_first, refuse_other_inputs
from hetpipe.building.data import Grouped, MapDataset, Preferences, Ragged, check_lengths, count_of, fetch, largest_of
from hetpipe.building.datasets import DataSplits
from hetpipe.building.evaluated import evaluated_section, refuse_nothing
from hetpipe.building.fused import fused_loss, labels_of, rows_of, scored, with_labels
from hetpipe.building.lengths import shorter_batches
from hetpipe.building.streams.streamed import Streamed, is_stream
from hetpipe.documents.guesses import guesses
from hetpipe.documents.job import Job
from hetpipe.documents.sections.loss import PREFERENCES, REWARD, LossSection
from hetpipe.documents.sections.named import Named
from hetpipe.documents.sections.torch_named import SchedulerSection, TorchNamed
from hetpipe.files.messages import InputError, cut, nearest, shown
from hetpipe.layers.adapters.adapt import adapted
from hetpipe.layers.batch_norm import check_batch_norm
from hetpipe.layers.device import torch_device
from hetpipe.layers.losses.preference import dpo, orpo, reward, simpo
from hetpipe.layers.model import LOSSES, Loss, Model, class_weight, cross_entropy, select
from hetpipe.layers.numbers import as_type, stays, torch_type, turn
from hetpipe.layers.shards.styles import set_styles
from hetpipe.layers.trials.loss_check import check_sample
from hetpipe.layers.trials.rows import ROWS
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.planning import registry

_OPTIMIZERS_REFUSED = {
    "LBFGS": "it evaluates the model several times a step",
    "SparseAdam": "it needs sparse gradients",
    "Muon": "it takes matrices only",
}
_SCHEDULERS_REFUSED = {
    "LambdaLR": "a function",
    "MultiplicativeLR": "a function",
    "ReduceLROnPlateau": "a metric at every step",
    "SequentialLR": "other schedulers",
    "ChainedScheduler": "other schedulers",
}
PREFERRED = {"dpo": dpo, "simpo": simpo, "orpo": orpo, "reward": reward}
TRIED_STEPS = 10_000  # of a schedule, before anything is measured
SAMPLES = 8  # of the data that are looked at, likewise
LARGER = 2  # times as long as those that train samples may be that run forward only


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], what: str, *, theirs: bool = False) -> Any:
    """Call with the job's arguments; an unknown one is named with the nearest known. What a function of the user's (`theirs`)
    raises beside refusals of its arguments is its own fault, and is told with its traceback."""
    signature = inspect.signature(function)
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        known = [n for n, p in signature.parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for name in arguments:
            if name not in known:
                raise InputError(f"{what} has no argument {name!r}{nearest(name, known)}")
    try:
        return function(**arguments)
    except InputError as error:
        raise InputError(f"{what}: {error}") from error
    except Exception as error:
        if theirs and not isinstance(error, TypeError | ValueError):
            raise
        raise InputError(f"{what} refuses its arguments {shown(dict(arguments))}: {cut(str(error))}") from error


def _function(section: Named, find: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    return registry.load_target(section.target) if section.target is not None else find(str(section.name))


def build_data(job: Job) -> DataSplits:
    """The job's training samples, and those that are evaluated."""
    function = _function(job.data, registry.dataset)
    splits = _splits(job.data, function, "data")
    if count_of(splits.train) == 0:
        raise InputError(f"data {job.data.label!r} has no training samples")
    if isinstance(splits.train, Streamed) and job.train.steps is None:
        raise InputError(
            f"data {job.data.label!r} is a stream, of which nobody knows how many steps an epoch has. Write train.steps in the "
            f"place of train.epochs, which is {job.train.epochs}"
        )
    if job.evaluate is not None and job.evaluate.data is not None:
        section = evaluated_section(job, job.evaluate.data, function)
        own = _splits(section, _function(section, registry.dataset), "evaluate.data")
        if isinstance(own.train, Streamed):
            raise InputError(f"evaluate.data {section.label!r} is a stream, which has no end. Give a list of those to evaluate")
        if own.names != splits.names:
            raise InputError(
                f"evaluate.data {section.label!r} gives {_inputs(own)}, and data {job.data.label!r} {_inputs(splits)}: a model "
                "takes both alike, so let both give the same"
            )
        splits = replace(splits, test=own.train)
    _check_preferences(job, splits)
    refuse_nothing(job, held_out=splits.test is not None and len(splits.test) > 0)  # type: ignore[arg-type]
    if job.loss.name == REWARD:
        splits = scored(splits)
    _refuse_larger(splits, job)
    return with_labels(splits, job.loss) if _labels(job) else splits


def _check_preferences(job: Job, splits: DataSplits) -> None:
    """InputError if the loss is over preferences and the data have none, or the other way round."""
    has = isinstance(splits.train, Preferences)
    if has != job.loss.prefers:
        loss = job.loss.name or job.loss.target
        told = "holds preferences" if has else "holds none"
        raise InputError(
            f"data {job.data.label!r} {told}, and the loss is {loss}: preferences go with the losses {', '.join(PREFERENCES)}"
        )


def _inputs(splits: DataSplits) -> str:
    return "(" + ", ".join(splits.names) + ")" if splits.names is not None else "inputs without names"


def _splits(section: Named, function: Callable[..., Any], key: str) -> DataSplits:
    what = f"{key} {section.label!r}"
    with drawing("data"):  # the same on every rank, and after a resume
        splits = _call(function, section.args, what, theirs=section.target is not None)
    if isinstance(splits, tuple) and len(splits) == 2:
        splits = DataSplits(train=splits[0], test=splits[1])
    if not isinstance(splits, DataSplits):
        raise InputError(f"{what} must return DataSplits(train, test) or a pair, found {type(splits).__name__}")
    if is_stream(splits.train):
        splits = replace(splits, train=Streamed(splits.train))  # type: ignore[arg-type]
    for part, samples in (("training", splits.train), ("test", splits.test)):
        if isinstance(samples, Streamed):
            if part == "test":
                raise InputError(f"{what}: the test samples are a stream, which has no end. Give a list of those to evaluate")
            continue
        if samples is not None and not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise InputError(
                f"{what}: the {part} samples are of type {type(samples).__name__}, which has no "
                "length or no index. Give a map-style dataset, a list of (inputs, target), or for training a stream "
                "(hetpipe.Streamed)"
            )
        if samples is not None:
            check_lengths(samples, f"{what}, {part} samples")
    return splits


def _labels(job: Job) -> dict[str, Any]:
    return labels_of(job, _function(job.model, registry.model))


def _refuse_larger(splits: DataSplits, job: Job) -> None:
    """InputError if samples are evaluated that are padded to more than memory is planned for: that of a forward and a backward,
    which is more than twice that of a forward alone."""
    train: Any = splits.train
    test: Any = splits.test
    if isinstance(train, Ragged) and isinstance(test, Ragged) and test.sizes[-1] > LARGER * train.sizes[-1]:
        raise InputError(
            f"data {job.data.label!r}: the largest size of the samples that are evaluated is {test.sizes[-1]}, more than "
            f"{LARGER} times {train.sizes[-1]}, that of the training samples, for which memory is planned. Give both one size"
        )


def build_loss(section: LossSection) -> Loss:
    """The job's loss and its weight."""
    if section.prefers:
        given = {key: value for key in ("beta", "gamma") if (value := getattr(section, key)) is not None}
        return Loss(function=partial(PREFERRED[str(section.name)], **given), weight="samples")
    if section.target is not None:
        function = registry.load_target(section.target)
    else:
        name = section.name or "cross_entropy"
        if name not in LOSSES:
            answer = guesses().losses.get(name)
            known = nearest(name, [*LOSSES, *PREFERRED])
            raise InputError(f"unknown loss {name!r}{f': {answer}' if answer is not None else known}")
        function = LOSSES[name]
        if section.class_weights is not None:
            both: dict[str, Any] = {"ignore_index": section.ignore_index, "class_weights": section.class_weights}
            return Loss(
                function=partial(cross_entropy, **both), weight=partial(class_weight, **both), ignore_index=section.ignore_index
            )
        if name == "cross_entropy" and section.ignore_index != -100:
            function = partial(cross_entropy, ignore_index=section.ignore_index)
    weight = registry.load_target(section.weight_fn) if section.weight_fn is not None else section.weight
    return Loss(function=function, weight=weight, ignore_index=section.ignore_index)


def check_training(job: Job) -> None:
    """There is such a partitioner, and optimizer and schedule take their arguments: known before anything is measured."""
    registry.check_partitioner(job.plan.partitioner)
    section, optimizer = job.train.scheduler, optimizer_factory(job.train.optimizer)([nn.Parameter(torch.zeros(1))])
    steps = job.train.steps - section.from_step if section is not None and job.train.steps is not None else None
    build_scheduler(section, optimizer, steps)
    cluster = job.read_cluster()
    emulated = [kind for kind in cluster.device_types.values() if kind.emulate is not None] if cluster is not None else []
    device = torch_device(emulated[0] if emulated else None, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    _try_optimizer(job.train.optimizer, torch_type(job.train.dtype), device)
    if section is not None:
        _try_schedule(section, optimizer_factory(job.train.optimizer)([nn.Parameter(torch.zeros(1))]), steps)


def _try_optimizer(section: TorchNamed, dtype: torch.dtype, device: torch.device) -> None:
    """InputError if an optimizer that can be built cannot take a step on such a device: torch looks at some arguments
    (capturable, differentiable, fused) only then."""
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = optimizer_factory(section)([parameter])
    try:
        optimizer.step()
    except Exception as error:
        kind = {"cpu": "CPUs", "cuda": "GPUs"}.get(device.type, device.type)
        raise InputError(
            f"optimizer {section.name!r} cannot take a step on {kind} with {shown(section.arguments)}: {cut(str(error))}"
        ) from error


def _try_schedule(section: SchedulerSection, optimizer: torch.optim.Optimizer, steps: int | None) -> None:
    """InputError if a schedule that can be built cannot go on: some divide by what they are given only then. Without the warm-up,
    which another schedule does."""
    alone = section if section.name == "LinearLR" else section.model_copy(update={"warmup_steps": 0})
    scheduler = build_scheduler(alone, optimizer)
    assert scheduler is not None
    try:
        optimizer.step()
        for _ in range(min(TRIED_STEPS, steps or TRIED_STEPS, getattr(scheduler, "total_steps", TRIED_STEPS))):
            scheduler.step()
    except (ArithmeticError, TypeError, ValueError) as error:
        hint = ": what counts steps must be above 0" if isinstance(error, ZeroDivisionError) else ""
        raise InputError(
            f"scheduler {section.name!r} does not run with {shown(section.arguments)}: "
            f"{type(error).__name__}: {cut(str(error))}{hint}"
        ) from error


def build_layers(job: Job, data: DataSplits | None = None) -> Any:
    """What the job's model function returns: an nn.Sequential, if it is right. `data`: those that it is to train on. A function
    with an argument `extras` is told which tensors a sample's inputs have behind the first, unless the job says otherwise; one
    with an argument `called` how the model is called with samples (`DataSplits.called`), for which data are built if there are
    none."""
    function, theirs = _function(job.model, registry.model), job.model.target is not None
    arguments, known = dict(job.model.args), inspect.signature(function).parameters
    names, takes = data.names if data is not None else None, "extras" in known
    if names is not None and takes:
        arguments.setdefault("extras", list(names[1:]))
    if "called" in known:
        arguments["called"] = called_with(job, data or build_data(job))
    with drawing(job.train.seed):
        arguments |= _labels(job) or rows_of(job, function)
        layers = _call(function, arguments, f"model {job.model.label!r}", theirs=theirs)
    if not isinstance(layers, nn.Sequential):
        return layers
    if names is not None and "called" not in known:
        refuse_other_inputs(job, layers, names[1:], named=takes)
    if job.model.tensor_parallel is not None:
        set_styles(layers, job.model.tensor_parallel, "model.tensor_parallel")
    if job.adapter is not None:
        layers = adapted(layers, job.adapter, job.train.seed)
        _refuse_fixed_score(layers, job)
    turn(layers, job.train.dtype)
    if job.frozen_dtype != "float32":
        _hold_frozen(layers, job)
    return layers


def _refuse_fixed_score(layers: nn.Sequential, job: Job) -> None:
    """InputError if adapters train to a score that is drawn at random and stays so."""
    if job.loss.name == REWARD and not any(parameter.requires_grad for parameter in layers[-1].parameters()):
        raise InputError(
            "the loss is reward, and the head that gives the scores does not train: write adapter: {train_also: [head]}. Those "
            "of a folder that were trained without it are merged into the model first (hetpipe export-weights --merge)"
        )


def _hold_frozen(layers: nn.Sequential, job: Job) -> None:
    """Let the matrices that do not train be held as the job says. InputError if there is none."""
    frozen = [p for p in layers.parameters() if not p.requires_grad and p.is_floating_point() and p.ndim > 1 and not stays(p)]
    if not frozen:
        raise InputError(
            f"train.frozen_dtype is {job.train.frozen_dtype}, but all matrices of model {job.model.label!r} train. Leave it out, "
            "or let the model's function freeze some (requires_grad_(False))"
        )
    for parameter in frozen:
        parameter.data = parameter.data.to(torch_type(job.frozen_dtype))


def build_model(job: Job, splits: DataSplits) -> Model:
    """The job's model, with weights drawn from `train.seed`: the same on every rank. The sample is a few of those to train on,
    first those that need a mask; some others are looked at, too, so that what does not fit together is known before anything is
    measured."""
    layers = build_layers(job, splits)
    data: MapDataset = splits.train
    names, every = splits.names, largest_of(data, SAMPLES)
    numbers = [every[i] for i in sorted({round(i * (len(every) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})]
    try:
        inputs, targets = (as_type(x, job.train.dtype) for x in fetch(data, torch.tensor(numbers), job.train.seed, 0))
    except (TypeError, ValueError) as error:
        raise InputError(f"data {job.data.label!r}: {error}") from error
    order = masked_first(inputs, names)
    inputs, targets, numbers = select(inputs, order), select(targets, order), [numbers[i] for i in order.tolist()]
    first, section = slice(0, ROWS), job.model
    loss = fused_loss(job.loss, layers) if _labels(job) else build_loss(job.loss)
    model = Model(
        name=section.label,
        layers=layers,
        inputs=select(inputs, first),
        targets=select(targets, first),
        loss=loss,
        batch_norm=section.batch_norm,
        coupled_layers=section.coupled_layers,
        shorter=shorter_batches(data, job.train),
    )
    if model.loss.skips_samples(targets):
        raise InputError(f"data {job.data.label!r}: {model.loss.skipped()}")
    check_batch_norm(model.layers, model.batch_norm, whole_replicas=job.plan.backend != "torch")
    rows, kinds = trace(model.layers, model.inputs, backward=True)
    check_sample(model, rows[-1], f"data {job.data.label!r}", targets, numbers)
    model = replace(model, kinds=kinds)
    if isinstance(data, Grouped):
        _check_groups(job, model, data)
    return model


def _check_groups(job: Job, model: Model, data: Grouped) -> None:
    """InputError where samples of one shape do not run through the layers, as those of the largest do."""
    every: Any = data
    for group in data.groups.unique().tolist()[:-1]:
        number = int((data.groups == group).nonzero()[0])
        inputs, _ = fetch(every, torch.tensor([number]), job.train.seed, 0)
        try:
            trace(model.layers, as_type(inputs, job.train.dtype), kinds=model.kinds)
        except InputError as error:
            source = every.source(number) if hasattr(every, "source") else f"sample {number}"
            raise InputError(
                f"data {job.data.label!r}: the samples of the shape of {source} do not fit the model: {error}"
            ) from error


def _torch_class(module: Any, base: type, name: str, what: str) -> type:
    known = [
        n
        for n, c in vars(module).items()
        if inspect.isclass(c) and issubclass(c, base) and c is not base and not n.startswith("_")
    ]
    if name not in known:
        raise InputError(f"unknown {what} {name!r}{nearest(name, sorted(known))}")
    return getattr(module, name)  # type: ignore[no-any-return]


def optimizer_factory(section: TorchNamed) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """The optimizer of torch.optim by its name, as a function of parameters."""
    found = _torch_class(torch.optim, torch.optim.Optimizer, section.name, "optimizer")
    if section.name in _OPTIMIZERS_REFUSED:
        reason = _OPTIMIZERS_REFUSED[section.name]
        raise InputError(f"optimizer {section.name!r} cannot train a pipeline: {reason}; use, for example, AdamW")
    return lambda parameters: _call(
        lambda **kw: found(list(parameters), **kw), _checked(found, section), f"optimizer {section.name!r}"
    )


def _checked(found: type, section: TorchNamed) -> dict[str, Any]:
    known = [n for n in inspect.signature(found).parameters if n not in ("params", "self", "optimizer")]
    for name in section.arguments:
        if name not in known:
            own = guesses().optimizer.get(name)
            theirs = f": it is called {own!r}" if own in known else nearest(name, known)
            raise InputError(f"{section.name!r} has no argument {name!r}{theirs}")
    return section.arguments


def build_scheduler(
    section: SchedulerSection | None, optimizer: torch.optim.Optimizer, steps: int | None = None
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The learning-rate schedule. LinearLR with `warmup_steps` w rises from 1/w of the rate over w steps; any other schedule
    begins after such a warm-up. InputError if one that ends (OneCycleLR) ends before so many `steps` from its beginning on."""
    if section is None:
        return None
    schedulers = torch.optim.lr_scheduler
    found = _torch_class(schedulers, schedulers.LRScheduler, section.name, "scheduler")
    if section.name in _SCHEDULERS_REFUSED:
        raise InputError(
            f"scheduler {section.name!r} cannot be written in a job file: it takes "
            f"{_SCHEDULERS_REFUSED[section.name]}; use, for example, CosineAnnealingLR with warmup_steps"
        )
    arguments, warmup = _checked(found, section), section.warmup_steps
    if section.name == "LinearLR" and warmup:
        arguments = {"start_factor": 1 / warmup, "total_iters": warmup, **arguments}
    main: torch.optim.lr_scheduler.LRScheduler = _call(
        lambda **kw: found(optimizer, **kw), arguments, f"scheduler {section.name!r}"
    )
    if section.name == "LinearLR":
        warmup = 0
    most = getattr(main, "total_steps", None)
    if steps is not None and most is not None and steps - warmup > most:
        raise InputError(
            f"scheduler {section.name!r} has total_steps: {most}, but the job trains {steps} steps"
            + (f", {warmup} of them its warm-up" if warmup else "")
        )
    if not warmup:
        return main
    rise = schedulers.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    return schedulers.SequentialLR(optimizer, [rise, main], milestones=[warmup])
