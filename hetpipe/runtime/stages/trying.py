"""A stage that passes a few samples on, together and apart, so that the layers of all stages can be tried on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetpipe.layers.model import Tensors, as_tuple, as_value
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.stage import Stage
from hetpipe.layers.trials.still import Still
from hetpipe.layers.weights import eagerly


class Trying(Stage):
    """Runs a stage as if nothing were drawn, and keeps what entered it with each micro-batch. Where a layer does not run on so
    few samples, zeros go on, of what the next stage has made room for: what its layers then do is no fault of theirs."""

    def __init__(self, stage: Stage, leaves: Sequence[Sequence[TensorSpec]]) -> None:
        super().__init__()
        self.entered: list[tuple[Tensor, ...]] = []
        self._run, self._leaves = stage.forward, leaves

    def forward(self, *tensors: Tensor) -> Tensors:
        """One micro-batch."""
        wanted = self._leaves[len(self.entered)]
        self.entered.append(tuple(t.detach().clone() for t in tensors))
        try:
            with eagerly(), Still():
                output = self._run(*tensors)
            if [(tuple(t.shape), t.dtype) for t in as_tuple(output)] == [(s.shape, s.dtype) for s in wanted]:
                return output
        except Exception:  # it says so again where it is tried by itself
            pass
        return as_value([torch.zeros(s.shape, dtype=s.dtype, device=tensors[0].device) for s in wanted])
