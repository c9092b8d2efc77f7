"""Engines in a world of one process, the plain loop that they are compared with, and how both are timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from bench.gpu.subject import Subject
from bench.reference import ReferenceEngine
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.number_types import AS_BUILT, NumberTypes
from hetpipe.documents.plan import Backend
from hetpipe.layers.model import Loss, Tensors, cross_entropy, move, split_rows
from hetpipe.processes.world import World, connect, create_world
from hetpipe.runtime.backends import check_backend, open_engine, seat
from hetpipe.runtime.plan_engine import PlanEngine

TOLERANCE = 1e-10  # of gradients in float64


@cache
def world(device_type: str) -> World:
    """This process as a world of one: gloo, and NCCL where the device is a card."""
    connect(use_cuda=device_type == "cuda")
    if device_type == "cpu":
        torch.set_num_threads(1)  # as when layers are measured
    return create_world(cluster_of(device_type))


def cluster_of(kind: str, memory_bytes: int = 0) -> Cluster:
    """One node n0 with one device of this type."""
    return Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {kind: {"memory": memory_bytes}},
            "nodes": [{"name": "n0", "devices": {kind: 1}}],
        },
        "this machine",
    )


@contextmanager
def opened(
    subject: Subject,
    *,
    stages: int = 1,
    backend: Backend = "torch",
    dtype: torch.dtype = torch.float32,
    types: NumberTypes = AS_BUILT,
) -> Iterator[PlanEngine]:
    """The engine of a plan whose stages all lie on the one device, which trains in these `types`; what it takes is given back at
    the end."""
    plan, model = subject.plan(stages, backend), subject.model(dtype)
    check_backend(backend, plan)
    seated = seat(world(subject.device_type), backend, plan)
    engine = open_engine(backend, model, plan, seated, lambda _: subject.device, lambda _: None, lambda _: types)
    assert engine is not None
    try:
        yield engine
    finally:
        engine.close()
        vars(engine).clear()  # whoever still has the engine holds nothing of it
        del model
        free(subject.device)


def free(device: torch.device) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PlainLoop:
    """The same micro-batches one after the other on one device, without any engine. Losses are scaled by the `scaler`, if there
    is one."""

    def __init__(self, subject: Subject, dtype: torch.dtype = torch.float32, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self.layers = subject.layers(dtype).to(subject.device)
        self._loss, self._sizes, self._device = Loss(function=cross_entropy), subject.sizes, subject.device

    def step(self, inputs: Tensors, targets: Tensors) -> float:
        """Gradients of the loss over the whole batch, and the loss."""
        self.layers.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        given, wanted = move(inputs, self._device), move(targets, self._device)
        for x, y in zip(split_rows(given, self._sizes), split_rows(wanted, self._sizes), strict=True):
            loss = self._loss.share(self.layers(x), y, sum(self._sizes))
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            total += loss.detach()
        return float(total)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer take its step, of gradients that are not scaled."""
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        self._scaler.update()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient by the name of its parameter, a shared one under each of its names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def reference(subject: Subject, dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole batch at once on the device."""
    engine = ReferenceEngine(subject.layers(dtype).to(subject.device), Loss(function=cross_entropy))
    inputs, targets = (move(x, subject.device) for x in subject.batch())
    loss = engine.step(inputs, targets)
    return loss, gradients(engine.layers)


def largest_difference(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The greatest distance of a number of these gradients from the true one; infinite where one is missing or no number."""
    if found.keys() != truth.keys():
        return float("inf")
    distances = [float((found[name].double() - truth[name].double()).abs().max()) for name in truth]
    return max(d if d == d else float("inf") for d in distances)


def largest(found: Mapping[str, Tensor]) -> float:
    """The greatest number of these gradients."""
    return max(float(g.abs().max()) for g in found.values())


def relative_difference(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all gradients together, by the norm of the true ones."""
    if found.keys() != truth.keys():
        return float("inf")
    apart = sum(float((found[name].double() - g.double()).square().sum()) for name, g in truth.items())
    return float((apart / sum(float(g.double().square().sum()) for g in truth.values())) ** 0.5)


def step_seconds(
    subject: Subject,
    step: Callable[[Tensor, Tensor], float],
    layers: nn.Module,
    update: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer.step(),
) -> float:
    """Median seconds of a step and of AdamW's after it, by `update`, two steps before them not counted."""
    optimizer, (inputs, targets) = torch.optim.AdamW(layers.parameters(), lr=1e-4), subject.batch()
    seconds = []
    layers.zero_grad()  # whatever was done before
    for _ in range(2 + subject.steps):
        synchronize(subject.device)
        began = time.perf_counter()
        step(inputs, targets)
        update(optimizer)
        synchronize(subject.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
