"""A loss is tried before it trains: on numbers drawn for what the last layer gives, with real targets, once for a few samples
and once for parts of them. Where the parts' losses, each with its weight, do not make the whole's, gradients would be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError, cut
from hetpipe.layers.losses.fused import fused_cross_entropy
from hetpipe.layers.model import Loss, Model, Tensors, as_tuple, as_value, batch_size, cross_entropy, select
from hetpipe.layers.numbers import type_name
from hetpipe.layers.split import REENTRANT, TensorSpec, gradient_leaves, is_reentrant
from hetpipe.layers.trials.loss_trial import Trial, draws, with_few_rows
from hetpipe.layers.trials.masks import USUAL, masked, seen, trains
from hetpipe.layers.untouched.fakes import fake_tensors
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.randomness import drawing

DETACHED = (
    "the loss requires no gradient: what it returns does not depend on the model's output, or was detached from it "
    "(.item(), .detach(), torch.no_grad(), argmax)"
)
CUT = "A batch is cut into micro-batches, so gradients would be wrong."
GIVE = (
    "For a weighted mean give what it divides by, as a function of the targets (in the job's loss section "
    "'weight_fn: module:function', or loss_weight=function; for class weights 'class_weights: […]' in the job, or "
    "loss_weight=lambda targets: weights[targets].sum())"
)


def check_sample(
    model: Model, output: Sequence[TensorSpec], who: str, targets: Tensors | None = None, numbers: Sequence[int] | None = None
) -> None:
    """InputError if the loss does not do, or one of these targets (by default the model's sample's; `numbers` are those of their
    samples, who has them is `who`) is no class. `output` is what the last layer gives for the model's sample."""
    targets = model.targets if targets is None else targets
    trial = Trial(model=model, loss=model.loss, output=output, rows=batch_size(model.inputs), targets=targets)
    check_labels(trial, who, numbers)
    _refuse_untrained(model, trial)
    check_loss(trial)


def _refuse_output(trial: Trial) -> None:
    """InputError if what the last layer gives cannot be trained on, whatever the loss is."""
    given = ", ".join(map(str, trial.output))
    if not trial.output:
        raise InputError(f"layer {trial.layer}, the last, gives no tensor: it must give what the loss is computed of")
    if not any(spec.shape for spec in trial.output) and not _is_its_loss(trial):
        raise InputError(
            f"layer {trial.layer}, the last, gives one number for the whole batch ({given}), which cannot be cut into "
            "micro-batches: let it give a row for each sample, and leave sums and means to the loss"
        )
    if not any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in trial.output):
        raise InputError(
            f"layer {trial.layer}, the last, gives whole numbers only ({given}), which have no gradient: let it give the "
            "numbers of which they were made (of an argmax, the logits)"
        )


def _is_its_loss(trial: Trial) -> bool:
    """Whether the model gives its own loss, which the loss only passes on."""
    given = torch.tensor(0.625, dtype=torch.float64, requires_grad=True)
    try:
        with _unchanged(trial.loss):
            found = trial.loss.function(given, trial.targets)
    except Exception:  # whatever a function says of a number that it does not like
        return False
    passed_on = isinstance(found, Tensor) and found.requires_grad and torch.equal(found.detach(), given.detach())
    return passed_on and len(trial.output) == 1


def _refuse_untrained(model: Model, trial: Trial) -> None:
    """InputError if no parameter would get a gradient."""
    trained = next((name for name, p in model.layers.named_parameters() if p.requires_grad), None)
    if trained is not None and not any(spec.requires_grad for spec in trial.output):
        raise InputError(
            f"what layer {trial.layer}, the last, gives depends on no parameter of the model, such as {trained!r}, so nothing "
            "would be trained: something on the way detaches it (.detach(), torch.no_grad(), .item())"
        )


def check_labels(trial: Trial, who: str, numbers: Sequence[int] | None = None) -> None:
    """InputError if a target is no class, or no loss can do with what the last layer gives. Only losses are known that are
    cross-entropy itself, and only targets on the CPU are looked at: on a GPU they would be waited for."""
    _refuse_output(trial)
    found = _classes(trial)
    labels = as_tuple(trial.targets)[0]
    if found is None or labels.device.type != "cpu" or labels.is_floating_point() or labels.numel() == 0:
        return
    classes, ignored, _ = found
    labels = labels.long()
    if int(labels.min()) >= 0 and int(labels.max()) < classes:
        return
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
    if bool(wrong.any()):
        row = int(wrong.reshape(len(labels), -1).any(1).nonzero()[0])
        number = row if numbers is None else numbers[row]
        raise InputError(
            f"{who}: the target of sample {number} is {int(labels[wrong][0])}, but layer {trial.layer} gives {classes} classes "
            f"(0 to {classes - 1}); {ignored} is ignored"
        )


