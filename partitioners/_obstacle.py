"""Why nothing fits, and the smallest change that would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetpipe.partition import PartitionError, Problem
from hetpipe.partitioners._floors import compositions, without
from hetpipe.partitioners._space import Array, Counts, Load, Space, depth_of, microbatch_sizes

STATES = 2_000  # parts of the cluster up to which every one is looked at


def gibibytes(size: float) -> str:
    """Bytes as a person reads them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} bytes"


class Needs:
    """Bytes that stages need in one pipeline over the devices, at the smallest micro-batch size."""

    def __init__(self, space: Space) -> None:
        self.space = space
        batch, b = space.problem.global_batch, microbatch_sizes(space.problem)[0]
        self.b, self.load = b, Load(b, -(-batch // b), batch % b)
        self._peaks: dict[tuple[int, int], Array] = {}

    def peak(self, k: int, place: int) -> Array:
        """Least bytes [lo, hi] of a stage `place` stages from the end, infinite where hi ≤ lo."""
        if (k, place) not in self._peaks:
            depth = depth_of(self.space.families[0], place, self.load.m)
            found = self.space.peak(k, depth, self.load, recompute=False)
            if self.space.problem.allow_recompute:
                found = np.minimum(found, self.space.peak(k, depth, self.load, recompute=True))
            self._peaks[k, place] = np.where(np.triu(np.ones_like(found, dtype=bool), 1), found, np.inf)
        return self._peaks[k, place]

    def reach(self, limits: Sequence[float]) -> tuple[int, Counts]:
        """The first layer of the longest suffix of layers that one pipeline can hold within `limits` bytes
        per kind, and the devices that hold it. 0: it holds all. O(Π(n_k + 1) · K · L)."""
        L = self.space.L
        first: dict[Counts, int] = {(0,) * self.space.K: L}
        best = (L, (0,) * self.space.K)
        for c in compositions(self.space, self.b)[0]:
            found = L
            for k in (int(k) for k in np.flatnonzero(c)):
                hi = first.get(without(c, k), L)
                fits = np.flatnonzero(self.peak(k, sum(c))[:, hi] <= limits[k]) if hi else np.zeros(1)
                found = min(found, int(fits[0]) if len(fits) else hi)
            first[c] = found
            best = min(best, (found, c), key=lambda pair: (pair[0], sum(pair[1])))
        return best

    def missing(self, k: int) -> float:
        """Least bytes more on every device of kind k with which one pipeline fits, to the byte."""
        limits = list(self.space.limits)
        low, high = 0.0, float(self.peak(k, max(1, sum(self.space.counts)))[0, self.space.L]) + limits[k]
        same = [j for j, kind in enumerate(self.space.kinds) if kind.type == self.space.kinds[k].type]

        def fits(more: float) -> bool:
            return (
                self.reach([limit + (more if j in same else 0.0) for j, limit in enumerate(limits)])[0] == 0
            )

        if not fits(high):
            return float("inf")
        for _ in range(60):
            middle = np.floor((low + high) / 2)
            if middle <= low:
                break
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def explain(problem: Problem, space: Space, one_pipeline: bool = False) -> PartitionError:
    """The error to be raised: prices first, then memory."""
    if space.states > STATES:
        return PartitionError(_totals(space))
    if problem.max_price_per_hour is not None or problem.deadline_seconds_per_step is not None:
        wanted = [f"at most {problem.max_price_per_hour} per hour"] * (problem.max_price_per_hour is not None)
        wanted += [f"at most {problem.deadline_seconds_per_step} s per step"] * (
            problem.deadline_seconds_per_step is not None
        )
        if Needs(space).reach(space.limits)[0] == 0:
            cheapest = min(price for price in space.prices)
            return PartitionError(
                f"no plan has {' and '.join(wanted)}, though the model fits the cluster; the cheapest device "
                f"costs {cheapest} per hour. Raise --max-price-per-hour or --deadline-seconds-per-step, or "
                "plan without them to see the fastest plan"
            )
    needs = Needs(space)
    layer, held = needs.reach(space.limits)
    text, missing = _obstacle(needs, layer, held)
    return PartitionError(
        f"no plan fits the memory of the cluster: {text}. {_change(problem, needs)}", missing_bytes=missing
    )


def _totals(space: Space) -> str:
    """For a cluster of too many kinds of device to try everything: what can be said without a search."""
    state = 2 + space.problem.profile.optimizer.state_bytes_per_parameter_byte
    static = state * sum(layer.parameter_bytes for layer in space.problem.profile.layers)
    there = sum(count * limit for count, limit in zip(space.counts, space.limits, strict=True))
    largest = max(range(space.K), key=lambda k: space.limits[k])
    return (
        f"no plan was found that fits the memory of the cluster: parameters, gradients and optimizer state need "
        f"{gibibytes(static)}, all {sum(space.counts)} devices together have {gibibytes(there)}, the largest (of type "
        f"{space.kinds[largest].type!r}) {gibibytes(space.limits[largest])}. Use devices with more memory, a smaller "
        "global batch, or recompute"
    )


def _obstacle(needs: Needs, end: int, held: Counts) -> tuple[str, int | None]:
    """Which layer has no device left, and how many bytes are missing on which type; and that number."""
    space = needs.space
    if end == 0:
        return "one pipeline would fit, but not with the micro-batch sizes and devices that are allowed", None
    layers = space.problem.profile.layers
    name, place = layers[end - 1].name, sum(held) + 1
    short = [
        (float(needs.peak(k, min(place, sum(space.counts)))[end - 1, end]) - space.limits[k], k)
        for k in range(space.K)
    ]
    free = [pair for pair in short if held[pair[1]] < space.counts[pair[1]]]
    if free:
        bytes_, k = min(free)
        return (
            f"layer {end - 1} ({name!r}) alone needs {gibibytes(bytes_ + space.limits[k])} on a "
            f"{space.kinds[k].type!r}, which has {gibibytes(space.limits[k])}: {bytes_:.0f} bytes "
            f"({gibibytes(bytes_)}) are missing"
        ), round(bytes_)
    k = int(np.argmax(space.limits))
    more = min((needs.missing(k), k) for k in range(space.K))
    return (
        f"with micro-batches of {needs.b} all {sum(held)} devices in one pipeline hold only layers {end} to "
        f"{space.L - 1}; layer {end - 1} ({name!r}) is left over: {more[0]:.0f} bytes "
        f"({gibibytes(more[0])}) are missing on each {space.kinds[more[1]].type!r}"
    ), round(more[0]) if np.isfinite(more[0]) else None


def _change(problem: Problem, needs: Needs) -> str:
    """The smallest change that would make it fit, tried out."""
    space = needs.space
    tries = []
    if not problem.allow_recompute:
        tries.append(("allow recompute", replace(problem, allow_recompute=True)))
    if problem.memory_reserve > 0:
        tries.append(
            (
                f"set the memory reserve of {problem.memory_reserve:.0%} to 0",
                replace(problem, memory_reserve=0.0),
            )
        )
    if space.families == ("gpipe",) and problem.backend == "torch":
        tries.append(("allow the schedule 1f1b", replace(problem, schedule="auto")))
    changes = [text for text, changed in tries if Needs(Space(changed)).reach(Space(changed).limits)[0] == 0]
    batch = problem.global_batch // 2
    while batch >= 1:
        smaller = replace(problem, global_batch=batch)
        if min(microbatch_sizes(problem)) <= batch and Needs(Space(smaller)).reach(space.limits)[0] == 0:
            changes.append(f"use a global batch of {batch} instead of {problem.global_batch}")
            break
        batch //= 2
    more = [(needs.missing(k), space.kinds[k].type) for k in range(space.K)]
    if np.isfinite(min(more)[0]):
        changes.append(
            f"give each {min(more)[1]!r} {min(more)[0]:.0f} bytes ({gibibytes(min(more)[0])}) more memory"
        )
    return (
        f"It would fit if you {', or '.join(changes)}"
        if changes
        else "No single change of memory, batch or schedule makes it fit; use more devices"
    )
