"""Losses over a better and a worse answer to the same question.

Shapes: b samples, each of two rows of t tokens, the better answer first. Outputs are (losses [b, 2, t] of each token, 0 where it
is not learned; [b, 2, t], which is not used), as a head with labels gives them. Targets are floating-point numbers [b, 2, 2]: for
each row the log-probability of its answer by the reference, and of how many tokens the answer is.
"""

from __future__ import annotations

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
    chosen, _, tokens = _by_answer(output, targets)
    means = chosen / tokens.clamp(min=1)
    return -nn.functional.logsigmoid(beta * (means[:, 0] - means[:, 1]) - gamma).mean()


def dpo_accuracy(output: Tensors, targets: Tensors) -> tuple[float, int]:
    """(samples whose better answer has gained more than the worse one, samples)."""
    lead = _lead(*_by_answer(output, targets)[:2])
    return float((lead > 0).sum()), len(lead)


def simpo_accuracy(output: Tensors, targets: Tensors) -> tuple[float, int]:
    """(samples whose better answer is likelier by the token than the worse one, samples)."""
    chosen, _, tokens = _by_answer(output, targets)
    means = chosen / tokens.clamp(min=1)
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


def _lead(found: Tensor, reference: Tensor) -> Tensor:
    gained = found - reference
    return gained[:, 0] - gained[:, 1]
