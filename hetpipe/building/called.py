"""How a model is called: which tensors come beside tokens, for which rows of a batch a model of transformers makes a mask because
of them, and which names a model's inputs have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hetpipe.building.datasets import Called, DataSplits
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, as_tuple


def extras_of(layers: nn.Sequential) -> tuple[str, ...] | None:
    """What a model takes beside tokens, by name; None where its layers do not say so."""
    every = (getattr(layer, "extras", None) for layer in layers)
    return next((own for own in every if isinstance(own, tuple)), None)


def masked_first(inputs: Tensors, names: Sequence[str] | None) -> Tensor:
    """The order of a batch's rows, int64 [b], that puts those first for which a model of transformers makes a mask: whose
    positions begin anew, or in which a mask leaves tokens out. A micro-batch with such a row has a mask for all of its rows, each
    of the square of its length, and a micro-batch without one has none, so it is by such rows that a model must be measured.
    `names`: as in DataSplits."""
    rows, masked = as_tuple(inputs), torch.zeros(len(as_tuple(inputs)[0]), dtype=torch.bool)
    for name, given in zip(names or (), rows, strict=False):
        if name == "position_ids" and given.ndim == 2:
            masked |= (given.diff() != 1).any(1)
        elif name == "attention_mask" and given.ndim == 2:
            masked |= (given == 0).any(1)
    return masked.logical_not().to(torch.int64).argsort(stable=True)


def refuse_other_inputs(job: Job, layers: nn.Sequential, extras: Sequence[str], *, named: bool) -> None:
    """InputError if the model takes one of the data's tensors for another: a mask for positions, say. A model of ours takes a
    mask behind the tokens, if anything, where neither its function nor its layers name what they take."""
    found = extras_of(layers)
    if found is None and (named or job.model.target is not None):
        return
    own = ("attention_mask",) if found is None else found
    if own[: len(extras)] == tuple(extras):
        return
    advice = f"write extras: [{', '.join(extras)}] in its args, or leave extras out there"
    if found is None:
        advice = "take model causal_lm, or data without them (pack: false)"
    raise InputError(
        f"data {job.data.label!r} gives {', '.join(extras)} beside tokens, but model {job.model.label!r} takes "
        f"{', '.join(own) or 'nothing'}. To fix this, {advice}"
    )


def called_with(job: Job, data: DataSplits) -> Called:
    """How the data say that the job's model is called. InputError where they do not."""
    if data.called is None:
        raise InputError(
            f"model {job.model.label!r} takes its inputs by name, and data {job.data.label!r} has no names for them: use data "
            "latents, or a function that gives DataSplits(called=…)"
        )
    return data.called
