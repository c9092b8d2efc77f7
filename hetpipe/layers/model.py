"""What is trained: layers (an nn.Sequential), a sample of its inputs and targets, and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from hetpipe.documents.job import BatchNorm, CoupledLayers
from hetpipe.files.limits import MOST_LAYERS
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.layers.trials.chain_check import check_chain
from hetpipe.layers.untouched.kinds import Kinds

Tensors = Tensor | tuple[Tensor, ...]
_ALONG = "_hetpipe_along"
LossFunction = Callable[[Any, Any], Tensor]  # of what the last layer gives and the targets, each Tensors
LossWeight = Literal["samples", "tokens"] | Callable[[Any], Tensor | float]


def as_tuple(value: object) -> tuple[Tensor, ...]:
    """A layer's input or output as a tuple of tensors; TypeError naming what else it held."""
    items = tuple(value) if isinstance(value, tuple | list) else (value,)
    for item in items:
        if not isinstance(item, Tensor):
            raise TypeError(f"layers pass a tensor or a tuple of tensors, found {type(item).__name__}")
    return items


def as_value(items: Sequence[Tensor]) -> Tensors:
    """The inverse of `as_tuple`: a single tensor stands for itself."""
    return items[0] if len(items) == 1 else tuple(items)


def send_along(features: Tensor, value: object) -> None:
    """Let what a layer has found out go along with its features, for the next layer, where that is on this device."""
    setattr(features, _ALONG, value)


def came_along(features: Tensor) -> Any:
    """What goes along with them; None where nothing does."""
    return getattr(features, _ALONG, None)


def alongside(features: Tensor, before: Tensor) -> Tensor:
    """Features of the same rows as those before, with what goes along with these, where they are of the same type and place."""
    value = came_along(before)
    if value is not None and (features.dtype, features.device, features.shape) == (before.dtype, before.device, before.shape):
        send_along(features, value)
    return features


