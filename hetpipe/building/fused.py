"""A loss that the model's head computes (`loss: {fused: true}`): its labels come with a sample's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from hetpipe.building.data import Preferences, Ragged
from hetpipe.building.datasets import DataSplits
from hetpipe.building.streams.streamed import Streamed
from hetpipe.documents.job import Job
from hetpipe.documents.sections.loss import REWARD, LossSection
from hetpipe.files.messages import InputError
from hetpipe.layers.losses.chunked import IGNORED
from hetpipe.layers.losses.fused import fused_cross_entropy
from hetpipe.layers.model import Loss


def labels_of(job: Job, model: Callable[..., Any]) -> dict[str, Any]:
    """The argument of the job's model function by which its head computes the loss; nothing where the loss is computed of logits.
    InputError if the job wants it and the function has none."""
    fused, section = job.loss.fused, job.model
    if not fused:
        return {}
    if "labels" not in inspect.signature(model).parameters:
        if fused == "auto":
            return {}
        raise InputError(
            f"loss.fused is true, but model {section.label!r} has no argument 'labels', with which a head computes the loss; "
            "causal_lm has it. Leave 'fused' out, or write 'loss: {name: cross_entropy, fused: auto}'"
        )
    if "labels" in section.args:
        raise InputError("model.args has 'labels', but 'fused' in the loss section sets it. Leave 'labels' out")
    return {"labels": fused}


def rows_of(job: Job, model: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of the job's model function by which its head computes the loss of each token of two rows a sample; nothing
    where the loss is not over preferences. InputError if it is, and the function has no such arguments."""
    if not job.loss.prefers:
        return {}
    if "rows" not in inspect.signature(model).parameters:
        raise InputError(
            f"the loss {job.loss.name} is over two answers a sample, and model {job.model.label!r} has no argument 'rows', which "
            "takes both: take a causal_lm"
        )
    scores = {"score": True} if job.loss.name == REWARD else {}
    return {"labels": "auto", "rows": 2, **scores}


def fused_loss(section: LossSection, layers: nn.Sequential) -> Loss:
    """Of what the head of such layers gives."""
    head: Any = layers[-1]
    function = partial(fused_cross_entropy, ignore_index=section.ignore_index, words=getattr(head, "words", None))
    return Loss(function=function, weight=section.weight, ignore_index=section.ignore_index)


class WithLabels(Dataset[Any]):
    """Samples whose inputs end with their targets, as labels of which -100 is ignored."""

    def __init__(self, samples: Any, ignore_index: int) -> None:
        self.samples, self.ignore_index = samples, ignore_index

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.labelled(self.samples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        many = getattr(self.samples, "__getitems__", None)
        found = many(indices) if many is not None else [self.samples[index] for index in indices]
        return [self.labelled(each) for each in found]

    def labelled(self, sample: Any) -> Any:
        """A sample with its labels."""
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            return sample  # which is told where samples are read
        return self._with_labels(*sample)

    def _with_labels(self, inputs: Any, target: Any) -> tuple[Any, Any]:
        """Of a sample, or of a batch."""
        if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
            raise InputError(f"a fused loss needs a tensor of whole numbers as the target of a sample, found {_told(target)}")
        labels = target.long()
        if self.ignore_index != IGNORED:
            if bool((labels == IGNORED).any()):
                raise InputError(
                    f"a target is {IGNORED}, which is no class, but loss.ignore_index is {self.ignore_index}. Write "
                    f"loss.ignore_index: {IGNORED}, or give other targets"
                )
            labels = labels.masked_fill(labels == self.ignore_index, IGNORED)
        beside = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        return (*beside, labels), target


class PaddedWithLabels(WithLabels):
    """Of samples of different lengths (see `data.Ragged`): a batch is given its labels when it is padded."""

    @property
    def lengths(self) -> Tensor:
        """Of the samples, int64 [samples]."""
        return self.samples.lengths  # type: ignore[no-any-return]

    @property
    def sizes(self) -> Sequence[int]:
        """To which batches are padded."""
        return self.samples.sizes  # type: ignore[no-any-return]

    def padded(self, samples: Sequence[Any], size: int) -> tuple[Any, Any]:
        """A batch of this size, with labels."""
        return self._with_labels(*self.samples.padded(samples, size))

    def labelled(self, sample: Any) -> Any:
        """The sample as it is: its batch is given labels."""
        return sample


def with_labels(splits: DataSplits, section: LossSection) -> DataSplits:
    """The same samples, with labels."""

    def own(samples: Any) -> Any:
        if isinstance(samples, Streamed):
            return samples.then(WithLabels(samples, section.ignore_index).labelled)
        kind = PaddedWithLabels if isinstance(samples, Ragged) else WithLabels
        return kind(samples, section.ignore_index)

    return replace(splits, train=own(splits.train), test=own(splits.test) if splits.test is not None else None)


def scored(splits: DataSplits) -> DataSplits:
    """Preferences as a reward model reads them: whole rows, of which the last token is marked."""

    def own(samples: Any) -> Any:
        if not isinstance(samples, Preferences):
            return samples
        return samples.scored()

    return replace(splits, train=own(splits.train), test=own(splits.test))


def _told(target: object) -> str:
    return f"{target.dtype}" if isinstance(target, Tensor) else type(target).__name__