def _classes(trial: Trial) -> tuple[int, int, Tensor | None] | None:
    """(classes, the label that is ignored, weights of the classes by which torch divides) where the loss is cross-entropy."""
    function: Any = trial.loss.function
    keywords: dict[str, Any] = {}
    if isinstance(function, partial):
        function, keywords = function.func, function.keywords
    shape = trial.output[0].shape
    if not shape:
        return None
    if function is fused_cross_entropy:
        return (words, keywords["ignore_index"], None) if (words := keywords.get("words")) is not None else None
    if function is cross_entropy:
        return shape[-1], keywords.get("ignore_index", -100), None
    if getattr(type(function), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward):
        keywords = {"ignore_index": function.ignore_index, "weight": function.weight}
    elif function not in (nn.functional.cross_entropy, nn.functional.nll_loss):
        return None
    return shape[min(1, len(shape) - 1)], keywords.get("ignore_index", -100), keywords.get("weight")


def check_loss(trial: Trial, devices: Sequence[torch.device] = (torch.device("cpu"),)) -> str | None:
    """InputError if the loss does not run, gives no number that can be trained on, or is no mean over what it is weighed by.
    Returns why it could not be tried, if so; the first of `devices` on which it runs decides."""
    _refuse_class_weights(trial)
    found = with_few_rows(trial)
    if isinstance(found, str):
        return found
    error: Exception | None = None
    for device in devices:
        for drawn in draws(found, device):
            try:
                with _unchanged(found.loss):
                    note = _tried(found, drawn, device)
                    if note is None:
                        _try_masked(found, drawn, device)
                    return note
            except _NotFinite as odd:
                error = error or odd
            except Exception as failed:  # whatever a function says of numbers that it does not like
                if isinstance(failed, InputError) and failed.__cause__ is None:
                    raise
                error = failed if error is None or isinstance(error, _NotFinite) else error
    assert error is not None
    if found.whole and not isinstance(error, _NotFinite):
        _refuse_what_no_numbers_mend(found, error)
    return f"on outputs drawn at random it {_said(error)}"


class _NotFinite(Exception):
    pass


@contextmanager
def _unchanged(loss: Loss) -> Iterator[None]:
    """The buffers of a loss that has some are afterwards what they were."""
    owner = _owner(loss)
    with kept(owner) if owner is not None else nullcontext():
        yield


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, _NotFinite) else cut(f"raises {type(error).__name__}: {' '.join(str(error).split())}")


