"""Ranks of which one has no memory in the midst of a step, which is then repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.documents.plan import Backend
from hetpipe.layers.model import as_tuple
from hetpipe.layers.shards.split import pieces_in
from hetpipe.layers.shards.standing_in import messages_of
from hetpipe.layers.shards.sums import Group, Message
from hetpipe.processes.world import World
from hetpipe.runtime.checks.shortage import ShortMemoryError
from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.stages.engine import TorchEngine
from tests.support.nets import batch, build, copied
from tests.support.transparency import AT_ONCE, Case, Trained, open_engine, share

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Short:
    """`rank` has no memory in step `step`, in an action ("F1": the forward of micro-batch 1; "B2"), in "sums" of gradients, for
    its "inputs", for what it "receives", or by its "meter", which has no room from then on; in a run in this `leg`, if one is
    named."""

    rank: int
    what: str
    step: int = 2
    leg: int | None = None


def _no_memory(*_: Any) -> Any:
    raise MemoryError


def _in_action(engine: PlanEngine, layer: nn.Module, current: str) -> Callable[[], None]:
    """The layer finds no memory in this action, the first time; what is returned mends that."""
    tries = iter([True])

    def look(*_: object) -> None:
        if engine.memory._watched and engine.recorders[0].current == current and next(tries, False):
            raise MemoryError

    handles = [layer.register_forward_pre_hook(look)]
    handles += [p.register_hook(look) for p in layer.parameters() if p.requires_grad]

    def mend() -> None:
        for handle in handles:
            handle.remove()

    return mend


def _once(holder: Any, name: str) -> Callable[[], None]:
    setattr(holder, name, _no_memory)
    return lambda: delattr(holder, name)


def lack(engine: PlanEngine, what: str) -> Callable[[], None]:
    """From now on this rank has no memory for that; what is returned mends it."""
    if what[1:].isdigit():
        layers = list(engine.stage)
        found = next(
            (layer for layer in layers[len(layers) // 2 :] if any(p.requires_grad for p in layer.parameters())), layers[-1]
        )
        return _in_action(engine, found, f"{engine.index}{what}")
    if what == "optimizer":  # it has taken a step that the others may take, too
        real_step = engine._optimize

        def optimize(optimizer: torch.optim.Optimizer) -> None:
            real_step(optimizer)
            raise MemoryError

        vars(engine)["_optimize"] = optimize
        return lambda: None
    if what == "sums":
        gather, sync = GradientSync._gather, engine.sync
        tries = iter([True])

        def gathered(parameters: Any) -> None:
            if next(tries, False):
                raise MemoryError
            gather(sync, parameters)

        vars(sync)["_gather"] = gathered
        return lambda: vars(sync).pop("_gather")
    if not isinstance(engine, TorchEngine):
        return _once(engine, "_computed")
    if what == "inputs":
        return _once(engine, "_microbatches")
    if what == "receives":
        engine._empty_rooms()
        tries = iter([True])
        real_new, room = engine._rooms[0]._new, engine._rooms[0]

        def new(messages: Any) -> Any:
            if next(tries, False):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real_new(messages)

        vars(room)["_new"] = new
        return lambda: vars(room).pop("_new")
    meter = engine.recorder.meter
    assert meter is not None
    before, meter.limit = meter.limit, meter.used
    return lambda: setattr(meter, "limit", before)


def repeated(world: World, cases: list[tuple[Case, Short]], backend: Backend = "torch") -> list[tuple[Trained, str] | None]:
    """What this rank has at the end of each case, and what it was told of the step that was repeated."""
    return [_repeated(world, *case, backend) for case in cases]


def _engine(world: World, case: Case, backend: Backend) -> PlanEngine | None:
    found: PlanEngine | None = open_engine(
        world,
        case.make_plan(),
        build(case.net, case.dtype),
        *batch(case.net, 3, 0, case.dtype),
        case.loss(),
        emulation=AT_ONCE if case.emulated else None,
        backend=backend,
        coupled_layers="per_microbatch",  # else they are tried, which takes most of the time
    )
    return found


def _repeated(world: World, case: Case, short: Short, backend: Backend) -> tuple[Trained, str] | None:
    engine = _engine(world, case, backend)
    if engine is None:
        return None
    optimizer, losses, told = case.make_optimizer(engine.trained_parameters()), list[float](), ""
    for step in range(case.steps):
        shares = case.shares_of(step)
        inputs, targets = case.batch(sum(shares), step)
        given = (
            share(inputs, shares, engine.replica) if engine.is_first else None,
            share(targets, shares, engine.replica) if engine.is_last else None,
        )
        if step == short.step:
            mend = lack(engine, short.what) if world.rank == short.rank else lambda: None
            try:
                engine.step(*given)
            except ShortMemoryError as error:
                told = str(error)
            mend()
            assert all(p.grad is None for p in engine.parameters())
            engine.steps -= 1
        losses.append(engine.step(*given))
        if case.clip is not None:
            engine.clip_grad_norm_(case.clip)
        optimizer.step()
    pieces = pieces_in(engine.stage)
    state = {n: copied(pieces[n].joined(v) if n in pieces else v) for n, v in engine.stage.state_dict().items()}
    found = Trained(engine.replica, losses, [], [], state, set(), [])
    engine.leave()
    return found, told


def evaluated(world: World, case: Case, short: Short) -> str:
    """What this rank was told of an evaluation for which one had no memory."""
    engine = _engine(world, case, "torch")
    assert engine is not None
    inputs, targets = case.batch(sum(case.shares_of(0)), 0)
    mend = lack(engine, short.what) if world.rank == short.rank else lambda: None
    try:
        engine.evaluate(engine.share(inputs), engine.share(targets))
        told = "nothing"
    except ShortMemoryError as error:
        told = str(error)
    mend()
    engine.evaluate(engine.share(inputs), engine.share(targets))
    engine.leave()
    return told


def one_process(world: World, case: Case, short: Short, backend: Backend) -> tuple[Trained, str] | None:
    """The same as `repeated`, of a process that drives a replica."""
    return _repeated(world, case, short, backend)


def noted(world: World) -> list[tuple[list[list[Message]], list[list[Message]]]]:
    """Of some split stages: the messages in the forward and backward of a micro-batch, as they are sent, and as they are
    found."""
    sent, real = list[Message](), Group._only_noted
    found = []

    def noting(group: Group, tensor: Tensor, *, gathered: bool) -> bool:
        if group.noted is None and tensor.dtype != torch.uint8:  # what is received in pieces
            sent.append(Message(gathered, tuple(tensor.shape), tensor.dtype, tensor.device))
        return real(group, tensor, gathered=gathered)

    for net, recompute in (("splittable", False), ("splittable, DoRA", False), ("splittable", True)):
        plan = ({"cuts": [10], "sizes": [3], "widths": [2], "recompute": recompute},)
        engine = _engine(world, Case(name=net, net=net, plan=plan), "torch")
        assert isinstance(engine, TorchEngine)
        assert engine.group is not None
        ends = engine._crossing((3,), training=True).ends[0]
        setattr(Group, "_only_noted", noting)  # noqa: B010
        inputs = [t.requires_grad_(s.requires_grad) for t, s in zip(as_tuple(batch(net, 3, 0)[0]), ends[0], strict=True)]
        sent.clear()
        outputs = as_tuple(engine.stage(*inputs))
        forward = list(sent)
        sent.clear()
        torch.autograd.backward([*outputs], [torch.ones_like(t) for t in outputs])
        setattr(Group, "_only_noted", real)  # noqa: B010
        own = messages_of(engine.stage, engine.group, *ends, engine.device)
        found.append(([forward, list(sent)], [list(own.forward), list(own.backward)]))
        engine.leave()
    return found
