"""What every back end offers: the Engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from torch import nn

from hetpipe.layers.model import Tensors

Metric = Callable[[Tensors, Tensors], tuple[float, int]]


class Evaluation(NamedTuple):
    """The mean loss of a batch and its weight, and the mean of a metric (None without one) over what it `counted`."""

    loss: float
    metric: float | None
    weight: float
    counted: float = 0.0


class Engine(Protocol):
    """Trains one model by a plan. Every rank calls every method, in the same order."""

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """Forward and backward of one global batch, with every module in the mode it is in; afterwards every gradient is that of
        the whole batch on one device."""
        ...

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that the one global norm is at most `max_norm`; returns the norm before."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for any torch optimizer."""
        ...

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Those of them that train, for any torch optimizer: also where none does, as on a rank that runs forwards only."""
        ...

    def evaluate(self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None) -> Evaluation:
        """Forward only, in evaluation mode; afterwards every module is in the mode that it was in."""
        ...


def take_sizes(planned: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """Micro-batch sizes for a share of `samples` ≤ sum(planned): the planned ones in order, the last one cut short.

    >>> take_sizes((4, 4, 3), 9)
    (4, 4, 1)
    """
    sizes = []
    for size in planned:
        if samples <= 0:
            break
        sizes.append(min(size, samples))
        samples -= sizes[-1]
    return tuple(sizes)


def even_sizes(largest: int, samples: int) -> tuple[int, ...]:
    """Micro-batches of `largest` samples and the remainder."""
    whole, rest = divmod(samples, largest)
    return (largest,) * whole + ((rest,) if rest else ())
