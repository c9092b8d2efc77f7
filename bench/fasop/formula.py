"""FASOP's estimate of a step, as its program computes it (estimate.py, pipe.py and stage.py of github.com/AvatarHwang/FASOP), for
plans whose replicas may differ, which FASOP's do not: each replica is a pipeline by its own cuts and micro-batches.

- A stage computes a third of its time forward and two thirds backward, in 1F1B. A message begins when its sender and its receiver
  have done what comes before; of all messages only those that the first stage sends forward and the last one backward take time.
  What the program reads before it is computed is 0, so a stage's backwards do not wait for its forwards, nor the first stage's
  forwards, once it is warm, for anything: no first stage is the slowest.
- Every replica shares a node's adapter with all others, and 5 % are lost; a link inside a node gives 1 / 3.5 of its bandwidth.
- The gradients of the first stage, by a ring of all replicas' first stages, come after every stage; among the A10s of one node it
  has as many quarters of their bandwidth as there are replicas.
- Embedding and head are summed at the end, by all replicas at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.fasop.published import BETWEEN_BITS_PER_SECOND, BITS_PER_SECOND, DEVICES_PER_NODE, NUMBER_BITS, Model
from hetpipe.exchange.importers.fasop_factors import factor, layer_kinds
from hetpipe.spec.cluster import Cluster
from hetpipe.spec.plan import Plan, ReplicaPlan

Array = NDArray[np.float64]
Times = dict[str, Sequence[float]]  # device type → forward seconds of each layer, for one sample
BLOCK_BIASES = 20800  # parameters of a block beside 12 · hidden²


class Estimate(NamedTuple):
    """Seconds: until the first stage of the slowest replica has done its last backward, and of all."""

    pipeline: float
    step: float


def backward_ends(compute: Array, ahead: float, back: float) -> Array:
    """When each of n stages, whose micro-batches take `compute` seconds [n, m], has done its last backward [n]. `ahead`, `back`:
    seconds of the first stage's messages, and of the last one's."""
    n, m = compute.shape
    if n == 1:
        return np.array([compute.sum()])
    forward, backward, sent, returned = np.zeros((4, n, m))  # ends of both, and of the messages behind them
    for i in range(m):
        for s in range(n):
            warm = min(n - 1 - s, m)
            free = 0.0 if i == 0 else sent[s, i - 1] if i <= warm else returned[s, i - warm - 1]
            forward[s, i] = max(free, sent[s - 1, i] if s else 0.0) + compute[s, i] / 3
            if s + 1 < n:
                taken = 0.0 if i == 0 else forward[s + 1, i - 1] if i <= warm else backward[s + 1, i - warm]
                sent[s, i] = max(forward[s, i], taken) + (ahead if s == 0 else 0.0)
        for s in reversed(range(n)):
            left = m - min(n - 1 - s, m)  # backwards before which forwards still come
            begin = returned[s + 1, i] if s + 1 < n else forward[s, i]
            backward[s, i] = max(begin, backward[s, i - 1] if i >= left and i else 0.0) + compute[s, i] * 2 / 3
            if s:
                taken = backward[s - 1, i - 1] if i >= left - 1 and i else 0.0
                returned[s, i] = max(backward[s, i], taken) + (back if s + 1 == n else 0.0)
    ends: Array = backward[:, -1]
    return ends


def estimate(plan: Plan, model: Model, times: Times, cluster: Cluster) -> Estimate:
    """FASOP's of a plan without tensor parallelism."""
    ends = [_ends(replica, model, times, cluster, len(plan.replicas)) for replica in plan.replicas]
    sums = max(
        end + sum_seconds(plan, model, cluster, kind=_type(cluster, stage.device))
        for replica, found in zip(plan.replicas, ends, strict=True)
        for stage, end in zip(replica.stages, found, strict=True)
    )
    return Estimate(max(float(found[0]) for found in ends), float(sums) + tied_seconds(plan, model, cluster))


def _ends(replica: ReplicaPlan, model: Model, times: Times, cluster: Cluster, replicas: int) -> Array:
    kinds, stages, sizes = layer_kinds(model.name, model.layers), replica.stages, replica.microbatch_sizes

    def seconds(device: str, layers: tuple[int, int], size: int) -> float:
        kind = _type(cluster, device)
        return 3 * sum(factor(model.name, kind, kinds[i], size) * times[kind][i] for i in range(*layers))

    by_size = {size: [seconds(stage.device, stage.layers, size) for stage in stages] for size in set(sizes)}
    compute = np.array([by_size[size] for size in sizes]).T  # [n, m]
    bits, between = max(sizes) * model.sequence * model.hidden * NUMBER_BITS, 1 / 1.05 / replicas
    messages = [bits / _rate(cluster, a.device, b.device, inside=1 / 3.5, between=between) for a, b in pairwise(stages)]
    return backward_ends(compute, *(messages[0], messages[-1]) if messages else (0.0, 0.0))


def sum_seconds(plan: Plan, model: Model, cluster: Cluster, *, kind: str) -> float:
    """Of the first stage's gradients, after a stage on this type of device."""
    R, kinds = len(plan.replicas), layer_kinds(model.name, model.layers)
    if R == 1:
        return 0.0
    parameters = max(
        sum(12 * model.hidden**2 + BLOCK_BIASES for k in kinds[: replica.stages[0].layers[1]] if k not in ("embedding", "head"))
        for replica in plan.replicas
    )
    first = [replica.stages[0].device for replica in plan.replicas]
    rate = min(_rate(cluster, a, b) for a, b in zip(first, [*first[1:], first[0]], strict=True))
    if kind == "A10" and R <= DEVICES_PER_NODE:
        rate *= R / DEVICES_PER_NODE
    return 2 * (R - 1) * (parameters + model.hidden * model.vocabulary) * NUMBER_BITS / (R * rate)


def tied_seconds(plan: Plan, model: Model, cluster: Cluster) -> float:
    """Of the sum of embedding and head."""
    pairs = [(r.stages[0].device, r.stages[-1].device) for r in plan.replicas if len(r.stages) > 1]
    if not model.tied or not pairs:
        return 0.0
    rate = min(_rate(cluster, a, b) for a, b in pairs) / min(len(plan.replicas), DEVICES_PER_NODE)
    return model.hidden * model.vocabulary * NUMBER_BITS / rate


def _type(cluster: Cluster, device: str) -> str:
    return cluster.device(device).type


def _rate(cluster: Cluster, a: str, b: str, *, inside: float = 1.0, between: float = 1.0) -> float:
    """Bits/s from a device to another, of which FASOP counts so much."""
    if cluster.device(a).node == cluster.device(b).node:
        return BITS_PER_SECOND[_type(cluster, a)] * inside
    return BETWEEN_BITS_PER_SECOND * between
