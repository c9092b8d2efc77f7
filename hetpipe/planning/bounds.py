"""The fluid lower bound: how fast any system could make a step with these devices, whatever its partition or
schedule."""

from __future__ import annotations

import math
from collections import Counter
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.planning.partition import Problem
from hetpipe.planning.programs import Program

Array = NDArray[np.float64]


def best_seconds_per_sample(measurement: Measurement, global_batch: int) -> Array:
    """τ: least device-seconds (forward + backward) per sample of each layer, [L], over all micro-batch sizes
    up to the largest measured one and the global batch. Times are linear between measured sizes, so time /
    size is monotone there and its least value is at a measured size or at an end of the range."""
    largest = min(measurement.microbatch_sizes[-1], global_batch)
    ends = {1, largest, *(b for b in measurement.microbatch_sizes if b <= largest)}
    below = range(1, min(measurement.microbatch_sizes[0], largest))  # extrapolated, and cut off at zero: look at each
    rows = []
    for b in sorted({*ends, *below}):
        forward, backward = measurement.times(b)
        rows.append((forward + backward) / b)
    best: Array = np.stack(rows).min(axis=0)
    return best


def fluid_bound(problem: Problem) -> float:
    """Seconds that no step of any plan (with micro-batches within the measured sizes) can beat.

        min T  such that  Σ_k x(l, k) = B                               for every layer l,
                          Σ_l x(l, k) · (τ(l, k) + o(l, k) / B) ≤ n_k · T  for every type k,

    x(l, k) ≥ 0 samples of layer l done on the n_k devices of type k, τ the best device-seconds per sample, o
    the device-seconds of the layer's optimizer; both the least over the measured tensor-parallel degrees t that a
    node has devices for, as t times the seconds at degree t (a group of t devices is busy all at once).

    *Proof.* In any plan let x(l, d) be the samples of layer l that device d does; they sum to B over the
    devices. A device computes one action at a time, each at least τ per sample (recompute and overheads only
    add to it), so its part of a pipeline takes P(d) ≥ Σ_l x(l, d) τ(l, d). A device that does any sample of l
    holds l and steps its optimizer once a step, before its pipeline begins, which takes O(d) ≥ Σ_{l: x > 0}
    o(l, d) ≥ Σ_l o(l, d) x(l, d) / B. The step T is at least O(d) + P(d) for every d; sums over the devices of
    one type give the rows above. Memory, links, gradient sums, waiting and whole micro-batches are relaxed. ∎

    The number returned comes from the dual, so that it holds whatever the solver's tolerance: for any λ ≥ 0
    with Σ n_k λ_k = 1, T ≥ Σ_l B · min_k λ_k (τ(l, k) + o(l, k) / B). One LP of L·K variables (HiGHS, Huangfu
    and Hall 2018)."""
    kinds, number, seconds = work_seconds(problem)
    if not kinds:
        return math.inf  # no plan at all
    return max(_dual(_weights(seconds, number), seconds), *(_dual(w, seconds) for w in _simple_weights(seconds, number)))


def fluid_price(problem: Problem, deadline: float) -> float:
    """Price per hour × seconds that no step of any plan within the deadline D can beat, with the work of `fluid_bound`:

        min Σ_k p_k w_k  such that  Σ_k x(l, k) = B  for every layer l,
                                    Σ_l x(l, k) · (τ(l, k) + o(l, k) / B) ≤ w_k ≤ n_k · D  for every type k.

    *Proof.* A plan of step T ≤ D on u_k ≤ n_k devices of each type costs T · Σ u_k p_k; w_k = u_k T are the device-seconds it
    pays for, and its work fits into them as `fluid_bound` shows. ∎ The number comes from the dual: for any μ ≥ 0 it is at least
    Σ_l B · min_k (p_k + μ_k)(τ(l, k) + o(l, k) / B) − D · Σ_k n_k μ_k."""
    kinds, number, seconds = work_seconds(problem)
    K, L = seconds.shape
    if not K:
        return math.inf
    prices = np.array([problem.cluster.device_types[kind].price_per_hour for kind in kinds])
    scale = max(float(seconds.max()), 1e-300)
    share = np.zeros((K, K * L))
    for k in range(K):
        share[k, k * L : (k + 1) * L] = seconds[k] / scale
    rows, low = np.vstack([share, np.tile(np.eye(L), K)]), np.append(np.zeros(K), np.ones(L))
    found = Program(rows, low, np.append(number * deadline / scale, np.ones(L))).least(prices @ share)
    extra = np.zeros(K) if found is None else np.maximum(-found.prices[:K], 0.0)
    return max(
        float(((prices + mu)[:, None] * seconds).min(axis=0).sum() - deadline * (number @ mu)) for mu in (extra, np.zeros(K))
    )


def work_seconds(problem: Problem) -> tuple[list[str], Array, Array]:
    """The types, how many devices there are of each, and seconds [K, L] of the whole batch on one device of each."""
    counts = Counter(device.type for device in problem.cluster.devices)
    kinds, B = sorted(counts), problem.global_batch
    number = np.array([counts[kind] for kind in kinds], dtype=np.float64)  # [K]
    seconds = np.empty((len(kinds), len(problem.profile.layers)))  # [K, L], of the whole batch
    for i, kind in enumerate(kinds):
        most = max(node.devices.get(kind, 0) for node in problem.cluster.nodes)
        seconds[i] = reduce(
            np.minimum,
            (
                m.tensor_parallel * (best_seconds_per_sample(m, B) * B + np.array(m.optimizer_seconds))
                for m in (x.without_backward(problem.profile.first_trained) for x in problem.profile.measurements)
                if m.device_type == kind and m.tensor_parallel <= most
            ),
            np.full(len(problem.profile.layers), np.inf),
        )
    able = [i for i, row in enumerate(seconds) if np.isfinite(row).all()]  # a node has devices for a measured degree
    return [kinds[i] for i in able], number[able], seconds[able]


def _dual(weights: Array, seconds: Array) -> float:
    """Σ_l min_k λ_k · seconds(k, l): a valid bound for any λ ≥ 0 with Σ n_k λ_k = 1."""
    return float((weights[:, None] * seconds).min(axis=0).sum())


def _simple_weights(seconds: Array, number: Array) -> list[Array]:
    """Weights to fall back on: all devices alike, and each type by its speed on the whole model."""
    totals = seconds.sum(axis=1)
    speed = 1 / np.maximum(totals, 1e-300)
    return [np.full(len(number), 1 / number.sum()), speed / (number @ speed)]


def _weights(seconds: Array, number: Array) -> Array:
    """λ from the LP's dual, normalised."""
    K, L = seconds.shape
    scale = float(seconds.max())
    if scale <= 0 or K == 1:
        return np.full(K, 1 / number.sum())
    capacity = np.zeros((K, K * L + 1))
    for k in range(K):
        capacity[k, k * L : (k + 1) * L] = seconds[k] / scale
    capacity[:, -1] = -number
    cover = np.hstack([np.tile(np.eye(L), K), np.zeros((L, 1))])
    cost = np.zeros(K * L + 1)
    cost[-1] = 1.0
    low, high = np.append(np.full(K, -np.inf), np.ones(L)), np.append(np.zeros(K), np.ones(L))
    found = Program(np.vstack([capacity, cover]), low, high).least(cost)
    if found is None:
        return np.full(K, 1 / number.sum())
    duals = np.maximum(-found.prices[:K], 0.0)
    total = float(number @ duals)
    return duals / total if total > 0 else np.full(K, 1 / number.sum())
