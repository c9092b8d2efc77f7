"""Training in several precisions by a plan, and the same on one device in torch's own autocast: what `test_half.py` compares."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.documents.number_types import AS_BUILT, TYPE_OF, NumberTypes, Precision
from hetpipe.documents.plan import Backend, Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, Model, Tensors, as_tuple, as_value, cross_entropy, move, mse, split_rows
from hetpipe.layers.numbers import stays
from hetpipe.processes.whereabouts import describe_with
from hetpipe.processes.world import World
from hetpipe.runtime import backends
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.precision.loss_scale import LossScale
from tests.support.nets import OwnFew, batch, build, copied
from tests.support.ranks import make_plan
from tests.support.transparency import share

CPU = torch.device("cpu")
STEPS, SCALE = 3, 2.0**10


@dataclass(frozen=True, kw_only=True, eq=False)
class HalfCase:
    """`plan`: a row a replica (see `make_plan`). `precision`: of each device, or of all."""

    name: str
    plan: tuple[dict[str, Any], ...]
    precision: Precision | Mapping[str, Precision]
    net: str = "blocks"
    schedule: str = "1f1b"
    frozen: torch.dtype = torch.float32  # in which parameters are held that do not train

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def build(self) -> nn.Sequential:
        layers = build(self.net, torch.float32)
        for parameter in layers.parameters():
            if not (parameter.requires_grad or stays(parameter)) and parameter.ndim > 1:
                parameter.data = parameter.data.to(self.frozen)
        return layers

    def make_plan(self) -> Plan:
        return make_plan(self.plan, schedule=self.schedule)

    def of(self, device: str) -> Precision:
        return self.precision if isinstance(self.precision, str) else self.precision[device]

    @property
    def scaled(self) -> bool:
        return "fp16" in ([self.precision] if isinstance(self.precision, str) else self.precision.values())

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(sum(row["sizes"]) for row in self.plan)

    def batch(self, step: int) -> tuple[Tensors, Tensors]:
        return batch(self.net, sum(self.samples), step, torch.float32)

    def loss(self) -> Loss:
        return Loss(function=cross_entropy, weight="tokens") if self.net == "tied" else Loss(function=mse)

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Half(NamedTuple):
    """Of one rank, or the one device: losses, the gradients of the first step, and the parameters at the end."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def open_half(world: World, case: HalfCase, backend: Backend, layers: nn.Sequential) -> PlanEngine:
    """This rank's engine."""
    plan, (inputs, targets) = case.make_plan(), case.batch(0)
    model = Model(name=plan.model, layers=layers, inputs=inputs, targets=targets, loss=case.loss())
    engine = backends.open_engine(
        backend,
        model,
        plan,
        backends.seat(world, backend, plan),
        lambda _: CPU,
        lambda _: None,
        lambda device: NumberTypes.of("float32", case.of(device)),
    )
    assert engine is not None
    engine.loss_scale.scale = SCALE
    return engine


