"""Who trains what: three models, four layouts on one, two or four ranks; for each, hetpipe's engine and the loops that one would
write on torch.

    python contenders.py hetpipe|torch|hand MODEL LAYOUT      (started by run.py, in the environment that torchrun gives)

As a program it is one rank of one contender: it takes the steps of the check and says their losses; then, for each line of
standard input (a number of steps), it takes so many and says what they took. An answer is a line of JSON. Of hetpipe it needs
only public names, so that it also runs with an earlier one on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hetpipe
from hetpipe.models import gpt, mlp

Layout = Literal["alone", "pipeline", "four stages", "replicas"]
RANKS: dict[Layout, int] = {"alone": 1, "pipeline": 2, "four stages": 4, "replicas": 2}
MICROBATCHES = 8  # of a pipeline; one stage alone takes the batch at once, and a replica of one stage its half
CHECK_STEPS = 5
LEARNING_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batch: how it is built, the first layer of the second stage, samples of a micro-batch, and whether a sample
    is a row of tokens (int64 [context]) or of numbers (float32 [width])."""

    build: Callable[[], nn.Sequential]
    cut: int
    rows: int
    tokens: bool
    width: int


def perceptron(width: int, rows: int) -> Shape:
    """Six residual blocks between an embedding and a head of 10 classes."""
    build = partial(mlp.build, layers=6, width=width, inputs=width, outputs=10)
    return Shape(build=build, cut=4, rows=rows, tokens=False, width=width)


SHAPES = {
    "gpt": Shape(
        build=partial(gpt.build, layers=8, width=256, heads=8, context=128, vocabulary=256, tied=False),
        cut=9,
        rows=1,
        tokens=True,
        width=128,
    ),
    "mlp": perceptron(width=512, rows=16),
    "tiny mlp": perceptron(width=16, rows=4),
}


@dataclass(frozen=True)
class Case:
    """A model of SHAPES, and how ranks share it: one has all of it, or they are the stages of one pipeline, or two replicas."""

    model: str
    layout: Layout

    @property
    def shape(self) -> Shape:
        """The model's."""
        return SHAPES[self.model]

    @property
    def samples(self) -> int:
        """Of the global batch."""
        return MICROBATCHES * self.shape.rows

    @property
    def actions(self) -> int:
        """Forwards and backwards of a rank in a step."""
        return 2 * (MICROBATCHES if self.pipelined else 1)

    @property
    def pipelined(self) -> bool:
        """Whether the batch is cut into micro-batches."""
        return self.layout in ("pipeline", "four stages")

    @property
    def devices(self) -> list[str]:
        """One for each rank."""
        return [f"n0/{rank}" for rank in range(RANKS[self.layout])]

    @property
    def others(self) -> tuple[str, ...]:
        """The contenders beside hetpipe."""
        return ("torch", "hand") if self.pipelined else ("torch",)

    def bounds(self) -> list[tuple[int, int]]:
        """The layers [lo, hi) of each stage of a pipeline."""
        count, stages = len(self.layers()), len(self.devices)
        ends = [0, self.shape.cut, count] if stages == 2 else [round(count * s / stages) for s in range(stages + 1)]
        return list(pairwise(ends))

    def layers(self) -> nn.Sequential:
        """The same weights on every rank of every contender."""
        torch.manual_seed(0)
        return self.shape.build()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the global batch, the same in every step."""
        draw, shape = torch.Generator().manual_seed(1), self.shape
        if shape.tokens:
            text = torch.randint(256, (self.samples, shape.width + 1), generator=draw)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        inputs = torch.randn(self.samples, shape.width, generator=draw)
        return inputs, torch.randint(10, (self.samples,), generator=draw)

    def plan(self) -> hetpipe.Plan:
        """For hetpipe."""
        layers, devices = len(self.layers()), self.devices
        if self.pipelined:
            stages = [{"layers": list(part), "devices": [d]} for part, d in zip(self.bounds(), devices, strict=True)]
            replicas = [{"microbatch_sizes": [self.shape.rows] * MICROBATCHES, "stages": stages}]
        else:
            whole = [[{"layers": [0, layers], "devices": [device]}] for device in devices]
            replicas = [{"microbatch_sizes": [self.samples // len(devices)], "stages": stages} for stages in whole]
        document = {
            "format": "hetpipe.plan/1",
            "model": self.model,
            "global_batch": self.samples,
            "schedule": "1f1b",
            "replicas": replicas,
        }
        return hetpipe.Plan.parse(document, "bench/overhead")


def mean_loss(output: Any, targets: Any) -> Tensor:
    """Mean cross-entropy over all targets: [samples, …, classes] against [samples, …]."""
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def scaled_sum(output: Tensor, targets: Tensor, *, denominator: float) -> Tensor:
    """Summed cross-entropy over the number of targets of the global batch."""
    return cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum") / denominator


class Contender(Protocol):
    """One rank of it."""

    def step(self) -> float:
        """Gradients of the global batch from zero, and the optimizer's step; this rank's part of the loss."""
        ...


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """That of all contenders."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


class Hetpipe:
    """`hetpipe.wrap` in a loop of one's own."""

    def __init__(self, case: Case) -> None:
        inputs, targets = case.batch()
        self.engine = hetpipe.wrap(case.layers(), case.plan(), inputs[: case.shape.rows], mean_loss)
        self.optimizer = torch.optim.SGD(self.engine.parameters(), lr=LEARNING_RATE)
        self.inputs = self.engine.share(inputs) if self.engine.is_first else None
        self.targets = self.engine.share(targets) if self.engine.is_last else None
        self.speaks = dist.get_rank() == 0  # every rank knows the whole loss

    def step(self) -> float:
        loss = self.engine.step(self.inputs, self.targets)
        self.optimizer.step()
        return loss if self.speaks else 0.0


