"""What a run knows goes from leg to leg by name, as it does from a checkpoint to a run. A tensor that a rank has stays where it
is; others come from the nearest rank that has them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetpipe.building.build import build_model
from hetpipe.checkpoints.resume import RunState
from hetpipe.checkpoints.state_tensors import (
    MODEL,
    OPTIMIZER,
    Shards,
    empty_optimizer_state,
    install,
    model_state,
    optimizer_state,
)
from hetpipe.checkpoints.stores.layout import Described
from hetpipe.checkpoints.training_state import FORMAT, TrainerState
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import counted
from hetpipe.files.units import human_bytes, human_seconds
from hetpipe.layers.device import state_bytes
from hetpipe.layers.shards.layout import Cut
from hetpipe.layers.shards.split import Piece
from hetpipe.processes.progress import say
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.world import World
from hetpipe.runtime.backends import seat
from hetpipe.runtime.checks.shortage import Shortage, raise_shortages
from hetpipe.runtime.whole_state import receive_tensor, send_tensor
from hetpipe.training.moving.modules import Modules
from hetpipe.training.moving.moves import nearest, stage_of, stay
from hetpipe.training.session import Session


class Carried(NamedTuple):
    """What this rank carries from a leg to the next: the step, its tensors by the whole model's names, of which of them it has
    `pieces` only, and the rest of the run's state as trainer.json has it. Tensors of layers that it keeps are where they are, all
    others on the CPU."""

    step: int
    tensors: dict[str, Tensor]
    pieces: dict[str, Piece]
    plain: dict[str, Any]

    @classmethod
    def of(cls, run: RunState, kept: Collection[str]) -> Carried:
        """Of a leg that is over; `kept`: names of layers."""
        stage = run.engine.stage
        own, split = model_state(stage) | optimizer_state(stage, run.optimizer), Shards(stage)
        pieces = {key: piece for key, tensor in own.items() if (piece := split.piece(key, tensor.shape)) is not None}
        here = {key: tensor if layer_of(key) in kept else tensor.cpu() for key, tensor in own.items()}
        return cls(run.engine.steps, here, pieces, run.plain())

    def kind(self, key: str) -> _Kind:
        """What there is of one of its tensors."""
        tensor, piece = self.tensors[key], self.pieces.get(key)
        if piece is None:
            return _Kind(tuple(tensor.shape), tensor.dtype)
        return _Kind(piece.whole_shape(tensor.shape), tensor.dtype, tuple(tensor.shape), piece.cut, piece.group.ranks)


class _Kind(NamedTuple):
    """The shape and type of a tensor; and if it is carried in shards, the shape of one, how it is cut, and who has them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: tuple[int, ...] = ()
    cut: Cut | None = None
    ranks: tuple[int, ...] = ()


def layer_of(key: str) -> str:
    """The layer of a tensor that is called so."""
    return key.removeprefix(MODEL).removeprefix(OPTIMIZER).partition(".")[0]


class _Sent(NamedTuple):
    """A tensor goes from the ranks that have it, or its shards, to one that wants it."""

    key: str
    kind: _Kind
    sources: tuple[int, ...]
    taker: int

    @property
    def size_bytes(self) -> int:
        """What leaves a rank for another."""
        share = 1 - self.sources.count(self.taker) / len(self.sources)
        return round(torch.Size(self.kind.shape).numel() * self.kind.dtype.itemsize * share)


