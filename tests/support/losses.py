"""Targets of a few kinds, and what is said of a loss of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, LossWeight, Model, Tensors, mse
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.trials.loss_check import check_labels, check_loss
from hetpipe.layers.trials.loss_trial import Trial

LABELS = torch.tensor([3, 0, 2, 2, 1, 0, 3, 1, 1, 2, 0, 3])

TOKENS = torch.arange(30).reshape(6, 5) % 7

IGNORED = torch.where(torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 0, 0]] * 3, dtype=torch.bool), -100, TOKENS)

WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5])

POINTS = torch.linspace(-2, 3, 18).reshape(6, 3)

ONES = (torch.arange(6) % 2).float()[:, None]


def spec(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, dtype, requires_grad)


LOGITS, WORDS, NUMBERS = spec(12, 4), spec(6, 5, 7), spec(6, 3)
MODEL = Model(
    name="m", layers=nn.Sequential(OrderedDict(head=nn.Linear(1, 1))), inputs=POINTS, targets=POINTS, loss=Loss(function=mse)
)


def tried(
    function: Any, targets: Tensors, *output: TensorSpec, weight: LossWeight = "samples", rows: int | None = None
) -> str | None:
    trial = Trial(
        model=MODEL,
        loss=Loss(function=function, weight=weight),
        output=output,
        targets=targets,
        rows=output[0].shape[0] if rows is None else rows,
    )
    check_labels(trial, "the sample")
    return check_loss(trial)


def refused(function: Any, targets: Tensors, *output: TensorSpec, weight: LossWeight = "samples", rows: int | None = None) -> str:
    with pytest.raises(InputError) as caught:
        tried(function, targets, *output, weight=weight, rows=rows)
    return str(caught.value)