def _tried(trial: Trial, drawn: tuple[Tensors, Tensors], device: torch.device) -> str | None:
    output, targets = drawn
    if trial.loss.count(targets) == 0:
        return "none of the samples that were looked at counts"

    def loss_of(begin: int, end: int, seed: int = 0) -> Tensor:
        rows = [slice(begin * len(t) // trial.rows, end * len(t) // trial.rows) for t in as_tuple(output)]
        part = as_value([t[own].clone() for t, own in zip(as_tuple(output), rows, strict=True)])
        with drawing(seed, devices=[device]):
            return trial.loss.function(part, as_value([t[begin:end].clone() for t in as_tuple(targets)]))

    whole = loss_of(0, trial.rows)
    _refuse_no_number(trial, whole)
    if is_reentrant([whole]):
        raise InputError(
            f"the loss {REENTRANT}, those of parameters inside among them, which cannot be seen; call "
            "torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
        )
    if held := held_by_loss(whole, as_tuple(output)):
        raise InputError(holds(held, trial.loss, trial.model))
    state = _state(trial.loss)
    value = _finite(whole)
    if _finite(loss_of(0, trial.rows, seed=1)) != value:
        return "it gives another number each time"
    low = [t.dtype for t in (*as_tuple(output), whole) if t.is_floating_point()]
    cuts = _cuts(trial, targets)
    for middle, weights in cuts:
        values = [value, _finite(loss_of(0, middle)), _finite(loss_of(middle, trial.rows))]
        tolerance = max(1e-4, *(4 * torch.finfo(dtype).eps for dtype in low)) * max(map(abs, values))
        if abs(value - _mean(values, weights)) > tolerance:
            parts = select(targets, slice(0, middle)), select(targets, slice(middle, None))
            raise InputError(_no_mean(trial, parts, values, weights, tolerance))
    if changed := [name for name, buffer in _state(trial.loss).items() if name in state and not torch.equal(buffer, state[name])]:
        raise InputError(
            f"the loss keeps state (its buffer {changed[0]!r} changes in each call), and is called once for each "
            "micro-batch, on the ranks of last stages only: let it depend on its arguments alone"
        )
    return None if cuts else "only one of the samples that were looked at counts"


def _try_masked(trial: Trial, drawn: tuple[Tensors, Tensors], device: torch.device) -> None:
    """InputError if the loss is no mean where targets are masked out of which these have none: later batches may have some."""
    loss, output = trial.loss, drawn[0]
    with drawing(0, devices=[device]):  # a GPU would be lost to a label that is out of range
        known = seen(loss, output, drawn[1]) if device.type == "cpu" else None
    for value, targets, labels, likely in masked(loss, drawn[1], known):
        named = replace(trial, loss=replace(loss, ignore_index=int(value))) if labels and loss.weight == "samples" else trial
        try:
            with drawing(0, devices=[device]):
                if likely or trains(loss, output, targets):
                    _tried(named, (output, targets), device)
        except InputError as error:
            if error.__cause__ is None:
                said = f"on targets of which a part was set to {value:g}, as a mask may be in later batches"
                raise InputError(f"{said}, {error}") from None
        except Exception:  # what a loss says of targets that are none
            continue


def _state(loss: Loss) -> dict[str, Tensor]:
    """The values of the buffers of a loss that has some."""
    owner = _owner(loss)
    return {name: buffer.clone() for name, buffer in owner.named_buffers()} if owner is not None else {}


def _owner(loss: Loss) -> nn.Module | None:
    owner = getattr(loss.function, "__self__", loss.function)
    return owner if isinstance(owner, nn.Module) else None


def held_by_loss(loss: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that would get a gradient from this loss beside those of the model's outputs."""
    own = {id(t) for t in outputs}
    return [leaf for leaf in gradient_leaves([loss], {t.grad_fn for t in outputs}) if id(leaf) not in own]


def holds(held: Sequence[Tensor], loss: Loss, model: Model) -> str:
    """What is said of a loss that has parameters."""
    owner = _owner(loss)
    for parameters, whose in (
        (owner.named_parameters() if owner is not None else (), "its own"),
        (model.layers.named_parameters(), "the model's"),
    ):
        names = [name for name, parameter in parameters if parameter is held[0]]
        if names:
            what = f"{whose} parameter {names[0]!r}"
            break
    else:
        what = f"a parameter of shape {tuple(held[0].shape)}"
    return (
        f"the loss depends on {what} beside the model's output: it would get a gradient on each last stage by itself, which "
        "nobody sums, and be in no optimizer. Make what has parameters the last layer of the model; a penalty on weights is the "
        "optimizer's weight_decay"
    )


def _finite(loss: Tensor) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise _NotFinite(f"gives {value}")
    return value


def _cuts(trial: Trial, targets: Tensors) -> list[tuple[int, list[float]]]:
    """Two ways to cut the rows (one could happen to weigh its parts as any other weight does) such that both parts count, as near
    to the middle as can be, with the weights of the whole and of the parts."""
    found = []
    for middle in sorted(range(1, trial.rows), key=lambda m: abs(2 * m - trial.rows)):
        weights = [trial.loss.count(select(targets, s)) for s in (slice(None), slice(0, middle), slice(middle, None))]
        _refuse_weights(trial, weights)
        if min(weights) > 0:
            found.append((middle, weights))
    return found[:2]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Of the two parts' losses."""
    return (weights[1] * values[1] + weights[2] * values[2]) / (weights[1] + weights[2])


def _refuse_no_number(trial: Trial, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"the loss must return a tensor of one number, found {type(value).__name__}")
    if value.numel() != 1:
        raise InputError(
            f"the loss must return one number, found a tensor of shape {tuple(value.shape)} for {trial.what}: return its mean"
        )
    if not value.is_floating_point():
        raise InputError(f"the loss must return a floating-point number, found one of {type_name(value.dtype)}")
    if any(spec.requires_grad for spec in trial.output) and not value.requires_grad:
        raise InputError(DETACHED)


def _refuse_class_weights(trial: Trial) -> None:
    """Where they can be seen, those of classes count, too, that these targets do not have."""
    weights = found[2] if (found := _classes(trial)) is not None else None
    if weights is None or callable(trial.loss.weight) or as_tuple(trial.targets)[0].is_floating_point():
        return
    if float(weights.min()) != float(weights.max()):
        raise InputError(
            f"the loss is no mean weighed by {trial.loss.weight}: it divides by the sum of its class weights "
            f"({float(weights.min()):.6g} to {float(weights.max()):.6g}). {CUT} {GIVE}"
        )


def _refuse_weights(trial: Trial, weights: Sequence[float]) -> None:
    whole, first, second = weights
    if abs(whole - first - second) > 1e-5 * max(whole, first + second):
        raise InputError(
            f"the loss's weight of {trial.rows} samples is {whole:.7g}, of their parts {first:.7g} and {second:.7g}: the weight "
            "of a batch must be the sum of its parts' (return the sum over the targets, and not their mean)"
        )


def _no_mean(
    trial: Trial, parts: tuple[Tensors, Tensors], values: Sequence[float], weights: Sequence[float], tolerance: float
) -> str:
    """All numbers, and what the loss looks like."""
    loss, (first, second) = trial.loss, parts
    own = loss.weight if isinstance(loss.weight, str) else "the function that is given"
    sizes = [batch_size(first) + batch_size(second), batch_size(first), batch_size(second)]
    message = (
        f"the loss is no mean weighed by {own}: on outputs drawn at random it is {values[0]:.6g} for {sizes[0]} samples; it is "
        f"{values[1]:.6g} for {sizes[1]} of them and {values[2]:.6g} for the other {sizes[2]}, whose mean is "
        f"{_mean(values, weights):.6g} (weights {weights[1]:.6g} and {weights[2]:.6g}). {CUT}"
    )
    tokens = [replace(loss, weight="tokens").count(part) for part in (first, second)]
    looks: dict[str, list[float]] = {"samples": [*sizes], "tokens": [sum(tokens), *tokens]}
    if abs(values[0] - values[1] - values[2]) <= tolerance:
        return f"{message} It looks like a sum: return the mean (reduction='mean')"
    for weight, counts in looks.items():
        if weight != loss.weight and min(counts) > 0 and abs(values[0] - _mean(values, counts)) <= tolerance:
            of = "samples" if weight == "samples" else f"the targets that are not {loss.ignore_index}"
            write, argument = f"'weight: {weight}'", repr(weight)
            if weight == "tokens" and loss.ignore_index != USUAL:
                write += f" and 'ignore_index: {loss.ignore_index}'"
                argument = f"lambda targets: (targets != {loss.ignore_index}).sum()"
            return f"{message} It looks like a mean over {of}: write {write} in the job's loss section, or loss_weight={argument}"
    return (
        f"{message} Its weight is neither samples nor tokens. {GIVE}; a loss over pairs of samples, or a root of a mean, is "
        "no mean over samples"
    )


def _refuse_what_no_numbers_mend(trial: Trial, error: Exception) -> None:
    """InputError where the loss cannot run whatever numbers the model gives: their shapes and types are wrong, or the targets."""
    if isinstance(error, NotImplementedError) or "device" in str(error).lower() or "cuda" in str(error).lower():
        return  # it is for another device, or holds tensors there
    reason: Exception | None = error if isinstance(error, IndexError) else None
    with fake_tensors() as fakes:
        output = as_value([fakes.mode.from_tensor(s.empty(torch.device("cpu"))) for s in trial.output])
        targets = as_value([fakes.mode.from_tensor(t) for t in as_tuple(trial.targets)])
        try:
            trial.loss.function(output, targets)
        except Exception as failed:
            reason = failed if not _by_values(failed) else reason
    if reason is not None:
        raise InputError(f"the loss does not run on {trial.what}: {cut(f'{type(error).__name__}: {error}')}") from error


def _by_values(error: Exception) -> bool:
    """Whether only the missing values of fake tensors are in the way."""
    return type(error).__module__.startswith("torch._subclasses") or "fake" in str(error).lower()