def named_layers(layers: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers with their names, one entry a position: a module that stands at two positions (one nn.ReLU for all) is in the
    list twice, while `named_children()` leaves the second out."""
    return [(name, layer) for name, layer in layers._modules.items() if layer is not None]


def batch_size(value: Tensors) -> int:
    """Samples in a batch: dimension 0 of the first tensor."""
    return int(as_tuple(value)[0].shape[0])


RowShapes = tuple[tuple[int, ...], ...]  # of each tensor of a batch, without dimension 0


def row_shapes(value: Tensors) -> RowShapes:
    """The shapes of one sample's tensors."""
    return tuple(tuple(t.shape[1:]) for t in as_tuple(value))


def numbers_of(value: Tensors) -> int:
    """Return the bytes of one sample's tensors."""
    return sum(math.prod(shape) for shape in row_shapes(value))


def sample_bytes(value: Tensors) -> int:
    """Return the bytes of one sample's tensors."""
    return sum(t[:1].numel() * t.element_size() for t in as_tuple(value))


def select(value: Tensors, index: slice | Tensor) -> Tensors:
    """Rows of every tensor of a batch."""
    return as_value([t[index] for t in as_tuple(value)])


def split_rows(value: Tensors, sizes: Sequence[int]) -> list[Tensors]:
    """Cut a batch along dimension 0 into micro-batches of the given sizes."""
    parts = zip(*(torch.split(t, list(sizes)) for t in as_tuple(value)), strict=True)
    return [as_value(part) for part in parts]


def move(value: Tensors, device: torch.device) -> Tensors:
    """The batch on `device`. (To the CPU it must be waited for: nothing on the CPU would.)"""
    return as_value([t.to(device, non_blocking=device.type == "cuda") for t in as_tuple(value)])


@contextmanager
def evaluating(layers: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode that it was in, whatever the user froze."""
    before = [(module, module.training) for module in layers.modules()]  # parents before their children
    layers.eval()
    try:
        yield
    finally:
        for module, training in before:
            if module.training != training:
                module.train(training)  # which some override, to merge weights and to take them apart
        for module, training in before:
            module.training = training  # of one that stands in several places


class Wanted(NamedTuple):
    """The targets of a micro-batch where its output is, and their weight. (Counted there, on a GPU, they would be waited for in
    the middle of the pipeline.)"""

    targets: Tensors
    weight: float


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A mean loss and what it is the mean over. `function(output, targets)` returns the mean over the samples of a batch or
    (weight "tokens") over its targets that differ from `ignore_index`. A weighted mean says what it divides by: a `weight`
    that is a function of the targets returns it, a number for any rows of a batch, that of all rows the sum of its parts'."""

    function: LossFunction
    weight: LossWeight = "samples"
    ignore_index: int = -100

    def __post_init__(self) -> None:
        if not callable(self.weight) and self.weight not in ("samples", "tokens"):
            known = nearest(str(self.weight), ["samples", "tokens"])
            raise InputError(f"loss weight {self.weight!r}{known}, or a function of the targets")

    def count(self, targets: Tensors) -> float:
        """The weight of a batch: its samples, its targets that are not ignored, or what the function says."""
        if self.weight == "samples":
            return batch_size(targets)
        if self.weight == "tokens":
            return int(counted(targets, self.ignore_index).sum())
        try:
            weight = self.weight(targets)
        except InputError:
            raise
        except Exception as error:  # whatever somebody's function does
            raise InputError(f"the function that weighs the loss's targets raises {type(error).__name__}: {error}") from error
        return _number(weight)

    def wanted(self, targets: Tensors, sizes: Sequence[int], device: torch.device) -> list[Wanted]:
        """The targets of each micro-batch, moved, and their weights, counted before they are moved."""
        counts: list[float] = list(sizes)
        if self.weight == "tokens":
            rows = counted(targets, self.ignore_index).reshape(sum(sizes), -1).sum(1).cpu()
            counts = [int(part.sum()) for part in torch.split(rows, list(sizes))]
        elif callable(self.weight):
            counts = [self.count(part) for part in split_rows(targets, sizes)]
        return [Wanted(*pair) for pair in zip(split_rows(move(targets, device), sizes), counts, strict=True)]

    def skips_samples(self, targets: Tensors) -> bool:
        """Whether there are targets that the function is likely to leave out of its mean, which then is none over samples:
        whole numbers equal to `ignore_index`."""
        labels = as_tuple(targets)[0]
        whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        return self.weight == "samples" and whole and not bool(counted(targets, self.ignore_index).all())

    def skipped(self) -> str:
        """What is said of such targets."""
        return (
            f"targets hold {self.ignore_index}, which is to be ignored, but the loss is weighed by samples: write "
            "'weight: tokens' in the job's loss section (hetpipe.wrap: loss_weight='tokens'); where the loss function leaves no "
            "target out, give ignore_index a number that no target has"
        )

    def share(self, output: Tensors, targets: Tensors, denominator: float, count: float | None = None) -> Tensor:
        """The part of the global mean that this batch contributes: its sum over the global `denominator`. A batch without weight
        (in which every target is ignored) contributes zero (its mean would be 0/0; see `lost`), with zero gradients. `count`: the
        weight of the batch, where it is known."""
        if count is None:
            count = self.count(targets)
        if count == 0:
            return self.nothing(output)
        return self.function(output, targets) * (count / denominator)

    def nothing(self, output: Tensors) -> Tensor:
        """Zero, with zero gradients."""
        # not 0 · output: that may be infinite
        empty = [t.reshape(-1)[:0].sum() for t in as_tuple(output) if t.is_floating_point()]
        return sum(empty, torch.zeros((), device=empty[0].device if empty else None))

    def lost(self, output: Tensors, targets: Tensors) -> str | None:
        """What is said of a batch without weight whose mean is a number beside 0: its share is zero, so what it sums is lost."""
        if batch_size(targets) == 0:
            return None
        try:
            with torch.no_grad():
                value = float(self.function(output, targets))
        except Exception:  # whatever a function says of targets of which none counts
            return None
        if not value or math.isnan(value):
            return None
        return (
            f"a micro-batch of {batch_size(targets)} samples weighs 0, but its loss is {value:g}: the loss of a batch is the sum "
            "of its micro-batches' losses, each times its weight, so what this one sums would be lost. Let the weight be above 0 "
            "wherever the loss is not 0: divide by, and weigh by, a little for each sample more, such as targets.sum() + 1e-6 * "
            "len(targets)"
        )


def counted(targets: Tensors, ignore_index: int) -> Tensor:
    """Which targets (of the first tensor) are not ignored."""
    labels = as_tuple(targets)[0]
    if labels.dtype == torch.uint8:  # a byte would compare -100 as 156
        labels = labels.short()
    return labels != ignore_index


def _number(weight: Tensor | float) -> float:
    """What a function says that a batch weighs."""
    try:
        value = float(weight.detach() if isinstance(weight, Tensor) else weight)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"the loss's weight of a batch must be one number, found {shown(weight)}") from None
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"the loss's weight of a batch is {value}; it must be finite and not below 0")
    return value


