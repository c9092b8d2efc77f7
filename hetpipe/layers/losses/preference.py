"""Losses over a better and a worse answer to the same question.

Shapes: b samples, each of two rows of t tokens, the better answer first. But for `reward`, outputs are (losses [b, 2, t]
of each token, 0 where it is not learned; [b, 2, t], which is not used), as a head with labels gives them. Targets are
floating-point numbers [b, 2, 2]: for each row the log-probability of its answer by the reference, and of how many tokens the
answer is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, as_tuple

BETA, GAMMA = 0.1, 0.5


def dpo(output: Tensors, targets: Tensors, beta: float = BETA) -> Tensor:
    """Direct preference optimization (Rafailov et al. 2023, Direct Preference Optimization, equation 7), the mean over samples:
    how much likelier the better answer has become than the worse one, against a reference."""
    return -nn.functional.logsigmoid(beta * _lead(*_by_answer(output, targets)[:2])).mean()


def simpo(output: Tensors, targets: Tensors, beta: float = BETA, gamma: float = GAMMA) -> Tensor:
    """Simple preference optimization (Meng et al. 2024, SimPO, equation 6), the mean over samples: without a reference, of the
    mean log-probability of a token; `gamma` is by how much the better answer has to lead."""
    means = _means(output, targets)
    return -nn.functional.logsigmoid(beta * (means[:, 0] - means[:, 1]) - gamma).mean()


def orpo(output: Tensors, targets: Tensors, beta: float = BETA) -> Tensor:
    """Odds ratio preference optimization (Hong et al. 2024, ORPO, equations 6 and 7), the mean over samples, without a reference:
    the better answer is learned, and `beta` (their lambda) times how far its odds are behind those of the worse one. Both are of
    the mean log-probability of a token, so that each sample counts the same however long its answers are."""
    means = _means(output, targets)
    below = means.clamp(max=-torch.finfo(means.dtype).eps)  # the odds of what is certain have no end
    odds = below - _log_of_rest(below)
    return (-means[:, 0] - beta * nn.functional.logsigmoid(odds[:, 0] - odds[:, 1])).mean()


def reward(output: Tensors, targets: Tensors, gamma: float = 0.0) -> Tensor:
    """The loss of a reward model (Ouyang et al. 2022, Training language models to follow instructions, equation 1), the mean over
    samples: how likely it is, by Bradley and Terry, that the better answer is preferred. `gamma` is by how much the score of the
    better answer has to lead (Touvron et al. 2023, Llama 2, equation 2). Outputs are scores [b, 2]."""
    scores = _scores(output, targets)
    return -nn.functional.logsigmoid(scores[:, 0] - scores[:, 1] - gamma).mean()


def reward_accuracy(output: Tensors, targets: Tensors) -> tuple[float, int]:
    """(samples whose better answer has the greater score, samples)."""
    scores = _scores(output, targets)
    return float((scores[:, 0] > scores[:, 1]).sum()), len(scores)


def dpo_accuracy(output: Tensors, targets: Tensors) -> tuple[float, int]:
    """(samples whose better answer has gained more than the worse one, samples)."""
    lead = _lead(*_by_answer(output, targets)[:2])
    return float((lead > 0).sum()), len(lead)


def mean_accuracy(output: Tensors, targets: Tensors) -> tuple[float, int]:
    """(samples whose better answer is likelier by the token than the worse one, samples)."""
    means = _means(output, targets)
    return float((means[:, 0] > means[:, 1]).sum()), len(means)


def log_probabilities(output: Tensors) -> Tensor:
    """Of each answer: [b, 2]."""
    losses = as_tuple(output)[0]
    return -losses.sum(-1)


def _by_answer(output: Tensors, targets: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, those of the reference, and the number of tokens, [b, 2] each. InputError if the model gives something
    else."""
    losses, (wanted,) = as_tuple(output)[0], as_tuple(targets)
    if losses.ndim != 3 or losses.shape[1] != 2 or wanted.shape != (len(losses), 2, 2):
        raise InputError(
            "a loss over preferences takes the losses of the tokens of two answers [b, 2, t] and targets [b, 2, 2], and the "
            f"model gives {tuple(losses.shape)} for targets {tuple(wanted.shape)}: take data: {{name: preferences}} "
            "and a causal_lm"
        )
    return log_probabilities(output), wanted[..., 0].to(losses.dtype), wanted[..., 1].to(losses.dtype)


def _scores(output: Tensors, targets: Tensors) -> Tensor:
    """InputError if the model gives something else than scores [b, 2]."""
    found, wanted = as_tuple(output), as_tuple(targets)[0]
    if len(found) != 1 or found[0].shape != (len(wanted), 2):
        raise InputError(
            f"the loss of a reward model takes scores [b, 2], and the model gives {tuple(found[0].shape)}: take data: {{name: "
            "preferences}} and a causal_lm"
        )
    return found[0]


def _lead(found: Tensor, reference: Tensor) -> Tensor:
    gained = found - reference
    return gained[:, 0] - gained[:, 1]


def _means(output: Tensors, targets: Tensors) -> Tensor:
    """The mean log-probability of a token of each answer: [b, 2]."""
    found, _, tokens = _by_answer(output, targets)
    return found / tokens.clamp(min=1)


def _log_of_rest(logarithms: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0, in the one of two ways that is accurate (Maechler 2012, Accurately computing
    log(1 - exp(-|a|)), equation 7)."""
    small = logarithms > -math.log(2)
    return torch.where(small, (-logarithms.expm1()).log(), (-logarithms.exp()).log1p())
