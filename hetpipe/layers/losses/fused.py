"""The mean of what a head gives that computes its tokens' losses itself: `token_losses`."""

from __future__ import annotations

from torch import Tensor

from hetpipe.files.messages import InputError
from hetpipe.layers.losses.chunked import IGNORED
from hetpipe.layers.model import Tensors, as_tuple, counted


def fused_cross_entropy(output: Tensors, targets: Tensors, ignore_index: int = IGNORED, words: int | None = None) -> Tensor:
    """Mean cross-entropy over the targets [b, t] that are not ignored, of what a head gives for labels that are these targets:
    (losses [b, t], whether the greatest logit was right [b, t]). `words`: of the vocabulary, by which wrong targets are told
    before they are used. InputError if the model gives something else."""
    losses, _ = _of_tokens(output, targets)
    known = counted(targets, ignore_index)
    return losses.where(known, 0.0).sum() / known.sum()


def fused_accuracy(output: Tensors, targets: Tensors, ignore_index: int = IGNORED) -> tuple[float, int]:
    """(correct predictions, predictions) of the same."""
    _, right = _of_tokens(output, targets)
    known = counted(targets, ignore_index)
    return float((right & known).sum()), int(known.sum())


def _of_tokens(output: Tensors, targets: Tensors) -> tuple[Tensor, Tensor]:
    given, wanted = [tuple(t.shape) for t in as_tuple(output)], [tuple(t.shape) for t in as_tuple(targets)]
    if given != wanted * 2 or len(wanted) != 1:
        raise InputError(
            "a fused loss takes a loss of each target and whether it was predicted, two tensors of the targets' shape; the last "
            f"layer gives {', '.join(map(str, given))} for targets of {', '.join(map(str, wanted))}: let it be a head that takes "
            "labels (causal_lm.build(labels=True)), or leave 'fused' out"
        )
    losses, right = as_tuple(output)
    return losses, right
