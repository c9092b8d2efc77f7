"""Losses that are means, of which nothing is to be refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.layers.model import cross_entropy, mse
from tests.support.losses import LABELS, LOGITS, NUMBERS, ONES, POINTS, TOKENS, WORDS, spec


def of_words(output: Tensor, targets: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), targets, **more)


def ctc(output: Tensor, targets: Tensor) -> Tensor:
    lengths = torch.full((len(targets),), 5), torch.full((len(targets),), 2)
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), targets[:, :2] % 6 + 1, *lengths)


class Shifted(nn.CrossEntropyLoss):
    """Of logits [rows, words, classes]."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2), target)


MEANS: dict[str, tuple[Any, ...]] = {
    "cross entropy": (F.cross_entropy, LABELS, LOGITS),
    "a module": (nn.CrossEntropyLoss(), LABELS, LOGITS),
    "label smoothing": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), LABELS, LOGITS),
    "one sample": (F.cross_entropy, LABELS[:1], spec(1, 4)),
    "one label": (F.cross_entropy, LABELS * 0, LOGITS),
    "bfloat16": (F.cross_entropy, LABELS, spec(12, 4, dtype=torch.bfloat16)),
    "float16": (F.cross_entropy, LABELS, spec(12, 4, dtype=torch.float16)),
    "float64": (F.cross_entropy, LABELS, spec(12, 4, dtype=torch.float64)),
    "log-likelihood": (nn.NLLLoss(), LABELS, LOGITS),
    "images": (F.cross_entropy, LABELS.reshape(3, 2, 2), spec(3, 4, 2, 2)),
    "words": (cross_entropy, TOKENS, WORDS),
    "shifted words": (lambda o, t: of_words(o[:, :-1], t[:, 1:]), TOKENS, WORDS),
    "mse": (mse, POINTS, NUMBERS),
    "squeezed": (lambda o, t: F.mse_loss(o.squeeze(), t), POINTS[:, 0], spec(6, 1)),
    "probabilities": (nn.BCELoss(), ONES, spec(6, 1)),
    "logits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), ONES, spec(6, 1)),
    "divergence": (lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"), POINTS, NUMBERS),
    "rates": (nn.PoissonNLLLoss(log_input=False), POINTS.abs(), NUMBERS),
    "alignments": (ctc, TOKENS, spec(6, 5, 9)),
    "a constant": (lambda o, t: o.sum() * 0 + 3, LABELS, LOGITS),
    "auxiliary outputs": (lambda o, t: F.cross_entropy(o[0], t) + 0.1 * o[1].square().mean(), LABELS, LOGITS, spec(12, 2)),
    "a frozen model": (F.cross_entropy, LABELS, spec(12, 4, requires_grad=False)),
    "very many words": (cross_entropy, torch.zeros(2, 4096, dtype=torch.int64), spec(2, 4096, 20_000)),
}


def focal(output: Tensor, targets: Tensor) -> Tensor:
    right = output.log_softmax(1).gather(1, targets[:, None])
    return (-((1 - right.exp()) ** 2) * right).mean()


def penalised(output: Tensor, targets: Tensor) -> Tensor:
    """Takes a gradient inside."""
    (slope,) = torch.autograd.grad(output.tanh().sum(), output, create_graph=True)
    return F.mse_loss(output, targets) + slope.square().mean()


COUNTS = torch.arange(18).reshape(6, 3) % 5
MEANS.update(
    {
        "focal": (focal, LABELS, LOGITS),
        "labels by index": (lambda o, t: -o.log_softmax(1)[torch.arange(len(t)), t].mean(), LABELS, LOGITS),
        "margins": (nn.MultiMarginLoss(), LABELS, LOGITS),
        "several labels": (nn.MultiLabelMarginLoss(), torch.tensor([[1, 0, -1, -1], [3, -1, 0, 0]] * 6), LOGITS),
        "soft margins": (nn.MultiLabelSoftMarginLoss(), COUNTS % 2, NUMBERS),
        "signs": (lambda o, t: F.soft_margin_loss(o, 2.0 * t - 1), COUNTS % 2, NUMBERS),
        "whole numbers": (lambda o, t: F.mse_loss(o, t.float()), COUNTS, NUMBERS),
        "counts": (lambda o, t: F.poisson_nll_loss(o, t.float()), COUNTS, NUMBERS),
        "bytes": (lambda o, t: F.cross_entropy(o, t.long()), LABELS.to(torch.uint8), LOGITS),
        "clamped labels": (lambda o, t: F.cross_entropy(o, t.clamp(min=0)), LABELS, LOGITS),
        "Huber": (nn.HuberLoss(), POINTS, NUMBERS),
        "relative": (lambda o, t: ((o - t).abs() / t.abs().clamp(min=0.1)).mean(), POINTS, NUMBERS),
        "logarithms": (lambda o, t: F.mse_loss(o, t.log1p()), POINTS.abs(), NUMBERS),
        "quantiles": (lambda o, t: torch.maximum(0.9 * (t - o), 0.1 * (o - t)).mean(), POINTS, NUMBERS),
        "chances": (F.cross_entropy, POINTS.softmax(1), NUMBERS),
        "what is no number is 0": (lambda o, t: F.mse_loss(o, t).nan_to_num(), POINTS, NUMBERS),
        "targets that are no numbers are 0": (lambda o, t: F.mse_loss(o, t.nan_to_num()), POINTS, NUMBERS),
        "a gradient inside": (penalised, POINTS, NUMBERS),
        "overlap of each sample": (
            lambda o, t: (1 - 2 * (o.sigmoid() * t).sum(1) / (o.sigmoid() + t).sum(1)).mean(),
            POINTS.sigmoid(),
            NUMBERS,
        ),
        "pairs of signs": (lambda o, t: F.hinge_embedding_loss(o.square().sum(1), 2 * t - 1), LABELS % 2, LOGITS),
        "alignments, as they are": (
            lambda o, t: F.ctc_loss(
                o.log_softmax(-1).transpose(0, 1), t[:, :2], torch.full((len(t),), 5), torch.full((len(t),), 2)
            ),
            TOKENS + 1,
            spec(6, 5, 9),
        ),
    }
)
