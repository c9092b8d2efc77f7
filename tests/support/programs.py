"""What the ranks of the tests run. Light to import, since every rank imports it."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetpipe
import hetpipe.processes.world
import hetpipe.runtime.replicas
import hetpipe.runtime.stages.engine
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.state_tensors import model_state
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Loss, cross_entropy, mse, select
from hetpipe.processes.peers.differences import check_alike
from hetpipe.processes.pulse import beats
from hetpipe.processes.whereabouts import describe_with, now, resumes_from
from hetpipe.processes.world import World
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.support.saving import cannot_save, saved_and_loaded
from tests.support.transparency import open_engine, share

# ---- world ----


class _Asked:
    """Whether its rank waits for others when it is sent."""

    waits = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _asked, (now().waits,)


def _asked(waits: bool) -> _Asked:
    found = _Asked()
    found.waits = waits
    return found


def talk(world: World) -> dict[str, Any]:
    """Small messages over all ranks, and over a part of them."""
    part = world.restrict(["n1/0", "n0/1"])
    heard: dict[str, Any] = {
        "rank": world.rank,
        "device": world.device_id,
        "rank_of": dict(world.rank_of),
        "main": world.is_main,
        "sum": world.sum([world.rank, 0.5]),
        "gather": world.gather(f"from {world.rank}"),
        "first": world.first(world.rank + 10),
        "part": part.device_id,
        "part ranks": part.ranks,
    }
    if part.device_id is not None:
        heard.update(
            {"part sum": part.sum([world.rank]), "part gather": part.gather(world.rank), "part first": part.first(world.rank)}
        )
    world.barrier()
    heard["waits"] = [now().waits, world.gather(_Asked())[world.rank].waits, now().waits]
    try:
        check_alike({"train.seed": world.rank // 2, "train.dtype": "float64"})
    except InputError as error:
        heard["differs"] = str(error)
    try:
        world.restrict(["n1/0", "n7/3"])
    except InputError as error:
        heard["message"] = str(error)
    return heard


def save_late(world: World, folder: str) -> dict[str, Any]:
    """Where a step waits 4 s for a peer (the first may take one on a busy machine), the last stage is 6 s late: with its engine,
    then with its part of a checkpoint, and then with that of another's loading."""
    os.environ["HETPIPE_TIMEOUT_SECONDS"] = "4"
    last = world.rank == world.size - 1

    def late(function: Any) -> Any:
        def later(*given: Any, **named: Any) -> Any:
            time.sleep(6.0 * last)
            return function(*given, **named)

        return later

    vars(hetpipe.runtime.stages.engine)["make_stage"] = late(hetpipe.layers.recipe.make_stage)
    plan, (inputs, targets) = make_plan([{"cuts": [6, 4], "sizes": [4, 4]}]), batch("blocks", 8, 0)
    engine = open_engine(world, plan, build("blocks"), inputs, targets, Loss(function=mse))
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    heard = {"losses": [engine.step(inputs, targets)]}
    vars(checkpoint)["model_state"] = late(model_state)
    saved = checkpoint.save(folder, 1, engine.stage, optimizer, {}, engine.world, 1)
    heard["losses"].append(engine.step(inputs, targets))
    checkpoint.load(saved, engine.stage, optimizer, engine.world)
    heard["losses"].append(engine.step(inputs, targets))
    return heard


# ---- launch ----


def note_pid(folder: str) -> int:
    rank = int(os.environ["RANK"])
    (Path(folder) / f"{rank}.tmp").write_text(str(os.getpid()))
    os.replace(Path(folder) / f"{rank}.tmp", Path(folder) / f"{rank}.pid")
    return rank


def wait_for_pids(folder: str, count: int) -> None:
    while len(list(Path(folder).glob("*.pid"))) < count:
        time.sleep(0.01)


def environment_of_rank(value: Any) -> tuple[Any, ...]:
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    return (*(int(os.environ[k]) for k in keys), value)


def held_back() -> tuple[int, int]:
    """How many objects are never looked at for garbage, and how many are."""
    return gc.get_freeze_count(), len(gc.get_objects())


def large_result() -> Tensor:
    return torch.full((1 << 18,), float(os.environ["RANK"]))


def _raise() -> None:
    raise KeyError("no such thing")


def _refuse() -> None:
    try:
        int("x")
    except ValueError as error:
        raise InputError("line 3 of the file is not a number") from error


def _wrap() -> None:
    try:
        raise torch.OutOfMemoryError("out of memory on rank 1")
    except RuntimeError as error:
        raise RuntimeError("[Stage 1] failed to run forward:\n args: Tensor(…)") from error


MISDEEDS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "input": _refuse,
    "wrapped": _wrap,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(7),
}


def misbehave(folder: str, how: str) -> None:
    """Rank 1 does `how`; the others wait for ever."""
    rank = note_pid(folder)
    wait_for_pids(folder, 3)
    if rank == 1:
        MISDEEDS[how]()
    time.sleep(600)


def be_deaf(folder: str) -> None:
    """Rank 0 raises; the others wait for ever and do not heed SIGTERM."""
    rank = note_pid(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"{rank}.deaf").touch()
    while len(list(Path(folder).glob("*.deaf"))) < 3:
        time.sleep(0.01)
    if rank == 0:
        raise ValueError("the others do not listen")
    time.sleep(600)