def cross_entropy(
    output: Tensors, targets: Tensors, ignore_index: int = -100, class_weights: tuple[float, ...] | None = None
) -> Tensor:
    """Mean cross-entropy: logits [..., classes] against class indices [...]; `ignore_index` is ignored. With `class_weights`
    the mean weighted by them: what it divides by is `class_weight`."""
    (logits,), (labels,) = as_tuple(output), as_tuple(targets)
    classes = logits.shape[-1]
    weight = None
    if class_weights is not None:
        if len(class_weights) != classes:
            raise InputError(f"class_weights has {len(class_weights)} entries, and the model's output {classes} classes")
        weight = _weights(class_weights, logits.dtype, logits.device)
    return nn.functional.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1), weight, ignore_index=ignore_index)


def class_weight(targets: Tensors, class_weights: tuple[float, ...], ignore_index: int = -100) -> float:
    """The sum of the weights of a batch's classes, but for those to be ignored."""
    labels = as_tuple(targets)[0][counted(targets, ignore_index)].long()
    wrong = (labels < 0) | (labels >= len(class_weights))
    if bool(wrong.any()):
        raise InputError(f"a target is {int(labels[wrong][0])}, and class_weights has {len(class_weights)} entries")
    return float(_weights(class_weights, torch.float64, labels.device)[labels].sum())


@lru_cache(maxsize=16)  # on a GPU, a copy in the middle of a pipeline would wait for all before it
def _weights(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=dtype, device=device)


def mse(output: Tensors, targets: Tensors) -> Tensor:
    """Mean squared error of two tensors of the same shape."""
    (prediction,), (wanted,) = as_tuple(output), as_tuple(targets)
    if prediction.shape != wanted.shape:  # torch would broadcast, and train something else
        raise InputError(
            f"mse: the model's output has shape {tuple(prediction.shape)}, the targets {tuple(wanted.shape)}; they must be equal"
        )
    return nn.functional.mse_loss(prediction, wanted)


def denoising(output: Tensors, targets: Tensors) -> Tensor:
    """Mean, over samples, of the squared error of what a diffusion model predicts, [b, …], times each sample's weight: `targets`
    are (what is to be predicted [b, …], weight [b]). Of a model that gives variances, too, in as many channels (dimension 1)
    behind those of what it predicts, [b, channels, height, width] (Nichol and Dhariwal 2021, section 3.1), these are left out."""
    (prediction, *_), (wanted, *weights) = as_tuple(output), as_tuple(targets)
    if len(weights) != 1:
        raise InputError(f"denoising: targets must be what is to be predicted, and a weight, found {1 + len(weights)} tensors")
    if weights[0].shape != wanted.shape[:1]:  # torch would broadcast, and weigh something else
        raise InputError(f"denoising: {len(wanted)} samples have weights of shape {tuple(weights[0].shape)}, and need one each")
    if prediction.ndim > 3 and prediction.shape[1] == 2 * wanted.shape[1]:
        prediction = prediction[:, : wanted.shape[1]]
    if prediction.shape != wanted.shape:
        raise InputError(
            f"denoising: the model predicts {tuple(prediction.shape)}, and is to predict {tuple(wanted.shape)}: both must be "
            "equal"
        )
    errors = (prediction.to(wanted.dtype) - wanted).square()
    return (errors.flatten(1).mean(1) * weights[0]).mean()


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "mse": mse, "denoising": denoising}


def accuracy(output: Tensors, targets: Tensors, ignore_index: int = -100) -> tuple[float, int]:
    """(correct predictions, predictions) of logits [..., classes] against class indices [...]; `ignore_index` is ignored."""
    (logits,), (labels,) = as_tuple(output), as_tuple(targets)
    known = counted(targets, ignore_index)
    return float(((logits.argmax(-1) == labels) & known).sum()), int(known.sum())