def train_half(world: World, cases: list[HalfCase], backend: Backend) -> list[Half]:
    """A rank's part of all cases."""
    found: list[Half] = []
    for case in cases:
        describe_with(f"device {world.device_id}, case {case.name!r}")
        engine = open_half(world, case, backend, case.build())
        optimizer, losses, gradients = case.optimizer(engine.trained_parameters()), list[float](), dict[str, Tensor]()
        for step in range(STEPS):
            inputs, targets = (share(value, case.samples, engine.replica) for value in case.batch(step))
            losses.append(engine.step(inputs if engine.is_first else None, targets if engine.is_last else None))
            assert engine.finite
            gradients = gradients or {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
            optimizer.step()
        engine.check_replicas()
        found.append(Half(losses, gradients, {n: copied(p) for n, p in engine.named_parameters()}))
        engine.leave()
    return found


def _autocast(precision: Precision) -> AbstractContextManager[object]:
    return torch.autocast(
        "cpu", torch.bfloat16 if precision == "fp32" else getattr(torch, TYPE_OF[precision]), enabled=precision != "fp32"
    )


def _output(case: HalfCase, plan: Plan, replica: int, layers: nn.Sequential, x: Tensors) -> Tensors:
    """Each stage's layers in their device's precision. In one for all: simply all layers in torch's autocast."""
    if isinstance(case.precision, str):
        return layers(x)  # type: ignore[no-any-return]  # in the autocast of the caller
    for stage in plan.replicas[replica].stages:
        precision = case.of(stage.devices[0])
        if precision == "fp32":
            x = as_value([t.float() if t.is_floating_point() else t for t in as_tuple(x)])
        with _autocast(precision):
            x = nn.Sequential(*list(layers)[slice(*stage.layers)])(x)
    return x


def half_on_one_device(case: HalfCase) -> tuple[Half, dict[str, Tensor]]:
    """The truth: the micro-batches of all replicas one after the other, by hand; and how far rounding alone may bring the
    gradients of the first step from it: of n terms a + b + …, added up in two orders, twice (n − 1) 2⁻²⁴ (|a| + |b| + …)
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2)."""
    torch.set_num_threads(1)  # as on the ranks: threads add up in another order
    layers, plan, loss = case.build(), case.make_plan(), case.loss()
    optimizer, losses, found, bound = case.optimizer(layers.parameters()), list[float](), dict[str, Tensor](), dict[str, Tensor]()
    for step in range(STEPS):
        whole, total, terms = [case.batch(step)], 0.0, dict[str, list[Tensor]]()
        weight = loss.count(whole[0][1])
        power = 2.0 ** math.floor(math.log2(weight))
        sums: list[dict[str, Tensor]] = []
        for replica, row in enumerate(plan.replicas):
            inputs, targets = (split_rows(share(v, case.samples, replica), row.microbatch_sizes) for v in whole[0])
            layers.zero_grad()
            last = case.of(row.stages[-1].devices[0])
            for x, y in zip(inputs, targets, strict=True):
                before = {n: p.grad.clone() for n, p in layers.named_parameters() if p.grad is not None}
                with _autocast(last if isinstance(case.precision, str) else "fp32"):
                    output = _output(case, plan, replica, layers, move(x, CPU))
                with _autocast(last):
                    own = loss.count(y)
                    mean = loss.function(output, y) if own else None
                if mean is not None:
                    (mean * (own / power * (SCALE if case.scaled else 1.0))).backward()
                    total += float(mean.detach().double()) * own
                for name, p in layers.named_parameters():
                    if p.grad is not None:
                        terms.setdefault(name, []).append((p.grad - before.get(name, torch.zeros(()))).abs())
            sums.append({n: p.grad.clone() for n, p in layers.named_parameters() if p.grad is not None})
        for name, p in ((n, p) for n, p in layers.named_parameters() if p.requires_grad):
            p.grad = sum((s[name] for s in sums[1:] if name in s), start=sums[0][name])
            p.grad *= power / (SCALE if case.scaled else 1.0) / weight
        losses.append(total / weight)
        if not found:
            found = {n: p.grad.clone() for n, p in layers.named_parameters() if p.grad is not None}
            factor = power / (SCALE if case.scaled else 1.0) / weight
            bound = {n: 4 * len(t) * 2.0**-24 * factor * torch.stack(t).sum(0) for n, t in terms.items()}
        optimizer.step()
    return Half(losses, found, {n: copied(p) for n, p in layers.named_parameters()}), bound


OVERFLOWS, LAYER, ALL_STEPS, INTERVAL = (0, 1, 7, 20, 21, 34), 5, 50, 5  # the layer is in the middle stage of replica 0


def overflow(module: nn.Module, step: list[int]) -> None:
    """Let a gradient of the layer be infinite in some steps."""
    parameter = module.get_parameter(f"{LAYER}.linear.weight")
    parameter.register_hook(lambda g: g * math.inf if step[0] in OVERFLOWS else g)


class Scaled(NamedTuple):
    """Of one rank, or the one device: the scale after each step, in which steps gradients overflowed, and the parameters."""

    scales: list[float]
    overflowed: list[int]
    parameters: dict[str, Tensor]
    steps_taken: set[float]


def train_scaled(world: World, case: HalfCase) -> dict[str, Any]:
    """50 steps, in some of which one rank's gradients overflow; and steps that add up."""
    layers, now = case.build(), [0]
    engine = open_half(world, case, "torch", layers)
    engine.loss_scale = LossScale(SCALE, INTERVAL)
    if engine.replica == 0 and engine.index == 1:
        overflow(engine.stage, now)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    scales, overflowed = list[float](), list[int]()
    for step in range(ALL_STEPS):
        now[0] = step
        engine.step(*_own(engine, case, step))
        overflowed += [step] if engine.overflowed else []
        assert engine.finite is not engine.overflowed
        optimizer.step()  # as in a loop that knows nothing of overflows
        scales.append(engine.loss_scale.scale)
    taken = {float(state["step"]) for state in optimizer.state.values()}
    engine.check_replicas()
    found = Scaled(scales, overflowed, {n: p.detach().clone() for n, p in engine.named_parameters()}, taken)
    added, after, told = dict[int, Any](), list[dict[str, Tensor]](), list[str]()
    for entered in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", entered):
            try:
                inputs, targets = _own(engine, case, 0)
                engine.evaluate(inputs, targets)
            except InputError as error:
                told.append(str(error))
    for first in (100, OVERFLOWS[0]):  # the first of two steps that add up overflows in the second turn
        with engine.accumulate():
            for step in (first, 101):
                now[0] = step
                engine.step(*_own(engine, case, step))
        added[first] = (engine.overflowed, {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None})
        optimizer.step()
        after.append({n: p.detach().clone() for n, p in engine.named_parameters()})
    engine.leave()
    return {"scaled": found, "added": added, "after": after, "told": told}


def _own(engine: PlanEngine, case: HalfCase, step: int) -> list[Tensors | None]:
    ends = zip(case.batch(step), (engine.is_first, engine.is_last), strict=True)
    return [share(value, case.samples, engine.replica) if mine else None for value, mine in ends]


def scaled_on_one_device(case: HalfCase) -> tuple[Scaled, dict[str, Tensor]]:
    """The truth: torch's own GradScaler and autocast; and the gradients of two batches as one, after it."""
    torch.set_num_threads(1)
    layers, now, scaler = case.build(), [0], torch.amp.GradScaler("cpu", SCALE, growth_interval=INTERVAL)
    overflow(layers, now)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    scales, overflowed = list[float](), list[int]()
    for step in range(ALL_STEPS):
        now[0], before = step, scaler.get_scale()
        _backward(layers, case, step, lambda loss: scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        overflowed += [step] if scales[-1] < before else []
    taken = {float(state["step"]) for state in optimizer.state.values()}
    found = Scaled(scales, overflowed, {n: p.detach().clone() for n, p in layers.named_parameters()}, taken)
    sums: dict[str, Tensor] = {}
    for step in (100, 101):
        now[0] = step
        _backward(layers, case, step, lambda loss: loss * 2.0**10)
        for name, p in layers.named_parameters():
            sums[name] = sums.get(name, torch.zeros(())) + (p.grad if p.grad is not None else 0.0) / 2.0**11
    return found, sums


def _backward(layers: nn.Sequential, case: HalfCase, step: int, scaled: Callable[[Tensor], Tensor]) -> None:
    sums = dict[str, Tensor]()
    for replica, row in enumerate(case.plan):
        layers.zero_grad()
        inputs, targets = (split_rows(share(v, case.samples, replica), row["sizes"]) for v in case.batch(step))
        for x, y in zip(inputs, targets, strict=True):
            with _autocast("fp16"):
                loss = case.loss().function(layers(x), y) * (len(as_tuple(y)[0]) / sum(case.samples))
            scaled(loss).backward()
        for name, p in layers.named_parameters():
            sums[name] = sums[name] + p.grad if name in sums and p.grad is not None else p.grad  # type: ignore[assignment]
    for name, p in layers.named_parameters():
        p.grad = sums[name]


def try_callers(world: World, plan: Plan) -> dict[str, Any]:
    """What is known of what callers do around the engine: autocasts, closures, losses in float16."""
    found: dict[str, Any] = {}
    layers, (inputs, targets) = build("blocks", torch.float32), batch("blocks", 8, 0, torch.float32)

    def wrapped(types: NumberTypes, function: Callable[[Tensors, Tensors], Tensor] = mse) -> PlanEngine:
        model = Model(name=plan.model, layers=copy.deepcopy(layers), inputs=inputs, targets=targets, loss=Loss(function=function))
        engine = backends.open_engine("torch", model, plan, world, lambda _: CPU, lambda _: None, lambda _: types)
        assert engine is not None
        return engine

    engine = wrapped(AS_BUILT)
    optimizer, losses = torch.optim.SGD(engine.parameters(), lr=0.5), []
    with torch.autocast("cpu", torch.bfloat16):  # around the loop
        for _ in range(3):
            losses.append(engine.step(inputs, targets))
            optimizer.step()
    found["around the loop"] = losses
    found["told"] = []
    for call in (engine.step, engine.evaluate):
        with torch.autocast("cpu", torch.bfloat16, enabled=world.rank == 0):
            try:
                call(inputs, targets)
            except InputError as error:
                found["told"].append(str(error))
    engine.close()

    engine = wrapped(NumberTypes.at("fp16"), lambda output, y: ((as_tuple(output)[0] - as_tuple(y)[0]) ** 2).half().mean())
    engine.loss_scale.scale = 2.0**18  # of which float16 has no half
    engine.step(inputs, targets)
    found["a loss in float16"] = engine.overflowed, engine.loss_scale.scale
    engine.loss_scale.scale = 2.0**30
    before = [p.detach().clone() for p in engine.parameters()]
    torch.optim.SGD(engine.parameters(), lr=0.5).step(lambda: engine.step(inputs, targets))
    found["in a closure"] = engine.overflowed, all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
    engine.loss_scale.scale = 2.0 ** (10 + world.rank)
    for _ in range(2):
        try:
            engine.step(inputs, targets)
        except InputError as error:
            found.setdefault("unlike scales", []).append(str(error))
        engine.loss_scale.scale = 2.0**10
    engine.close()
    return found


def own_bits() -> nn.Sequential:
    """Six layers for the tests' points, of which two keep their matrices in float8 and in 4 bits, and cast them themselves."""
    torch.manual_seed(0)
    few = OwnFew(torch.float8_e4m3fn, 16), OwnFew(torch.float8_e5m2, 16)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), few[0], nn.Tanh(), few[1], nn.Linear(16, 4))


def half_frozen() -> nn.Sequential:
    """Six layers for the tests' points, of which two matrices do not train."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))
    for index in (2, 4):
        layers[index].requires_grad_(False)
    return layers
