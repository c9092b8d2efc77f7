"""What the processes of `test_one_process.py` run, and nets that only the libraries know."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetpipe
from bench.reference import ReferenceEngine
from hetpipe.documents.plan import Backend, Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, mse, split_rows
from hetpipe.processes.world import World
from hetpipe.runtime.gradients import ReplicaMismatchError
from tests.support.blocks import WIDTH, Block
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.support.transparency import open_engine, share

SKIPS = {"torchgpipe": "torchgpipe.skip", "fairscale": "fairscale.nn.pipe.skip"}
THREE_STAGES = {"cuts": [2, 3, 2], "sizes": [3, 2, 2]}


def skipping_net(backend: Backend) -> nn.Sequential:
    """Seven layers; "far" goes from layer 0 to layer 6, over two boundaries, "near" from 2 to 3, within the middle stage."""
    skip = import_module(SKIPS[backend])

    class Stash(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.block = name, Block()

        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            yield skip.stash(self.name, torch.sin(x))
            return self.block(x)

    class Pop(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.block = name, Block()

        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            skipped = yield skip.pop(self.name)
            return self.block(x) * skipped

    def stash(name: str) -> nn.Module:
        found: nn.Module = skip.skippable(stash=[name])(Stash)(name)
        return found

    def pop(name: str) -> nn.Module:
        found: nn.Module = skip.skippable(pop=[name])(Pop)(name)
        return found

    torch.manual_seed(0)
    layers = [stash("far"), Block(), stash("near"), pop("near"), Block(), Block(), pop("far")]
    return nn.Sequential(*layers).double()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@contextmanager
def engine_of(world: World, backend: Backend, rows: list[dict[str, Any]], layers: nn.Sequential, **more: Any) -> Iterator[Any]:
    sample = torch.zeros(2, WIDTH, dtype=next(layers.parameters()).dtype)
    plan = make_plan(rows, schedule="gpipe")
    engine = open_engine(world, plan, layers, sample, sample, Loss(function=mse), backend=backend, **more)
    yield engine
    engine.close()


class Seen(nn.Module):
    """A linear layer that notes the type of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.types = nn.Linear(WIDTH, WIDTH), set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.types.add(out.dtype)
        return out


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad and type(x) is Tensor:
            raise ValueError("no such luck")
        return x


def one_process(world: World, backend: Backend) -> dict[str, Any]:
    """One replica of three stages in this process: what it does and what it says, one question after the other."""
    found: dict[str, Any] = {}
    x, y = batch("blocks", 7, 0)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    found["skips"] = _skips(world, backend, x, y)
    found["autocast"] = _autocast(world, backend, x.float(), y.float())
    found["dropout"] = _dropout(world, backend, x, y)
    found["copies"] = _copies(world, backend)
    four = nn.Sequential(*list(build("blocks"))[:4])
    with engine_of(world, backend, [{"cuts": [2, 1, 1], "sizes": [4, 3]}], four) as engine:
        engine.step(x, y)
        found["spans"] = engine.spans()
        found["name"] = engine.name
    first, second, third, *_ = build("blocks")
    broken = nn.Sequential(first, second, Fails(), third)
    with engine_of(world, backend, [{"cuts": [2, 1, 1], "sizes": [4, 3]}], broken) as engine:
        with pytest.raises(ValueError, match="no such luck"):
            engine.step(x, y)
        found["doing"] = engine.doing
    other: Backend = "torchgpipe" if backend == "fairscale" else "fairscale"
    for name, rows, net in (
        ("foreign skip", THREE_STAGES, skipping_net(other)),
        ("recomputed skip", {**THREE_STAGES, "recompute": True}, skipping_net(backend)),
        ("lonely skip", {"cuts": [1, 1], "sizes": [4]}, nn.Sequential(*list(skipping_net(backend))[:2])),
    ):
        with pytest.raises(InputError) as caught, engine_of(world, backend, [rows], net):
            pass
        found[name] = str(caught.value)
    return found


def _skips(world: World, backend: Backend, x: Tensor, y: Tensor) -> dict[str, float]:
    alone = skipping_net(backend)
    truth = ReferenceEngine(alone, Loss(function=mse))
    wanted = truth.step(x, y)
    layers = skipping_net(backend)
    with engine_of(world, backend, [THREE_STAGES], layers) as engine:
        loss = engine.step(x, y)
        evaluation = engine.evaluate(x, y).loss - truth.evaluate(x, y).loss
        own, other = gradients(layers), gradients(alone)
    assert own.keys() == other.keys()
    worst = max(float((own[name] - other[name]).abs().max()) for name in own)
    least = min(float(g.abs().max()) for g in other.values())
    return {"loss": loss - wanted, "evaluation": evaluation, "worst": worst, "least gradient": least}


