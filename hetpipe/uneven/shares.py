"""Where the shares of unequal ranks come from: a plan file, or a short measurement before training. (Or a list: [6, 2].)"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError, natural_key
from hetpipe.layers.device import MemoryMeter, Stopwatch, module_bytes, static_storages, trained_bytes, usable_bytes
from hetpipe.layers.untouched.kept import kept
from hetpipe.planning.shares import fastest_shares


def plan_shares(plan: Plan | str | Path) -> tuple[list[int], int]:
    """The shares of a data-parallel plan in rank order (its devices in natural order), and the `accumulate` by which no rank runs
    more samples at once than its memory was planned for.

        shares, accumulate = plan_shares("plan.json")
        sampler = ShareSampler(len(dataset), shares, accumulate=accumulate)
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    for r, replica in enumerate(plan.replicas):
        devices = [device for stage in replica.stages for device in stage.devices]
        if len(devices) > 1:
            raise InputError(
                f"replica {r} of the plan is spread over {devices}, but each rank of a data-parallel loop holds the whole model. "
                "Run this plan with hetpipe.wrap, or make a plan with --partitioner uneven-data-parallel"
            )
    replicas = sorted(plan.replicas, key=lambda replica: natural_key(replica.stages[0].device))
    return [replica.samples for replica in replicas], max(len(r.microbatch_sizes) for r in replicas)


def measured_shares(
    model: nn.Module,
    step: Callable[[int], object],
    global_batch: int,
    *,
    memory_bytes: int | None = None,
    state_bytes_per_parameter_byte: float = 2.0,
    repeats: int = 3,
) -> list[int]:
    """Shares by which all ranks finish together and none exceeds its memory, measured here. Every rank must call it.

    Each rank times 1, 2, 4, … samples. The shares then minimise the time of the slowest rank (`planning.shares`), at
    least one sample each. Gradients are None afterwards; buffers and random state are what they were.

    Args:
        model: the plain model, before DDP wraps it (its collectives would wait for ranks that run other sizes).
        step: runs forward and backward of so many samples.
        global_batch: samples of all ranks together.
        memory_bytes: what this rank may use; by default its GPU's, and no limit on a CPU.
        state_bytes_per_parameter_byte: of the optimizer: 2 for AdamW, 1 for SGD with momentum.
        repeats: of which the median is taken.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if global_batch < ranks:
        raise InputError(f"a global batch of {global_batch} leaves some of {ranks} ranks without a sample")
    device = next(model.parameters()).device
    if memory_bytes is None and device.type == "cuda":
        memory_bytes = usable_bytes(device)
    limit = math.inf
    if memory_bytes is not None:  # less what comes later: DDP's buckets, and the optimizer's state
        limit = memory_bytes - (1 + state_bytes_per_parameter_byte) * trained_bytes(model.parameters())
    with _left_as_it_was(model, device):
        found = _measure(model, step, _sizes(global_batch - ranks + 1), limit, repeats)
    rows = [_row(found, limit)]
    if ranks > 1:
        gathered: list[list[float]] = [[] for _ in range(ranks)]
        dist.all_gather_object(gathered, rows[0])
        rows = gathered
    return share_out(rows, global_batch)


def share_out(rows: Sequence[Sequence[float]], global_batch: int) -> list[int]:
    """Shares of at least one sample each with the least maximum time; `rows[r][c - 1]` are the seconds of c samples on rank r,
    as many as it can hold."""
    most = [len(row) for row in rows]
    if min(most) < 1 or sum(most) < global_batch:
        raise InputError(
            f"the ranks can hold {most} samples, {sum(most)} together, but the global batch is {global_batch} with at least one "
            "on each. Measure for a part of the global batch and accumulate, or leave the smallest device out"
        )
    return [1 + more for more in fastest_shares(rows, global_batch - len(rows))]


def _sizes(largest: int) -> list[int]:
    return [*itertools.takewhile(lambda size: size < largest, (2**i for i in itertools.count())), largest]


def _measure(
    model: nn.Module, step: Callable[[int], object], sizes: Sequence[int], limit: float, repeats: int
) -> dict[int, tuple[float, int]]:
    """Size → (median seconds, peak bytes); instead of the first size above the limit, the largest that should fit."""
    device = next(model.parameters()).device
    found: dict[int, tuple[float, int]] = {}
    for wanted in sizes:
        size = min(wanted, _largest(found, limit))
        if size <= max(found, default=0):
            break
        action = partial(step, size)
        try:
            model.zero_grad()
            peak = _peak_bytes(model, action, device)  # warms up, too
            seconds = []
            for _ in range(repeats):
                model.zero_grad()
                seconds.append(Stopwatch(device).measure(action))
        except torch.OutOfMemoryError:
            break
        found[size] = (statistics.median(seconds), peak)
    return found


def _largest(found: Mapping[int, tuple[float, int]], limit: float) -> int:
    """The most samples that stay within the limit, if the bytes go on as from the last measured size but one to the last."""
    if len(found) < 2 or math.isinf(limit):
        return sys.maxsize
    (a, (_, before)), (b, (_, last)) = list(found.items())[-2:]
    return b + math.floor((limit - last) * (b - a) / max(last - before, 1))


def _peak_bytes(model: nn.Module, action: Callable[[], object], device: torch.device) -> int:
    """The most bytes in use during a forward and backward: on a GPU what its allocator says, elsewhere parameters, buffers,
    gradients and what autograd saves."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        action()
        return torch.cuda.max_memory_allocated(device)
    meter = MemoryMeter(exclude=static_storages(model))
    with meter.hooks():
        action()
    parameters, buffers = module_bytes(model)
    return parameters + trained_bytes(model.parameters()) + buffers + meter.peak


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with kept(model), torch.random.fork_rng(devices):
        yield
    model.zero_grad()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _row(found: Mapping[int, tuple[float, int]], limit: float) -> list[float]:
    """Seconds of 1, 2, … samples, linear between the measured sizes and never falling, as many as fit."""
    if not found:
        return []
    counts = np.arange(1, max(found) + 1)
    seconds = np.interp(counts, list(found), [s for s, _ in found.values()])
    needed = np.interp(counts, list(found), [b for _, b in found.values()])
    fitting = int(np.searchsorted(np.maximum.accumulate(needed), limit, side="right"))
    row: list[float] = np.maximum.accumulate(seconds)[:fitting].tolist()
    return row
