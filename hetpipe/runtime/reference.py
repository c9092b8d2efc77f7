"""One device, the whole global batch at once: what every plan must reproduce."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hetpipe.layers.model import Loss, Tensors, evaluating
from hetpipe.layers.weights import materialise
from hetpipe.runtime.base import Evaluation, Metric


class ReferenceEngine:
    """The one-device truth, with the Engine's methods."""

    def __init__(self, layers: nn.Sequential, loss: Loss) -> None:
        materialise(layers)
        self.layers = layers
        self.loss = loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, each once."""
        return self.layers.parameters()

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """Gradients of the loss over the whole batch."""
        assert inputs is not None and targets is not None
        self.layers.zero_grad(set_to_none=True)
        loss = self.loss.share(self.layers(inputs), targets, self.loss.count(targets) or 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip by the global norm."""
        squares = [p.grad.double().square().sum() for p in self.layers.parameters() if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        factor = min(1.0, max_norm / (norm + 1e-6))
        for p in self.layers.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
        return norm

    def evaluate(
        self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None
    ) -> Evaluation:
        """Forward only, in evaluation mode."""
        assert inputs is not None and targets is not None
        with evaluating(self.layers), torch.no_grad():
            output = self.layers(inputs)
            weight = self.loss.count(targets)
            loss = float(self.loss.share(output, targets, weight or 1.0))
        if metric is None:
            return Evaluation(loss, None, weight)
        total, count = metric(output, targets)
        return Evaluation(loss, total / max(1, count), weight, count)
