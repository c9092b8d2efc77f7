"""What a process of a plan holds: its layers, under the names that they have in the whole model, and where they lie."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError, listed
from hetpipe.layers.device import state_bytes
from hetpipe.layers.model import Model, Tensors, as_tuple, batch_size, select
from hetpipe.layers.shards.split import pieces_in
from hetpipe.layers.transforms import written_names
from hetpipe.layers.weights import load_state, state_of
from hetpipe.planning.shares import shares_for
from hetpipe.processes.world import World
from hetpipe.runtime.checks import stale
from hetpipe.runtime.checks.agreement import batch_mark
from hetpipe.runtime.gradients import is_finite
from hetpipe.runtime.recorder import Recorder

Span = tuple[str, int, int, str, int, float, float]  # device, replica, stage, kind, micro-batch, start, end
SHARED = 64  # parts of batches that are known until they are used
NOTHING = "nothing"  # the name of the parameter of a process that has none


class Holder:
    """A process of a plan, which has some stages of one replica. `stage` has the layers of this process under their names in the
    whole model. `is_first`: it is given the inputs of its replica; `is_last`: its targets. Of a stage that is split over several
    devices, that is the first of them."""

    stage: nn.Sequential
    recorders: list[Recorder]  # one for each stage of this process
    device: torch.device  # the process's first

    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        plan.check(layers=len(model.layers))
        self._model = model
        self.seats = [seat for seat in plan.seats() if world.rank_of.get(seat.device) == world.rank]
        if not self.seats:
            raise InputError(f"device {world.device_id} has no part in the plan, which uses {list(plan.device_ids)}")
        self.replica, self.index = self.seats[0].replica, self.seats[0].stage
        self._replica_plan = plan.replicas[self.replica]
        leads = self.seats[0].shard == 0  # it speaks for the devices over which its stage is split
        self.is_first, self.is_last = leads and self.index == 0, leads and self.index == len(self._replica_plan.stages) - 1
        self.steps = 0  # begun so far
        self._shared: deque[tuple[weakref.ref[Tensor], int | None]] = deque(maxlen=SHARED)

    def left_to_others(self) -> None:
        """The values of this process's layers are newer now than what it has of other processes' layers."""
        if not self.is_alone:
            stale.mark(self.layers, self.stage)

    @property
    def is_alone(self) -> bool:
        """Whether it has all stages of its replica, and shares none of them."""
        return self.is_first and self.is_last and self.shard[1] == 1

    @property
    def drawing_rank(self) -> int:
        """The rank by which layers draw: the same on all devices over which a stage is split."""
        return self.world.rank_of[self._replica_plan.stages[self.index].devices[0]]

    @property
    def name(self) -> str:
        """`rank 3, replica 0 stage 1, device n0/1`, for messages."""
        return f"rank {self.world.rank}, {self.place}"

    @property
    def place(self) -> str:
        """`replica 0 stage 1, device n0/1`."""
        return f"{self.seats[0].place}, device {self.world.device_id}"

    @property
    def shard(self) -> tuple[int, int]:
        """Which shard of its stages this process holds, of how many."""
        return self.seats[0].shard, self.seats[0].degree

    @property
    def layer_range(self) -> tuple[int, int]:
        """The layers of this process's first stage: from this one on, and before that one."""
        return self._replica_plan.stages[self.index].layers

    @property
    def doing(self) -> str:
        """The action that began last, and in which step, for messages."""
        current = self._latest.current
        return f"{current} of step {self.steps}" if self.steps else current

    @property
    def waits(self) -> bool:
        """Whether that is to wait for other ranks."""
        return self._latest.waits

    @property
    def _latest(self) -> Recorder:
        return max(self.recorders, key=lambda r: r.began)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters; where none of them trains, and one without elements that does, too, since torch's optimizers
        refuse an empty list."""
        own = list(self.stage.parameters())
        return iter(own if any(parameter.requires_grad for parameter in own) else [*own, self._nothing])

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Those of them that train, for any torch optimizer: at least one, which may have no elements."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, or one without elements if it has none, with their names in the whole model, in which
        nothing is called compiled."""
        written = written_names(self.stage)
        own = [(written(name), parameter) for name, parameter in self.stage.named_parameters()]
        return iter(own or [(NOTHING, self._nothing)])

    @cached_property
    def _nothing(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(0, 0, device=self.device))  # Muon takes matrices only

    @property
    def layers(self) -> nn.Sequential:
        """The whole model; only this process's layers have their values here."""
        return self._model.layers

    def state_dict(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by their names in the whole model; all processes together have all of them.
        InputError where the stage is split, of which this process has shards only."""
        if pieces_in(self.stage):
            raise InputError(
                f"{self.name}: the stage is split over {self.shard[1]} devices, so a state of this rank has shards of tensors "
                "only; engine.whole_state_dict() on all ranks, or hetpipe.save_checkpoint, puts them together"
            )
        return state_of(self.stage)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of a state: of the whole model's, or of what `state_dict` gave here. InputError, before
        anything is changed, where it lacks a tensor of this process, has one that the model has not, or one of another shape."""
        own, written = state_of(self.stage), written_names(self.layers)
        pieces = {written(name): piece for name, piece in pieces_in(self.stage).items()}
        state = {written(name): tensor for name, tensor in state.items()}
        strange = state.keys() - state_of(self.layers).keys()
        faults = [f"it has {name!r}, which the model has not" for name in sorted(strange)]
        for name, tensor in own.items():
            shape = pieces[name].whole_shape(tensor.shape) if name in pieces else tuple(tensor.shape)
            if name not in state:
                faults.append(f"it has no {name!r}")
            elif tuple(state[name].shape) != shape:
                faults.append(f"{name!r} has shape {tuple(state[name].shape)}, in the model {shape}")
        if faults:
            raise InputError(f"{self.name}: this is not a state of the model:\n{listed(faults)}")
        load_state(self.stage, {name: pieces[name].shard(state[name]) if name in pieces else state[name] for name in own})
        self.left_to_others()

    def parameters_are_finite(self) -> bool:
        """Whether all numbers of the model's parameters are, on all devices. Collective."""
        return self.world.sum([not is_finite(*(p.detach() for p in self.stage.parameters()))])[0] == 0

    def share(self, batch: Tensors) -> Tensors:
        """This replica's rows of a global batch, for `step`: its planned samples, or its part of a smaller (last) batch."""
        begin, end = self._rows(batch_size(batch), self.replica)
        part = select(batch, slice(begin, end))
        if len(self.plan.replicas) > 1:
            self._shared.append((weakref.ref(as_tuple(part)[0]), batch_mark(batch)))
        return part

    def shared_of(self, part: Tensors | None) -> int | None:
        """The mark of the global batch of which `share` gave this part; None if it did not."""
        first = as_tuple(part)[:1] if part is not None else ()
        return next((mark for tensor, mark in reversed(self._shared) for own in first if tensor() is own), None)

    def _rows(self, samples: int, replica: int) -> tuple[int, int]:
        shares = [sum(sizes) for sizes in shares_for(self.plan, samples)]
        begin = sum(shares[:replica])
        return begin, begin + shares[replica]

    def row_of(self, samples: int, replica: int, row: int) -> int:
        """Which row of a batch of so many samples is this one of a replica's share."""
        return self._rows(samples, replica)[0] + row

    def _places(self) -> list[tuple[str, int, Recorder]]:
        """(device, stage, recorder) of each stage of this process."""
        return [(seat.device, seat.stage, recorder) for seat, recorder in zip(self.seats, self.recorders, strict=True)]

    def _optimize(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer of this process's parameters takes its step, as an action of each of its stages."""
        for recorder in self.recorders:
            recorder.begin("optimizer", "optimizer", 0, 0)
        optimizer.step()
        for recorder in self.recorders:
            recorder.finish()
        self.recorders[0].hold_state(lambda: state_bytes(optimizer))  # an emulated device has a process of its own

    def spans(self) -> list[Span]:
        """The actions of the step just done, in seconds since it began."""
        return [(device, self.replica, s, *span) for device, s, recorder in self._places() for span in recorder.end_step()]

    def computed(self) -> dict[str, Callable[[], float | None]]:
        """By the devices of this process, how long they computed in the step just done (see `Recorder.computed`)."""
        return {device: recorder.computed() for device, _, recorder in self._places()}

    def usage(self) -> list[tuple[str, int | None, float]]:
        """(device, peak bytes where they are known, seconds of overrun) of each stage of this process."""
        return [(device, recorder.peak_bytes, recorder.pacer.overrun_seconds) for device, _, recorder in self._places()]