def _autocast(world: World, backend: Backend, x: Tensor, y: Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    seen = [Seen() for _ in range(4)]
    layers = nn.Sequential(*seen)
    with engine_of(world, backend, [{"cuts": [1, 2, 1], "sizes": [4, 3], "recompute": True}], layers) as engine:
        plain = engine.step(x, y)
        before = [set(layer.types) for layer in seen]
        for layer in seen:
            layer.types.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine.step(x, y)
        own = gradients(layers)
    types = [set(layer.types) for layer in seen]
    layers.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(split_rows(x, [4, 3]), split_rows(y, [4, 3]), strict=True):
            (Loss(function=mse).share(layers(a), b, 4)).backward()  # the power of two below 7, in half precision
    worst = max(float((own[name] - g * (4 / 7)).abs().max()) for name, g in gradients(layers).items())
    return {"before": before, "types": types, "moved": abs(loss - plain), "worst": worst}


def _dropout(world: World, backend: Backend, x: Tensor, y: Tensor) -> dict[str, float]:
    found: dict[bool, Any] = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        parts = [nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(4)]
        layers = nn.Sequential(*parts).double()
        rows = {"cuts": [2, 1, 1], "sizes": [4, 3], "recompute": recompute}
        with engine_of(world, backend, [rows], layers) as engine:
            torch.manual_seed(5)
            first = engine.step(x, y)
            again = engine.step(x, y)
            torch.manual_seed(5)
            engine.step(x, y)
            found[recompute] = first, gradients(layers)
            assert abs(first - again) > 1e-3, "every step draws anew"
    (a, own), (b, other) = found[False], found[True]
    return {"loss": abs(a - b), "worst": max(float((own[n] - other[n]).abs().max()) for n in own)}


def _copies(world: World, backend: Backend) -> dict[str, Any]:
    """Layer 9 of the tied net shares the weight of layer 0: in its stage it is a copy, and told where it differs."""
    layers = build("tied")
    plan = make_plan([{"cuts": [4, 3, 3], "sizes": [4, 3]}], schedule="gpipe")
    words, labels = batch("tied", 7, 0)
    engine = open_engine(world, plan, layers, words, labels, Loss(function=_last_mean, ignore_index=-1), backend=backend)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
    engine.step(words, labels)
    optimizer.step()
    engine.check_replicas()
    state = engine.stage.state_dict()
    equal = torch.equal(state["0.weight"], state["9.weight"])
    apart = state["0.weight"].data_ptr() != state["9.weight"].data_ptr()
    with torch.no_grad():
        engine.stage[9].weight[0, 0] += 1e-9
    with pytest.raises(ReplicaMismatchError) as caught:
        engine.check_replicas()
    engine.close()
    return {"equal": equal, "apart": apart, "same object": engine.stage[0] is layers[0], "message": str(caught.value)}


def _last_mean(output: Any, _targets: Any) -> Tensor:
    mean: Tensor = output.square().mean()
    return mean


def batch_norm_net(momentum: float | None = 0.1) -> nn.Sequential:
    """Eight layers. The first BatchNorm (layer 1) is given what the one device's is given, however the batch is cut;
    `momentum` is the second's."""
    torch.manual_seed(0)
    row: list[nn.Module] = []
    for each in (0.1, momentum):
        norm = nn.BatchNorm1d(2, momentum=each)
        row += [nn.Unflatten(1, (2, WIDTH // 2)), norm, nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*row).double()


def deferred(world: World, backend: Backend, recompute: bool) -> dict[str, Any]:
    """Three steps over two replicas, the last ones with fewer micro-batches than planned, and a replica without samples."""
    rows = [{"cuts": [3, 5], "sizes": [4, 4], "recompute": recompute}, {"cuts": [8], "sizes": [3, 2], "recompute": recompute}]
    layers = batch_norm_net(None)
    with engine_of(world, backend, rows, layers, batch_norm="deferred") as engine:
        for step, shares in enumerate(((8, 5), (5, 2), (3, 0))):
            x, y = batch("blocks", sum(shares), step)
            engine.step(share(x, shares, engine.replica), share(y, shares, engine.replica))
        return {name: value.clone() for name, value in layers.state_dict().items() if "running" in name or "tracked" in name}


def wrapped(plan: Plan, backend: Backend) -> dict[str, Any]:
    """A loop of one's own under a launcher that started one process a replica."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build("blocks")
    try:
        engine = hetpipe.wrap(model, plan, batch("blocks", 2, 0)[0], mse, backend=backend)
    except InputError as error:
        return {"message": str(error)}
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(3):
        inputs, targets = batch("blocks", plan.global_batch, step)
        losses.append(engine.step(engine.share(inputs), engine.share(targets)))
        optimizer.step()
    return {"losses": losses, "state": model.state_dict(), "replica": engine.replica}


SKIPPED: dict[str, tuple[Any, Any]] = {  # what is stashed, of a layer's output, and how it is used
    "detached": (lambda y: y.detach(), lambda z, skipped: z * skipped),
    "booleans": (lambda y: y > 0, lambda z, skipped: z * skipped),
    "integers": (lambda y: (4 * y).long(), lambda z, skipped: z * skipped),
    "not used": (lambda y: 2 * y, lambda z, skipped: z),
    "used without a gradient": (lambda y: 2 * y, lambda z, skipped: z * skipped.detach()),
    "nothing": (lambda y: None, lambda z, skipped: z if skipped is None else z / 0),
}


def net_with_a_skip(backend: Backend | None, kind: str) -> nn.Sequential:
    """Five layers; what the second stashes, the fourth pops. Without a back end: by a dictionary of its own."""
    make, use = SKIPPED[kind]
    skip, kept = import_module(SKIPS[backend]) if backend is not None else None, dict[str, Any]()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

    class Stash(Plain):
        def forward(self, x: Tensor) -> Any:
            y = self.block(x)
            yield skip.stash("far", make(y))  # type: ignore[union-attr]
            return y

    class Pop(Plain):
        def forward(self, x: Tensor) -> Any:
            skipped = yield skip.pop("far")  # type: ignore[union-attr]
            return use(self.block(x), skipped)

    class Keep(Plain):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            kept["far"] = make(y)
            return y

    class Take(Plain):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = use(self.block(x), kept["far"])
            return result

    torch.manual_seed(0)
    stash, pop = (Keep, Take) if skip is None else (skip.skippable(stash=["far"])(Stash), skip.skippable(pop=["far"])(Pop))
    return nn.Sequential(Block(), stash(), Block(), pop(), Block()).double()
