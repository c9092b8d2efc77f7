"""What the ranks of test_uneven.py run: epochs in DDP, whose gradients are compared with those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from hetpipe.files.messages import InputError
from hetpipe.processes.world import World
from hetpipe.uneven import ShareLoader, ShareSampler, global_count, global_mean, windows
from hetpipe.uneven.shares import measured_shares


class Case(NamedTuple):
    """An epoch: `target` is what the loss is a mean over ("samples", "tokens" with ignored ones, "numbers" for a mean squared
    error); `dtype` is autocast's."""

    samples: int
    shares: Sequence[int]
    accumulate: int = 1
    target: str = "samples"
    dtype: torch.dtype | None = None


def data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(case.samples, 4, 5, generator=generator, dtype=torch.float64)
    if case.target == "numbers":
        return TensorDataset(inputs, torch.randn(case.samples, 4, 3, generator=generator, dtype=torch.float64))
    labels = torch.randint(3, (case.samples, 4), generator=generator)
    if case.target == "samples":
        return TensorDataset(inputs, labels[:, 0])
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    labels[::3] = -100  # these samples have no target at all
    return TensorDataset(inputs, labels)


def network(case: Case) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model if case.dtype is not None else model.double()


def loss_of(model: nn.Module, case: Case, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    if case.dtype is not None:
        inputs = inputs.float()
    with torch.autocast("cpu", case.dtype, enabled=case.dtype is not None):
        output = model(inputs)
        if case.target == "numbers":
            return mse_loss(output, targets, reduction=reduction)
        if case.target == "samples":
            return cross_entropy(output.mean(1), targets, reduction=reduction)
        return cross_entropy(output.flatten(0, 1), targets.flatten(), reduction=reduction)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def true_gradients(case: Case) -> Iterator[tuple[float, Tensor]]:
    """Loss and gradient of the mean over each global batch, in one piece."""
    dataset, batch = data(case), sum(case.shares)
    for indices in ShareSampler(case.samples, [batch], rank=0):
        model = network(case)
        inputs, targets = dataset[indices]
        loss = loss_of(model, case, inputs, targets, "mean")
        loss.backward()
        yield float(loss.detach()), gradient(model)


def compare(case: Case, world: int) -> list[dict[str, float]]:
    """Of every step of an epoch: the ratio of DDP's gradient to the true one, the part of it in another direction, the difference
    of the losses, and the ratio that a mean over each rank's own batch would have."""
    model, naive = DistributedDataParallel(network(case)), DistributedDataParallel(network(case))
    loader = ShareLoader(data(case), ShareSampler(case.samples, case.shares, accumulate=case.accumulate))
    found = []
    steps = windows(loader, case.accumulate)
    for (true_loss, true), batches in zip(true_gradients(case), steps, strict=True):
        model.zero_grad()
        naive.zero_grad()
        count, total = (global_count(*[targets for _, targets in batches]), torch.zeros((), dtype=torch.float64))
        for i, (inputs, targets) in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else model.no_sync():
                loss = global_mean(loss_of(model, case, inputs, targets, "sum"), count)
                loss.backward()
            with nullcontext() if last else naive.no_sync():
                (torch.nan_to_num(loss_of(naive, case, inputs, targets, "mean")) / case.accumulate).backward()
            total += loss.detach()
        dist.all_reduce(total)
        ours, theirs = gradient(model), gradient(naive)
        ratio = float(ours @ true / (true @ true))
        aside = float((ours - ratio * true).norm() / true.norm())
        found.append(
            {
                "ratio": ratio,
                "aside": aside,
                "loss": float(total / world - true_loss),
                "naive": float((theirs - true).norm() / true.norm()),
            }
        )
    return found


def gradients(world: World, cases: Sequence[Case]) -> list[list[dict[str, float]]]:
    return [compare(case, world.size) for case in cases]


def oddities(world: World) -> dict[str, Any]:
    """What else two ranks with the shares [6, 2] must get right, one thing after the other."""
    return {
        "empty": step_without_targets(),
        "batch_norm": stand_in_and_batch_norm(),
        "scaler": overflow_on_one_rank(world.rank),
        "clipped": clipped_norm(),
        "measured": measure(world.rank),
    }


def step_without_targets() -> float:
    """The gradient's norm where no rank has a target: zero, not NaN."""
    model = DistributedDataParallel(nn.Linear(2, 3))
    targets = torch.full((4,), -100)
    global_mean(cross_entropy(model(torch.ones(4, 2)), targets, reduction="sum"), global_count(targets)).backward()
    return float(gradient(model).norm())


def stand_in_and_batch_norm() -> list[int]:
    """Batches that BatchNorm has counted after 2 steps, the second of a single sample."""
    dataset = TensorDataset(torch.randn(9, 3, 2, 2), torch.zeros(9, dtype=torch.long))
    known = signature(DistributedDataParallel).parameters  # torch 2.8 has the older name only
    own: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)), **own)
    counted = []
    for inputs, targets in ShareLoader(dataset, ShareSampler(len(dataset), [6, 2])):
        model.train(bool((targets != -100).any()))
        loss_sum = cross_entropy(model(inputs), targets, reduction="sum")
        global_mean(loss_sum, global_count(targets)).backward()
        counted.append(int(model.module[0].num_batches_tracked))
    return counted


def overflow_on_one_rank(rank: int) -> tuple[float, bool]:
    """The scale after a step in which only rank 1's gradients overflow, and whether the parameters are what they were."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 3))
    optimizer, scaler = (torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0))
    before = [p.detach().clone() for p in model.parameters()]
    targets = torch.zeros(2 if rank else 6, dtype=torch.long)
    inputs = torch.full((len(targets), 2), 3e38 if rank else 1.0)
    loss_sum = (model(inputs) * 10.0)[:, 0].sum()
    scaler.scale(global_mean(loss_sum, global_count(targets))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def clipped_norm() -> tuple[float, float]:
    """The norm that clipping saw in DDP, and the true one."""
    case = Case(8, [6, 2])
    model = DistributedDataParallel(network(case))
    for inputs, targets in ShareLoader(data(case), ShareSampler(case.samples, case.shares)):
        global_mean(loss_of(model, case, inputs, targets, "sum"), global_count(targets)).backward()
    true = next(gradient for _, gradient in true_gradients(case))
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), float(true.norm())


def measure(rank: int) -> dict[str, Any]:
    """Shares by measurement, with room for 3 samples on rank 1, and what it leaves behind; then with too little room."""
    model = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.Linear(40, 1))

    def step(size: int) -> None:
        model(torch.ones(size + 1, 50)).sum().backward()  # BatchNorm needs two

    model(torch.ones(2, 50))
    buffers, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    result: dict[str, Any] = {"free": measured_shares(model, step, 8)}
    parameters = 4 * sum(p.numel() for p in model.parameters())
    static = 5 * parameters + 4 * (40 + 40) + 8
    per_sample = 4 * (50 + 40 + 40 + 40 + 40)
    roomy, tight = 1 << 30, static + 4 * per_sample  # of which `step` runs one more than asked
    result["tight"] = measured_shares(model, step, 8, memory_bytes=tight if rank else roomy)
    try:
        measured_shares(model, step, 8, memory_bytes=tight)
    except InputError as error:
        result["refused"] = str(error)
    result["left"] = (
        all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True)),
        torch.equal(state, torch.get_rng_state()),
        all(p.grad is None for p in model.parameters()),
    )
    return result
