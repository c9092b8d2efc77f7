"""Cross-entropy of the features that go into a linear head: a chunk of tokens at a time, in forward and, where the head trains,
again in backward.

torch 2.13 has such a function, `linear_cross_entropy`, which with reduction="none" computes each chunk again in backward, too. It
is not used: older releases have none, its loss has the type of the features (three digits in bfloat16), it takes no part in
autocast, and whether the greatest logit was right, which evaluations count, would take all products once more. With "sum" it
makes the gradients in its forward: each micro-batch in flight would keep one of the weight's size.

Shapes: n tokens, w features, v words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100  # the label of a token without a loss
CHUNK = 256
"""Tokens whose logits are in memory at once. A product of c tokens and the weight does 2·c operations for each number of the
weight that it reads, of 2 bytes in half precision: c operations a byte. Cards do 150 (A100) to 300 (H100) in the time in which
they read a byte, processors 10 to 50: fewer tokens wait for memory, more are hardly faster."""


def token_losses(features: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(the cross-entropy of each token, 0 where its label is -100; whether its greatest logit is its label's).

    Args:
        features: [..., w], what the head is given.
        weight: [v, w], of the head.
        bias: [v], or None.
        labels: [...], whole numbers: from 0 to v - 1, or -100.

    Returns:
        Losses [...] in float32, or float64 if the features are, and booleans [...]. Under autocast, products are computed in its
        type; softmax and sums never in less than float32.

    Raises:
        IndexError or RuntimeError: a label is no word (on a GPU, as torch's own cross-entropy, later).
    """
    kind = features.device.type
    lower = torch.is_autocast_enabled(kind) and features.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if lower else torch.promote_types(features.dtype, weight.dtype)
    early = _is_made_early(features, weight, bias, dtype)
    with torch.autocast(kind, enabled=False):
        flat = features.reshape(-1, features.shape[-1]), labels.reshape(-1).long()
        losses, right = _TokenLosses.apply(*flat, weight, bias, dtype, early)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape), right.view(labels.shape)


def losses_of_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same of logits [..., v] that are there."""
    wide = logits.to(_wide(logits.dtype)).reshape(-1, logits.shape[-1])
    losses = nn.functional.cross_entropy(wide, labels.reshape(-1).long(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape), logits.argmax(-1) == labels


def _is_made_early(features: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether forward makes the features' gradient, up to the factor of each token that backward brings. That takes two
    products in place of three where the head does not train. Where it does, backward needs the logits again, and nothing is won.

    Features in 16 bits would be rounded once more, behind that factor; and products in float16 would lose the small probabilities
    that the loss scale, which is part of that factor, lifts above its least number. Both are computed in backward."""
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    wanted = torch.is_grad_enabled() and features.requires_grad and not trains
    return wanted and features.dtype == _wide(features.dtype) and dtype != torch.float16


class _TokenLosses(torch.autograd.Function):
    """Keeps of each token its features and the logarithm of the sum of its exponentials, or the gradient of its loss by its
    features (`early`), which has their size; nothing of the vocabulary's size."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, early: bool
    ) -> Any:
        """`dtype`: of products. `early`: see `_is_made_early`."""
        head = _cast(weight, bias, dtype)
        gradients = torch.empty_like(features) if early else None
        losses = features.new_empty(len(features), dtype=_wide(dtype))
        sums, right = torch.empty_like(losses), torch.empty_like(labels, dtype=torch.bool)
        for part in _chunks(len(features)):
            logits = nn.functional.linear(features[part].to(dtype), *head).to(losses.dtype)  # [c, v]
            known = labels[part] != IGNORED
            own = labels[part].where(known, 0)
            greatest, best = logits.max(-1)
            wanted = logits.gather(1, own[:, None]).squeeze(1)
            total = logits.sub_(greatest[:, None]).exp_().sum(-1)
            sums[part] = total.log().add_(greatest)
            losses[part] = (sums[part] - wanted).where(known, 0.0)
            right[part] = best == labels[part]
            if gradients is not None:
                gradients[part] = _less_own(logits.div_(total[:, None]), own).to(dtype) @ head[0]
        ctx.save_for_backward(*((gradients, labels) if early else (features, labels, weight, bias, sums)))
        ctx.dtype, ctx.early = dtype, early
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _right: Tensor) -> Any:
        """`upstream`: [n], the gradient of each token's loss."""
        if ctx.early:
            gradients, labels = ctx.saved_tensors
            of_features = gradients * upstream.where(labels != IGNORED, 0.0)[:, None]
            return of_features.to(gradients.dtype), None, None, None, None, None
        features, labels, weight, bias, sums = ctx.saved_tensors
        wanted, dtype = ctx.needs_input_grad, ctx.dtype
        head = _cast(weight, bias, dtype)
        of_features = torch.empty_like(features) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if wanted[2] else None
        of_bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if wanted[3] else None
        upstream = upstream.where(labels != IGNORED, 0.0)[:, None]
        with torch.autocast(features.device.type, enabled=False):  # whatever the caller's is
            for part in _chunks(len(features)):
                inputs = features[part].to(dtype)
                logits = nn.functional.linear(inputs, *head).to(sums.dtype)  # [c, v]
                changes = _less_own(logits.sub_(sums[part, None]).exp_(), labels[part].clamp(min=0))
                changes.mul_(upstream[part])
                if of_bias is not None:
                    of_bias += changes.sum(0)
                changes = changes.to(dtype)
                if of_features is not None:
                    of_features[part] = changes @ head[0]
                if of_weight is not None and of_weight.dtype == dtype:
                    of_weight.addmm_(changes.T, inputs)
                elif of_weight is not None:
                    of_weight += changes.T @ inputs
        return of_features, None, _as(of_weight, weight), _as(of_bias, bias), None, None


def _less_own(probabilities: Tensor, own: Tensor) -> Tensor:
    """Return probabilities [c, v] less one at each token's own word [c], in the same memory."""
    return probabilities.scatter_add_(1, own[:, None], probabilities.new_tensor(-1.0).expand(len(own), 1))


def _chunks(tokens: int) -> Iterator[slice]:
    return (slice(begin, begin + CHUNK) for begin in range(0, tokens, CHUNK))


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), bias.to(dtype) if bias is not None else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums are kept."""
    return torch.promote_types(dtype, torch.float32)


def _as(gradient: Tensor | None, of: Tensor) -> Tensor | None:
    return gradient.to(of.dtype) if gradient is not None else None