class Handing:
    """Goes with a run from leg to leg, on one rank. Between two legs all ranks of the job call `leave`, before the engines of the
    next are made, and `enter`, once they are."""

    def __init__(self, session: Session) -> None:
        self.session, self._modules = session, Modules(session.model.layers)
        self._seconds = dict[str, float]()  # by cause, of the last time
        self._began = 0.0

    def leave(self, run: RunState | None, before: Plan, following: Plan, cluster: Cluster) -> Session:
        """The session of the next leg, with a model that has its values in the layers that this rank is going to train. `run`:
        that of the leg which is over (None: this rank was not used). `cluster` has the links by which the nearest is found."""
        self._seconds, self._began = {}, time.perf_counter()
        world, wants = self.session.world, self._range(following)
        names = self._modules.names(stay(before, following, world.device_id) if self._goes_on(before, following) else range(0))
        with self._timed("to take them down"):
            carried = Carried.of(run, names) if run is not None else None
            if self._goes_on(before, following):
                self._modules.set_down(set(self._modules.names(self._range(before))) - set(names), names)
        if not self._goes_on(before, following):
            with self._timed("to build the model anew"):
                self._modules.discard()
                self._build()
        step, plain = next(told for told in world.gather(carried and (carried.step, carried.plain)) if told is not None)
        taken = set(self._modules.names(wants)) - set(names)
        with self._timed("to send them"):
            found = self._passed(carried, taken, cluster)
            self._modules.give({key: tensor for key, tensor in found.items() if key.startswith(MODEL)})
        own = carried.tensors if carried is not None else {}
        self._state = {key: tensor for key, tensor in own.items() if layer_of(key) in names and key.startswith(OPTIMIZER)}
        self._found = {key: tensor for key, tensor in found.items() if key.startswith(OPTIMIZER)}
        self._plain = TrainerState.parse({"format": FORMAT, "step": step, **plain}, "the leg before")
        return self.session

    def enter(self, run: RunState | None) -> int:
        """Let the run of this leg go on from there; the step of that. None: this rank is not used. ShortMemoryError on every rank
        if one has no memory for what its optimizer keeps. Collective."""
        self._seconds["to join"] = time.perf_counter() - self._began - sum(self._seconds.values())
        short: Shortage | None = None
        if run is not None:
            run.engine.recorders[0].note("taking over the state of the run", waits=False)
            with run.engine.memory.watched():
                run.engine.memory.attempt(partial(self._take_state, run), lambda: None)
                short = run.engine.memory.shortage
        raise_shortages(self.session.world.gather(short))
        if run is not None:
            run.take_over(self._plain, "the leg before")
        self._state, self._found = {}, {}
        if self.session.world.is_main:
            parts = ", ".join(f"{human_seconds(seconds)} {cause}" for cause, seconds in self._seconds.items())
            say(f"{self._told}, in {human_seconds(time.perf_counter() - self._began)}: {parts}")
        return self._plain.step

    def _take_state(self, run: RunState) -> None:
        """An emulated device holds from now on what its optimizer keeps."""
        stage, found = run.engine.stage, self._found
        there = {key: Described(tuple(tensor.shape), tensor.dtype) for key, tensor in found.items()}
        room = empty_optimizer_state(stage, run.optimizer, there)
        for key, tensor in room.items():
            tensor.copy_(found[key])
        install(stage, run.optimizer, self._state | room)
        run.engine.recorders[0].hold_state(lambda: state_bytes(run.optimizer))

    def _goes_on(self, before: Plan, following: Plan) -> bool:
        """Whether the modules that there are can train on: layers of which an engine has made other ones, as one that splits them
        does, or whose numbers it holds in other types, are built anew."""
        world, types = self.session.world, [self._precision(plan) for plan in (before, following)]
        own = stage_of(before, world.device_id)
        return (
            {before.backend, following.backend} == {"torch"} and types[0] == types[1] and (own is None or len(own.devices) == 1)
        )

    def _precision(self, plan: Plan) -> str | None:
        device = self.session.world.device_id
        return (plan.precision or {}).get(self.session.cluster.device(device).type) if device is not None else None

    def _build(self) -> None:
        session = self.session
        self.session = replace(session, model=build_model(session.job, session.data))
        self._modules = Modules(self.session.model.layers)

    def _range(self, plan: Plan) -> range:
        """The layers that this rank has under a plan."""
        device = seat(self.session.world, plan.backend, plan).device_id
        own = stage_of(plan, device)
        if own is None:
            return range(0)
        return range(*own.layers) if plan.backend == "torch" else range(plan.layer_count)

    @contextmanager
    def _timed(self, cause: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[cause] = time.perf_counter() - began

    def _passed(self, carried: Carried | None, taken: Collection[str], cluster: Cluster) -> dict[str, Tensor]:
        """What this rank gets of these layers, on the CPU: from where it is nearest, which may be what this rank itself has.
        Collective."""
        world = self.session.world
        kinds = world.gather({key: carried.kind(key) for key in carried.tensors} if carried is not None else {})
        sent = _all_sent(dict(zip(world.ranks, kinds, strict=True)), self._wanted(taken), world, cluster)
        layers = {(layer_of(each.key), each.taker) for each in sent if each.size_bytes}
        self._told = f"moved {counted(len(layers), 'layer')}, {human_bytes(sum(each.size_bytes for each in sent))}"
        found = dict[str, Tensor]()
        with peers_named():
            for each in sent:
                whole = _pass_on(each, carried.tensors.get(each.key) if carried is not None else None, world)
                if whole is not None:
                    found[each.key] = whole
        return found

    def _wanted(self, taken: Collection[str]) -> list[set[str]]:
        """The names of the layers that each rank gets. Collective."""
        found: list[set[str]] = self.session.world.gather(set(taken))
        return found


def _all_sent(
    kinds: Mapping[int, Mapping[str, _Kind]], wanted: Collection[Collection[str]], world: World, cluster: Cluster
) -> list[_Sent]:
    """All tensors that ranks want, the same on all ranks."""
    device_of, found = {rank: device for device, rank in world.rank_of.items()}, list[_Sent]()
    holders = dict[str, dict[int, _Kind]]()
    for rank, own in kinds.items():
        for key, kind in own.items():
            holders.setdefault(key, {})[rank] = kind
    for key, there in sorted(holders.items()):
        for taker, layers in zip(world.ranks, wanted, strict=True):
            if layer_of(key) in layers:
                near = nearest(device_of[taker], [device_of[rank] for rank in there], cluster)
                kind = there[world.rank_of[near]]
                found.append(_Sent(key, kind, kind.ranks or (world.rank_of[near],), taker))
    return found


def _pass_on(sent: _Sent, own: Tensor | None, world: World) -> Tensor | None:
    """The whole tensor, on the rank that takes it."""
    parts, kind = list[Tensor](), sent.kind
    for source in sent.sources:
        if source == world.rank:
            assert own is not None
            if sent.taker == source:
                parts.append(own.cpu())
            else:
                send_tensor(own.cpu(), sent.taker, world)
        elif world.rank == sent.taker:
            parts.append(receive_tensor(kind.shape if kind.cut is None else kind.shard, kind.dtype, source, world))
    if world.rank != sent.taker:
        return None
    return parts[0] if kind.cut is None else kind.cut.join(parts)
