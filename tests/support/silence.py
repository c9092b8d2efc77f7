"""What the ranks of tests/test_silence.py run: what a user may do in a loop of one's own that must be right, or be told. Light to
import, since every rank imports it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hetpipe
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, as_tuple, cross_entropy, mse
from hetpipe.layers.untouched.randomness import Generators
from hetpipe.processes.world import World
from hetpipe.runtime.gradients import ReplicaMismatchError
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.training.own.loop import check_same_model
from tests.support.blocks import WIDTH
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.support.transparency import open_engine, share

PLAN = make_plan([{"cuts": [6, 4], "sizes": [3, 2]}, {"cuts": [10], "sizes": [2, 1]}])  # ranks 0 and 1, beside rank 2
SHARES = (5, 3)


class Noise(nn.Module):
    """Draws from all three generators; keeps what it drew of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(()), random.random(), float(np.random.rand())
        if type(x) is Tensor:
            self.drawn.append(tuple(float(n) for n in noise))
        return x * (1 + 0.1 * noise[0].to(x) + noise[1] + noise[2])


def opened(world: World, net: nn.Sequential, *, tokens: bool = False, loss: Loss | None = None, **more: Any) -> PlanEngine:
    usual = Loss(function=cross_entropy, weight="tokens") if tokens else Loss(function=mse)
    inputs, targets = batch("tied" if tokens else "blocks", 8, 0)
    engine = open_engine(world, PLAN, net, inputs, targets, loss or usual, **more)
    assert isinstance(engine, PlanEngine)
    return engine


def parts(engine: PlanEngine, net: str, step: int, samples: int = 8) -> tuple[Any, Any]:
    return tuple(share(x, SHARES, engine.replica) for x in batch(net, samples, step))  # type: ignore[return-value]


def told(action: Callable[[], object]) -> str | None:
    try:
        action()
    except (InputError, ReplicaMismatchError) as error:
        return str(error)
    return None


@contextmanager
def said() -> Iterator[list[str]]:
    """What is said to people meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hetpipe").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("hetpipe").removeHandler(handler)


def noisy() -> nn.Sequential:
    layers = build("blocks")
    layers[2], layers[7] = nn.Dropout(0.5), Noise()
    return layers


def draw(world: World) -> dict[str, Any]:
    """Steps and evaluations of a net that draws, twice; and the order of a shuffled loader in between."""
    heard: dict[str, Any] = {"losses": [], "drawn": []}
    for _ in range(2):
        torch.manual_seed(world.rank)  # whatever it is, it is the user's
        net = noisy()
        engine = opened(world, net)
        engine.seed = 7
        engine.check_replicas_every = 10**6
        before = Generators.now()
        losses = []
        for step in range(3):
            losses.append(engine.step(*parts(engine, "blocks", step)))
            engine.zero_grad()
        engine.evaluate(*parts(engine, "blocks", 0))
        heard["moved"] = before.moved
        heard["losses"].append(losses)
        heard["drawn"].append([row for layer in engine.stage if isinstance(layer, Noise) for row in layer.drawn])
        engine.close()
    return heard


def add_up(world: World) -> dict[str, Any]:
    """Gradients of three batches of unequal weights; then what is lost, clipped elsewhere, or changed behind the engine."""
    engine = opened(world, build("tied"), tokens=True)
    heard: dict[str, Any] = {}
    with engine.accumulate():
        heard["losses"] = [engine.step(*parts(engine, "tied", step)) for step in range(3)]
        heard["again"] = told(lambda: engine.accumulate().__enter__())
    heard["gradients"] = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
    heard["norm"] = engine.grad_norm()
    for p in engine.parameters():
        p.grad = p.grad * 2 if p.grad is not None else None
    heard["replaced"] = engine.clip_grad_norm_(heard["norm"]), engine.grad_norm()
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    with engine.accumulate():
        engine.step(*parts(engine, "tied", 5))
        engine.zero_grad()
        heard["anew"] = [engine.step(*parts(engine, "tied", step)) for step in range(3)]
        heard["anew gradients"] = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        heard["gone"] = told(lambda: engine.step(*parts(engine, "tied", 3)))
        heard["after"] = engine.step(*parts(engine, "tied", 0))
    engine.zero_grad()
    with said() as lines:
        optimizer.step()
        engine.step(*parts(engine, "tied", 3))
        engine.step(*parts(engine, "tied", 4))
        heard["lost"] = told(optimizer.step)
        engine.zero_grad()
        engine.step(*parts(engine, "tied", 4))
        engine.clip_grad_norm_(1e-3)
        optimizer.step()
        heard["quiet"] = list(lines)
        engine.step(*parts(engine, "tied", 4))
        torch.nn.utils.clip_grad_norm_(engine.parameters(), 1e-3)
        optimizer.step()
        heard["clipped"] = lines[len(heard["quiet"]) :]
    engine.close()
    return heard


def change(world: World) -> dict[str, Any]:
    """What is trained is changed on one rank, or on all."""
    heard: dict[str, Any] = {}

    def frozen() -> nn.Sequential:
        net = build("blocks")
        net[3].requires_grad_(False)
        return net

    def thaw(net: nn.Sequential) -> None:
        net[3].requires_grad_(True)

    def freeze(net: nn.Sequential) -> None:
        net.get_parameter("5.linear.weight").requires_grad_(False)

    def replace(net: nn.Sequential) -> None:
        net[5].linear.weight = nn.Parameter(net.get_parameter("5.linear.weight").detach().clone())  # type: ignore[union-attr]

    def add(net: nn.Sequential) -> None:
        net[5].adapter = nn.Linear(WIDTH, WIDTH)

    def assign(net: nn.Sequential) -> None:
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)

    def narrow(net: nn.Sequential) -> None:
        net.float()

    for number, action in enumerate((thaw, freeze, replace, add, assign, narrow)):
        net = frozen()
        engine = opened(world, net)
        if world.rank == 0 or number % 2:
            action(net)
        heard[action.__name__] = told(lambda engine=engine: engine.step(*parts(engine, "blocks", 0)))  # type: ignore[misc]
        engine.close()
    return heard


def unlike(world: World) -> dict[str, Any]:
    """What is given to the two ends of a pipeline, or to all, is not what it should be."""
    heard: dict[str, Any] = {}
    engine = opened(world, build("blocks"))
    inputs, targets = parts(engine, "blocks", 0)
    swapped = [0, 1, 3, 2, 4] if world.rank == 0 else list(range(len(inputs)))
    heard["swapped"] = told(lambda: engine.step(inputs[swapped], targets[swapped]))
    heard["narrow inputs"] = told(lambda: engine.step(inputs if engine.is_last else inputs.float(), targets))
    heard["swapped in an evaluation"] = told(lambda: engine.evaluate(inputs[swapped], targets[swapped]))
    heard["others"] = told(lambda: engine.step(inputs, targets if engine.is_last else None))
    engine.close()
    return heard


class Head(nn.Module):
    """A loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Any, targets: Any) -> Tensor:
        return F.mse_loss(as_tuple(output)[0] * self.scale, as_tuple(targets)[0])


