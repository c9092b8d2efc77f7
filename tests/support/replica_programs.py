"""What the ranks of tests/test_replicas.py run. Light to import, since every rank imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, as_tuple, cross_entropy, mse
from hetpipe.processes.world import World
from hetpipe.runtime.gradients import ReplicaMismatchError
from hetpipe.runtime.stages.engine import TorchEngine
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.support.transparency import open_engine, share


def twenty_steps(world: World, plan: Plan) -> dict[str, Any]:
    """20 clipped float32 steps of three unlike replicas; then one weight of replica 1's layer 5 is changed behind their backs."""
    layers = build("tied", torch.float32)
    engine = open_engine(world, plan, layers, *batch("tied", 4, 0), Loss(function=cross_entropy, weight="tokens"))
    assert isinstance(engine, TorchEngine)
    before, after = engine._sides
    engine._lanes.warm_up(before.peers, after.peers, engine.device)  # as on cards; it ends, and all goes on as without
    shares = tuple(replica.samples for replica in plan.replicas)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    norms = []
    for step in range(20):
        inputs, targets = batch("tied", sum(shares), step)
        engine.step(share(inputs, shares, engine.replica), share(targets, shares, engine.replica))
        norms.append(engine.clip_grad_norm_(0.05))
        optimizer.step()
        engine.check_replicas()
    state = {name: value.clone() for name, value in engine.stage.state_dict().items()}
    if engine.replica == 1 and "5.linear.weight" in state:
        with torch.no_grad():
            dict(engine.stage.named_parameters())["5.linear.weight"][0, 0] += 1e-6
    message = None
    try:
        engine.check_replicas()
    except ReplicaMismatchError as error:
        message = str(error)
    return {"replica": engine.replica, "norms": norms, "state": state, "message": message}


def refusals(world: World, plan: Plan) -> dict[str, Any]:
    """Wrong input, one kind after the other: what each rank was told. At the end, a step that goes well."""
    heard: dict[str, Any] = {}
    data = batch("blocks", 40, 0)
    loss = Loss(function=mse)

    def attempt(name: str, action: Any) -> Any:
        try:
            return action()
        except InputError as error:
            heard[name] = str(error)

    other = make_plan([{"cuts": [3, 4, 3], "sizes": [4, 4]}, {"cuts": [6, 4], "sizes": [4]}])
    attempt(
        "another plan on rank 2", lambda: open_engine(world, other if world.rank == 2 else plan, build("blocks"), *data, loss)
    )
    beyond = make_plan([{"cuts": [4, 2, 2, 2], "sizes": [4, 4]}, {"cuts": [6, 4], "sizes": [4]}])
    attempt("a device that is not there", lambda: open_engine(world, beyond, build("blocks"), *data, loss))
    nine = nn.Sequential(*list(build("blocks"))[:9])
    attempt("a model of nine layers", lambda: open_engine(world, plan, nine, *data, loss))
    engine = open_engine(world, plan, build("blocks"), *data, loss)
    assert engine is not None
    inputs, targets = (as_tuple(t)[0] for t in data)
    mine = slice(0, 8) if engine.replica == 0 else slice(8, 12)
    attempt("unequal ends", lambda: engine.step(inputs[:7] if engine.replica == 0 else inputs[8:12], targets[mine]))
    attempt(
        "too many samples",
        lambda: engine.step(
            inputs[:9] if engine.replica == 0 else inputs[9:12], targets[:9] if engine.replica == 0 else targets[9:12]
        ),
    )
    attempt(
        "unequal ends of an evaluation",
        lambda: engine.evaluate(inputs[mine], targets[:3] if engine.replica == 1 else targets[mine]),
    )
    short = inputs[mine, :-1] if engine.replica == 0 else inputs[mine]
    attempt("other shapes", lambda: engine.evaluate(short, targets[mine]))
    attempt("more dimensions", lambda: engine.step(inputs[mine, None] if engine.replica == 0 else inputs[mine], targets[mine]))
    long = torch.nn.functional.pad(inputs[mine], (0, 1)) if engine.replica == 1 else inputs[mine]
    attempt("a larger sample", lambda: engine.step(long, targets[mine]))
    heard["loss"] = engine.step(inputs[mine], targets[mine])
    rows = [{"cuts": [10], "sizes": [2, 1], "devices": [device]} for device in ("n0/0", "n0/1", "n0/2", "n1/0", "n1/1")]
    whole = open_engine(world, make_plan(rows), build("blocks"), *data, loss)
    assert whole is not None
    own = slice(3 * world.rank, 3 * world.rank + 3)
    more = slice(4) if world.rank == 3 else own
    attempt("too many samples for a whole replica", lambda: whole.step(inputs[more], targets[more]))
    heard["gradient after a refusal"] = next(whole.parameters()).grad
    attempt("unequal ends of a whole replica", lambda: whole.step(inputs[own], targets[own][: 3 - (world.rank == 1)]))
    with counted_sums() as sums:
        heard["loss of whole replicas"] = whole.step(inputs[own], targets[own])
    heard["sums"] = len(sums)
    part = own if world.rank < 4 else slice(12, 13)
    heard["loss of a partial batch"] = whole.step(inputs[part], targets[part])
    heard["norm of a partial batch"] = whole.grad_norm()
    return heard


@contextmanager
def counted_sums() -> Iterator[list[Any]]:
    """The tensors of all sums over ranks."""
    seen: list[Any] = []
    real = dist.all_reduce

    def spy(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.append(tensor)
        return real(tensor, *arguments, **keywords)

    with patch.object(dist, "all_reduce", spy):
        yield seen