class ShapedBatch(NamedTuple):
    """A few samples of one shape, and which share of all steps has samples of this shape."""

    inputs: Tensors
    targets: Tensors
    share: float

    def rows(self, size: int) -> ShapedBatch:
        """With so many samples: these, repeated as needed."""
        rows = torch.arange(size) % batch_size(self.inputs)
        return self._replace(inputs=select(self.inputs, rows), targets=select(self.targets, rows))


@dataclass(frozen=True, kw_only=True)
class Model:
    """Layers are the children of `layers`, the unit that is never split. `inputs` and `targets` are a small sample batch
    (dimension 0 counts samples); only their shapes and types matter. Where samples have other shapes from step to step, these are
    as large as any, since memory is planned by them, and `shorter` has a batch of each other shape that is measured. `batch_norm`
    and `coupled_layers`: what the user chose for BatchNorm (`batch_norm.py`), and for other layers that couple samples or keep
    state (`trials/layer_check.py`), if anything. `kinds`: which layers compute the same, where that was found already."""

    name: str
    layers: nn.Sequential
    inputs: Tensors
    targets: Tensors
    loss: Loss
    batch_norm: BatchNorm | None = None
    coupled_layers: CoupledLayers | None = None
    shorter: tuple[ShapedBatch, ...] = ()
    kinds: Kinds | None = None

    def __post_init__(self) -> None:
        check_chain(self.name, self.layers)
        if (choice := self.coupled_layers) not in (None, *get_args(CoupledLayers)):
            raise InputError(f"unknown coupled_layers {choice!r}{nearest(str(choice), get_args(CoupledLayers))}")
        if len(self.layers) == 0:
            raise InputError(f"model {self.name!r} has no layers: its nn.Sequential is empty")
        if len(self.layers) > MOST_LAYERS:
            raise InputError(
                f"model {self.name!r} has {len(self.layers)} layers, the most that are planned are {MOST_LAYERS}: "
                "give children of several layers"
            )
        rows, targets = batch_size(self.inputs), batch_size(self.targets)
        if rows == 0:
            raise InputError(f"the sample of model {self.name!r} holds no samples: give a batch of at least one")
        if rows != targets:
            raise InputError(
                f"the sample of model {self.name!r} has {rows} rows of inputs and {targets} of targets; dimension 0 "
                "of both counts samples"
            )

    def sample(self, size: int) -> tuple[Tensors, Tensors]:
        """Inputs and targets of `size` samples: the sample's rows, repeated as needed."""
        inputs, targets, _ = ShapedBatch(self.inputs, self.targets, 1.0).rows(size)
        return inputs, targets

    def mix(self, size: int) -> list[ShapedBatch]:
        """Batches of `size` samples of each shape, the largest first; their shares sum to 1."""
        largest = ShapedBatch(self.inputs, self.targets, 1.0 - sum(batch.share for batch in self.shorter))
        return [batch.rows(size) for batch in (largest, *self.shorter)]

    def shaped(self, size: int, shapes: RowShapes) -> Tensors:
        """Inputs of `size` samples of these shapes: the sample's, or zeros where it has others."""
        if shapes == row_shapes(self.inputs):
            return self.sample(size)[0]
        return as_value([t.new_zeros(size, *shape) for t, shape in zip(as_tuple(self.inputs), shapes, strict=True)])


FEW_INSIDE = 4  # modules of a layer that is an nn.Sequential, up to which it is taken for a block


def unsplit_note(layers: nn.Sequential) -> str:
    """What is said of layers that hold more modules in a row than the model has layers, such as a body that somebody wrapped: a
    plan never cuts inside of a layer. Empty where there are none."""
    found = [
        f"layer {position} ({name!r}) is an nn.Sequential of {len(layer)} modules and is never split"
        for position, (name, layer) in enumerate(named_layers(layers))
        if isinstance(layer, nn.Sequential) and len(layer) > max(FEW_INSIDE, len(layers))
    ]
    if not found:
        return ""
    whose = "their" if len(found) > 1 else "its"
    return f"{'; '.join(found)}: put {whose} modules into the outer one, and plans may cut between them"