def lose(world: World) -> dict[str, Any]:
    """Losses that are not what they seem."""
    heard: dict[str, Any] = {}
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    calls = [0]

    def detached(output: Any, targets: Any) -> Tensor:
        """From the third step on."""
        calls[0] += torch.is_grad_enabled()
        loss = F.mse_loss(as_tuple(output)[0], as_tuple(targets)[0])
        return loss.detach() if switch[0] else loss

    def masked(output: Any, targets: Any) -> Tensor:
        (o,), (t,) = as_tuple(output), as_tuple(targets)
        keep = (t.abs() < 5).to(o)
        return ((o - t).square() * keep).sum() / keep.sum().clamp(min=1)

    switch = [False]
    net = build("blocks")
    last = net.get_parameter("9.linear.weight")
    losses: dict[str, Any] = {
        "own": Head(),
        "closure": lambda o, t: F.mse_loss(as_tuple(o)[0], as_tuple(t)[0]) + 0.1 * weight.square().sum(),
        "penalty": lambda o, t: F.mse_loss(as_tuple(o)[0], as_tuple(t)[0]) + 0.1 * last.square().sum(),
    }
    for name, function in losses.items():
        engine = opened(world, net, loss=Loss(function=function))
        heard[name] = told(lambda engine=engine: engine.step(*parts(engine, "blocks", 0)))  # type: ignore[misc]
        engine.close()
    for name, function in {"detached": detached, "masked": masked}.items():
        engine = opened(world, build("blocks"), loss=Loss(function=function))
        found = []
        for step in range(4):
            inputs, targets = parts(engine, "blocks", step)
            if step >= 2:
                switch[0] = True
                targets = targets.clone()
                targets[-1] = 7.0
            found.append(told(lambda engine=engine, x=inputs, y=targets: engine.step(x, y)))  # type: ignore[misc]
        heard[name] = found
        heard[f"{name}, gradients"] = [n for n, p in engine.named_parameters() if p.grad is not None and found[-1]]
        engine.close()
    return heard