def kill_the_server(world: World, folder: str) -> None:
    """Rank 1 kills the process that it was forked from. By then all have said what is saved: rank 2 knows of more."""
    note_pid(folder)
    step = 40 if world.rank == 2 else 9
    resumes_from(f"step {step}, saved/step-{step:08d}")
    wait_for_pids(folder, 3)
    while any(not beat.resume for beat in beats().values()):  # it is said in another thread
        time.sleep(0.01)
    if world.rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def freeze(world: World, folder: str) -> None:
    """Rank 1 is stopped, as by SIGSTOP; the others wait for it as they do while a checkpoint is written."""
    rank = note_pid(folder)
    if rank == 1:
        resumes_from("step 7")
        describe_with("replica 0 stage 1", lambda: "its sleep")
        while rank not in (heard := beats()) or not heard[rank].place:
            time.sleep(0.01)
    world.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.patiently().barrier()


def give_what_cannot_be_sent(folder: str) -> Any:
    """Rank 1's result is a local function."""
    return (lambda: None) if note_pid(folder) == 1 else None


class Stumble(nn.Module):
    """A layer that fails in one forward of one rank."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and x.shape[0] == 2:  # not the fake tensors of tracing
            self.calls += 1
            if self.calls == 3:
                if self.what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("this layer has had enough")
        return x


def stumble_in_training(world: World, folder: str, what: str) -> None:
    """[2, 1, 1] layers beside one rank; the second stage (rank 1) fails in its third forward."""
    note_pid(folder)
    plan = make_plan([{"cuts": [2, 1, 1], "sizes": [2] * 4}, {"cuts": [4], "sizes": [3]}])
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Stumble(what), nn.Linear(4, 4))
    inputs = torch.zeros(11, 4)
    engine = open_engine(world, plan, layers, inputs, inputs, Loss(function=mse))
    assert engine is not None
    describe_with(engine.place, lambda: engine.doing)
    while world.rank not in (heard := beats()) or not heard[world.rank].place:  # it is said in another thread
        time.sleep(0.01)
    mine = inputs[:8] if engine.replica == 0 else inputs[8:]
    engine.step(mine, mine)


# ---- one's own loop ----


def own_loop(plan: Plan, seeds: tuple[int, ...] = (), tokens: bool = False, folder: str | None = None) -> dict[str, Any]:
    """What a user writes: a model, a plan, an optimizer, a loop."""
    net = "tied" if tokens else "blocks"
    inputs, targets = batch(net, 32, 0)
    model = build(net)
    rank = int(os.environ["RANK"])
    if seeds:
        torch.manual_seed(seeds[rank])
        nn.init.normal_(model.get_parameter("5.linear.weight"))
    sample = inputs[:2]
    try:
        engine = hetpipe.wrap(
            model, plan, sample, cross_entropy if tokens else mse, loss_weight="tokens" if tokens else "samples"
        )
    except InputError as error:
        time.sleep(0.2)  # the others hear it too
        return {"message": str(error)}
    shares = tuple(replica.samples for replica in plan.replicas)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2, momentum=0.9)
    batch_of_all = share(inputs, shares, engine.replica), share(targets, shares, engine.replica)

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(engine.step(*batch_of_all))
            engine.clip_grad_norm_(0.5)
            optimizer.step()
        return losses

    losses = train(3)
    found = engine.evaluate(*batch_of_all)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    heard = {"losses": losses, "state": state, "evaluation": found, "names": [n for n, _ in engine.named_parameters()]}
    if folder is not None:
        heard |= saved_and_loaded(engine, optimizer, folder, train) | cannot_save(engine, optimizer, folder)
        twice = [torch.cat([x, x]) for x in batch_of_all]  # type: ignore[list-item]
        engine.step(*batch_of_all)
        try:
            engine.step(*twice)  # more samples than planned
        except InputError:
            heard["stale"] = [name for name, p in engine.named_parameters() if p.grad is not None]
        engine.step(*batch_of_all)
        engine.close()
        heard["kept"] = [name for name, p in engine.named_parameters() if p.grad is not None]
    return heard


def _cramped(cluster: Cluster, kind: str) -> Cluster:
    types = {name: t.model_copy(update={"memory": 16}) if name == kind else t for name, t in cluster.device_types.items()}
    return cluster.model_copy(update={"device_types": types})


def automatic(cluster: Cluster, folder: str) -> dict[str, Any]:
    """What a user writes without a plan: a model, an optimizer, a loop, whose last batch is a partial one. Then with
    slow devices that hold no layer, so that every plan leaves them out."""
    os.chdir(folder)
    inputs, targets = batch("blocks", 16, 0)
    sample = (select(inputs, slice(2)), select(targets, slice(2)))
    engine = hetpipe.auto(build("blocks"), sample, mse, global_batch=16, cluster=cluster, optimizer="SGD", partitioner="even")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2)
    losses = []
    for rows in (slice(16), slice(16), slice(9)):
        losses.append(engine.step(engine.share(select(inputs, rows)), engine.share(select(targets, rows))))
        optimizer.step()
    whole, unused = engine.whole_state_dict(), None
    try:
        few = hetpipe.auto(build("blocks"), sample, mse, global_batch=1, cluster=_cramped(cluster, "slow"), optimizer="SGD")
        few.whole_state_dict()  # which no unused rank is waited for
    except hetpipe.UnusedRank as error:
        unused = str(error)
    return {"losses": losses, "state": engine.state_dict(), "devices": engine.plan.device_ids, "unused": unused, "whole": whole}


def alone(plan: Plan) -> dict[str, Any]:
    """Without torchrun: a world of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    inputs, targets = batch("blocks", 8, 0)
    engine = hetpipe.wrap(build("blocks"), plan, inputs, mse)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.2)
    losses = []
    for _ in range(2):
        losses.append(engine.step(inputs, targets))
        optimizer.step()
    return {"losses": losses, "state": dict(engine.stage.state_dict())}