class OneForwardOneBackward:
    """torch.distributed.pipelining's public API: the last stage knows the loss."""

    def __init__(self, case: Case) -> None:
        rank, bounds = dist.get_rank(), case.bounds()
        own = case.layers()[slice(*bounds[rank])]
        self.inputs, self.targets = case.batch()
        self.is_first, self.is_last, self.optimizer = rank == 0, rank == len(bounds) - 1, optimizer_of(own)
        loss = partial(scaled_sum, denominator=self.targets.numel())
        stage = PipelineStage(own, rank, len(bounds), torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=False)
        can_choose = "return_outputs" in signature(self.schedule.step).parameters  # torch 2.8 returns them always
        self.unreturned: dict[str, Any] = {"return_outputs": False} if can_choose else {}

    def step(self) -> float:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(self.inputs, **self.unreturned)
        elif self.is_last:
            self.schedule.step(target=self.targets, losses=losses, **self.unreturned)
        else:
            self.schedule.step(**self.unreturned)
        self.optimizer.step()
        return float(torch.stack(losses).detach().sum()) if losses else 0.0


class ByHand:
    """1F1B over isend and irecv, with nothing that this model, and this many ranks, could do without."""

    def __init__(self, case: Case) -> None:
        self.rank, bounds = dist.get_rank(), case.bounds()
        self.last, self.own = len(bounds) - 1, case.layers()[slice(*bounds[self.rank])]
        inputs, targets = case.batch()
        self.inputs, self.targets = inputs.split(case.shape.rows), targets.split(case.shape.rows)
        self.optimizer, self.loss = optimizer_of(self.own), partial(scaled_sum, denominator=targets.numel())
        with torch.no_grad():  # shapes of what enters and leaves: [rows, …]
            self.enters = torch.empty_like(case.layers()[: bounds[self.rank][0]](self.inputs[0])) if self.rank else None
            self.leaves = torch.empty_like(case.layers()[: bounds[self.rank][1]](self.inputs[0]))

    def step(self) -> float:
        self.optimizer.zero_grad()
        self.flying: list[tuple[Tensor, Tensor]] = []
        self.sent: list[tuple[dist.Work | None, Tensor]] = []
        ahead = min(self.last - self.rank, MICROBATCHES)
        losses = [self.forward(i) for i in range(ahead)]
        for i in range(ahead, MICROBATCHES):
            losses.append(self.forward(i))
            self.backward()
        for _ in range(ahead):
            self.backward()
        for work, _ in self.sent:
            assert work is not None
            work.wait()
        self.optimizer.step()
        return float(torch.stack(losses).sum()) if self.rank == self.last else 0.0

    def forward(self, i: int) -> Tensor:
        """One micro-batch; what comes of it."""
        entered = self.inputs[i]
        if self.enters is not None:
            entered = torch.empty_like(self.enters)
            dist.recv(entered, self.rank - 1)
            entered.requires_grad_()
        output: Tensor = self.own(entered)
        if self.rank == self.last:
            output = self.loss(output, self.targets[i])
        else:
            left = output.detach()
            self.sent.append((dist.isend(left, self.rank + 1), left))
        self.flying.append((entered, output))
        return output.detach()

    def backward(self) -> None:
        """The oldest micro-batch."""
        (entered, output), gradient = self.flying.pop(0), None
        if self.rank < self.last:
            gradient = torch.empty_like(self.leaves)
            dist.recv(gradient, self.rank + 1)
        output.backward(gradient)
        if self.rank:
            assert entered.grad is not None
            self.sent.append((dist.isend(entered.grad, self.rank - 1), entered.grad))


class Plain:
    """The loop that everybody writes, on one device."""

    def __init__(self, case: Case) -> None:
        self.model, (self.inputs, self.targets) = case.layers(), case.batch()
        self.optimizer = optimizer_of(self.model)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = mean_loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


class DataParallel:
    """DistributedDataParallel with its defaults: it takes the mean over ranks, so their losses are twice their part."""

    def __init__(self, case: Case) -> None:
        ranks = dist.get_world_size()
        self.model = DistributedDataParallel(case.layers())
        self.optimizer = optimizer_of(self.model)
        self.inputs, self.targets = (whole.chunk(ranks)[dist.get_rank()] for whole in case.batch())
        self.loss = partial(scaled_sum, denominator=float(self.targets.numel()))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()) / dist.get_world_size()


def contender(name: str, case: Case) -> Contender:
    """This rank of `hetpipe`, `torch` or, of a pipeline, `hand`, in the process group that there is. Collective."""
    if name == "hetpipe":
        return Hetpipe(case)
    if case.pipelined:
        return ByHand(case) if name == "hand" else OneForwardOneBackward(case)
    return Plain(case) if case.layout == "alone" else DataParallel(case)


def seconds_of(own: Contender, steps: int) -> tuple[float, float]:
    """Seconds that this many steps take, and of a processor (all threads of this rank), after some that are not timed (caches are
    cold when others have run). Collective."""
    for _ in range(2 + steps // 10):
        own.step()
    dist.barrier()
    begin, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        own.step()
    return time.perf_counter() - begin, time.process_time() - worked


def serve(name: str, case: Case) -> None:
    """Be a rank until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    torch.set_num_threads(1)
    if name != "hetpipe":
        dist.init_process_group("gloo")
    own = contender(name, case)
    home = str(Path(hetpipe.__file__).resolve().parents[1])
    answers.write(json.dumps({"losses": [own.step() for _ in range(CHECK_STEPS)], "home": home}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(seconds_of(own, int(line))) + "\n")


if __name__ == "__main__":
    serve(sys.argv[1], Case(sys.argv[2], cast(Layout, sys.argv[3])))