class Centring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Keeping(nn.Module):
    """A mean, and a count, of what it has seen; one is written in place, the other replaced."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        if self.training:
            with torch.no_grad():
                mean.lerp_(x.mean(0), 0.1)
            self.count = self.count + 1
        return x - mean


class Fours(nn.Module):
    """Takes samples by threes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 3, WIDTH).reshape(-1, WIDTH) if len(x) > 3 else x


def with_layer(layer: nn.Module) -> nn.Sequential:
    """As the eighth of ten, which is in the second stage of replica 0, and on rank 2."""
    net = build("blocks")
    net[7] = layer
    return net


def couple(world: World) -> dict[str, Any]:
    """Layers that couple samples or keep state, refused and accepted; buffers that are equal from then on."""
    heard: dict[str, Any] = {}
    for name, layer in {"centring": Centring(), "keeping": Keeping(), "fours": Fours()}.items():
        engine = opened(world, with_layer(layer))
        before = {n: b.clone() for n, b in engine.stage.named_buffers()}
        with said() as lines:
            heard[name] = told(lambda engine=engine: engine.step(*parts(engine, "blocks", 0)))  # type: ignore[misc]
        heard[f"{name}, said"] = lines
        heard[f"{name}, gradients"] = [n for n, p in engine.named_parameters() if p.grad is not None]
        assert name != "centring" or before.keys() == dict(engine.stage.named_buffers()).keys()
        engine.close()
    engine = opened(world, with_layer(Keeping()), coupled_layers="per_microbatch")
    optimizer, heard["buffers"] = torch.optim.SGD(engine.parameters(), lr=0.1), []
    for step in range(4):
        given = parts(engine, "blocks", step)
        if step == 2:  # replica 0 has fewer
            given = tuple(x[:2] for x in given) if engine.replica == 0 else given
        engine.step(*given)
        optimizer.step()
        heard["buffers"].append({n: b.clone() for n, b in engine.stage.named_buffers()})
    engine.close()
    net = with_layer(Keeping())
    if world.rank == 2:
        net.get_buffer("7.mean").fill_(1.0)
    engine = opened(world, net)
    heard["other buffers"] = told(lambda: check_same_model(engine))
    engine.close()
    return heard


def predict(world: World) -> dict[str, Any]:
    """Outputs; an evaluation in inference mode; an optimizer of named parameters where there are none; complex gradients."""
    net = nn.Sequential(*list(build("blocks"))[:6], *(nn.Identity() for _ in range(4)))
    engine = opened(world, net)
    inputs, targets = parts(engine, "blocks", 0)
    torch.optim.AdamW(engine.named_parameters())
    heard: dict[str, Any] = {"output": engine(inputs)}
    with torch.inference_mode():
        heard["evaluation"] = engine.evaluate(inputs, targets).loss
        heard["inferred"] = engine(inputs)
    heard["plain"] = engine.evaluate(inputs, targets).loss
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    heard["losses"] = []
    for _ in range(2):
        heard["losses"].append(engine.step(inputs, targets))
        optimizer.step()
    engine.close()
    return heard


EPOCHS = 3


class Points(Dataset[Any]):
    """21 of them: the last batch of eight is a part of one."""

    def __init__(self) -> None:
        self.inputs, self.targets = (as_tuple(x)[0] for x in batch("blocks", 21, 5))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


def loop_over(dropout: float) -> tuple[nn.Sequential, DataLoader[Any], list[list[int]]]:
    """A model, a loader that shuffles by torch's own generator, and a place for the numbers of what it gave."""
    torch.manual_seed(3)
    net = build("blocks")
    net[7] = nn.Dropout(dropout)
    torch.manual_seed(4)
    return net, DataLoader(Points(), batch_size=8, shuffle=True), []


def shuffled(plan: Plan | None, cluster: Cluster, folder: str) -> list[dict[str, Any]]:
    """What a user writes, twice without and twice with Dropout: by this plan, or measured and planned, and the second time with
    the measurement that was kept."""
    os.chdir(folder)
    heard = []
    for dropout in (0.0, 0.0, 0.5, 0.5):
        model, loader, seen = loop_over(dropout)
        sample = as_tuple(batch("blocks", 4, 0)[0])[0]
        engine = (
            hetpipe.wrap(model, plan, sample, mse, cluster=cluster)
            if plan is not None
            else hetpipe.auto(model, (sample, sample), mse, global_batch=8, cluster=cluster, optimizer="SGD", partitioner="even")
        )
        optimizer, losses = torch.optim.SGD(engine.parameters(), lr=0.2), []
        for _ in range(EPOCHS):
            for x, y, number in loader:
                seen.append(number.tolist())
                losses.append(engine.step(engine.share(x), engine.share(y)))
                optimizer.step()
        heard.append({"order": seen, "losses": losses})
        engine.close()
    return heard
