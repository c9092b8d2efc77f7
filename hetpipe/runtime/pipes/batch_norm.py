"""Running statistics of BatchNorm that are those of the whole batch, though each micro-batch is normalised by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hetpipe.layers.batch_norm import BATCH_NORMS, AnyBatchNorm
from hetpipe.processes.world import World


class DeferredStatistics:
    """Sums what enters each BatchNorm over the micro-batches of a step and over all replicas, in float64, and updates the running
    statistics once, with the mean and the unbiased variance of all of it. So they do not depend on how the batch was cut, are
    the same in every replica, and a step with few micro-batches is committed like any other.

    Use: `begin()`, forward of all micro-batches, `pause()`, backward (which may recompute), `commit(world)`.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._norms = [m for m in layers.modules() if isinstance(m, BATCH_NORMS) and m.running_mean is not None]
        self._sums: list[Tensor] = []
        self._counting = False
        self._handles = [m.register_forward_pre_hook(self._count) for m in self._norms]

    def begin(self) -> None:
        """A step begins: the norms leave their statistics alone."""
        self._sums = [torch.zeros(2 * m.num_features + 1, dtype=torch.float64, device=_mean(m).device) for m in self._norms]
        for norm in self._norms:
            norm.track_running_stats = False
        self._counting = True

    def pause(self) -> None:
        """What comes is no new micro-batch."""
        self._counting = False

    def _count(self, norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        if not (self._counting and norm.training):
            return
        values = given[0].detach().double().transpose(0, 1).flatten(1)  # [features, whatever counts]
        sums = self._sums[self._norms.index(norm)]  # type: ignore[arg-type]
        sums[:-1] += torch.cat([values.sum(1), values.square().sum(1)])
        sums[-1] += values.shape[1]  # a number: a tensor of it would be copied to a GPU, which waits for all before it

    def commit(self, world: World) -> None:
        """The step ends. Collective."""
        self._counting = False
        found = world.sum(torch.cat([s.cpu() for s in self._sums]).tolist()) if self._sums else []
        for norm in self._norms:
            norm.track_running_stats = True
            features = norm.num_features
            own = torch.tensor(found[: 2 * features + 1], dtype=torch.float64)
            found = found[2 * features + 1 :]
            count = float(own[-1])
            if count:
                mean = own[:features] / count
                variance = (own[features:-1] / count - mean**2) * (count / max(1.0, count - 1))
                _update(norm, mean, variance)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _mean(norm: AnyBatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _update(norm: AnyBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.copy_(running.double().cpu().lerp(new, share))
