"""Who trains what: three models, two layouts on two ranks; for each, hetpipe's engine and the loop that one would write on torch.

    python contenders.py hetpipe|torch MODEL LAYOUT      (started by run.py, in the environment that torchrun gives)

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

Layout = Literal["pipeline", "replicas"]
MICROBATCHES = 8  # of a pipeline; a replica of one stage takes its half of the batch at once
CHECK_STEPS = 5
LEARNING_RATE = 0.01
DEVICES = ("n0/0", "n0/1")


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
    "gpt": Shape(build=partial(gpt.build, layers=8, width=256, heads=8, context=128, vocabulary=256, tied=False),
                 cut=9, rows=1, tokens=True, width=128),
    "mlp": perceptron(width=512, rows=16),
    "tiny mlp": perceptron(width=16, rows=4),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of SHAPES, and how two ranks share it: as two stages of one pipeline, or as two replicas of one stage."""

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
        return 2 * (MICROBATCHES if self.layout == "pipeline" else 1)

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
        layers, cut, rows = len(self.layers()), self.shape.cut, self.shape.rows
        if self.layout == "pipeline":
            ends = zip(([0, cut], [cut, layers]), DEVICES, strict=True)
            stages = [{"layers": part, "devices": [device]} for part, device in ends]
            replicas = [{"microbatch_sizes": [rows] * MICROBATCHES, "stages": stages}]
        else:
            whole = [[{"layers": [0, layers], "devices": [device]}] for device in DEVICES]
            replicas = [
                {"microbatch_sizes": [self.samples // len(DEVICES)], "stages": stages} for stages in whole
            ]
        document = {"format": "hetpipe.plan/1", "model": self.model, "global_batch": self.samples, "schedule": "1f1b",
                    "replicas": replicas}  # fmt: skip
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
        rank, layers = dist.get_rank(), case.layers()
        own = layers[: case.shape.cut] if rank == 0 else layers[case.shape.cut :]
        self.inputs, self.targets = case.batch()
        self.is_first, self.optimizer = rank == 0, optimizer_of(own)
        loss = partial(scaled_sum, denominator=self.targets.numel())
        stage = PipelineStage(own, rank, len(DEVICES), torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=False)
        can_choose = "return_outputs" in signature(self.schedule.step).parameters  # torch 2.8 returns them always
        self.unreturned: dict[str, Any] = {"return_outputs": False} if can_choose else {}

    def step(self) -> float:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(self.inputs, **self.unreturned)
        else:
            self.schedule.step(target=self.targets, losses=losses, **self.unreturned)
        self.optimizer.step()
        return float(torch.stack(losses).detach().sum()) if losses else 0.0


class DataParallel:
    """DistributedDataParallel with its defaults: it takes the mean over ranks, so their losses are twice their part."""

    def __init__(self, case: Case) -> None:
        ranks = len(DEVICES)
        self.model = DistributedDataParallel(case.layers())
        self.optimizer = optimizer_of(self.model)
        self.inputs, self.targets = (whole.chunk(ranks)[dist.get_rank()] for whole in case.batch())
        self.loss = partial(scaled_sum, denominator=float(self.targets.numel()))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()) / len(DEVICES)


def contender(name: str, case: Case) -> Contender:
    """This rank of `hetpipe` or `torch`, in the process group that there is. Collective."""
    if name == "hetpipe":
        return Hetpipe(case)
    return OneForwardOneBackward(case) if case.layout == "pipeline" else DataParallel(case)


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
