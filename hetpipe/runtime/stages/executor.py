"""Runs one stage of a pipeline: forward and backward by autograd, and what crosses its two boundaries (`transfers`), in the order
that `order` gives: early over gloo, agreed over NCCL.

No send is waited for before it must have arrived: that of an activation when its gradient has come; that of gradient j when the
input j + w of the stage before has come, whose warm-up depth is w, since that stage has run the backward of j before it.

First stages whose outputs need no gradient (nothing in them, nor before them, trains) run forwards only: no gradient is sent to
them, they keep nothing of a micro-batch that has left, and none of them has more than FORWARD_ONLY outputs at once: before the
forward of i it waits until that of i − FORWARD_ONLY has arrived, which is all that it waits for behind it.

Why no stage waits for ever, where transfers go on beside each other. A stage waits only in `take`, for the message that its next
action needs, and it has posted it. (What it waits for in `settle` has arrived, or, where no gradient comes back, was posted by a
neighbour that is at most a warm-up behind.) So of all messages that are waited for take the one whose sender's action comes first
in the order of the whole schedule, in which each action comes after those that it needs: such an order exists since depths never
rise along the pipeline (`schedule.check_depths`). That sender does not wait for another, or its message would come before; it
computes, sends without waiting, and the message arrives. Each lane carries its messages in one order at both ends, so none stands
in another's way. A stage that only runs forward waits for room as well: before its forward of i the next stage has to post its
receive of i − FORWARD_ONLY. It does so after actions that need none of the forwards from i on of the stage before, at this stage
and at those behind it, again since depths do not rise; so there still is an order of all actions. Why no stage waits for ever
where one transfer runs after the other: `order.agreed`, and in it the first that is not done.

A stage that has no memory left (`checks.shortage`) goes through all of its actions, computes nothing in them, and sends zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from hetpipe.documents.schedule import FORWARD_ONLY, Action, check_depths
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, Wanted, as_tuple
from hetpipe.layers.numbers import without_autocast
from hetpipe.layers.shards.standing_in import Messages, messages_of
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.stage import Stage
from hetpipe.runtime.checks.shortage import Memory
from hetpipe.runtime.recorder import Recorder
from hetpipe.runtime.replicas import Lanes
from hetpipe.runtime.stages.order import agreed, early
from hetpipe.runtime.stages.transfers import Incoming, Outgoing, Room, Side

Ends = tuple[Sequence[TensorSpec], Sequence[TensorSpec]]  # what enters and what leaves a stage with one micro-batch
Output = Callable[[Tensors, int], None]


class _Flight(NamedTuple):
    """What a micro-batch keeps between its forward and its backward."""

    inputs: tuple[Tensor, ...]
    ends: tuple[Tensor, ...]  # the outputs, or the loss
    held: list[object]


def forward_stages(boundaries: Sequence[Sequence[TensorSpec]]) -> int:
    """How many first stages run forwards only: those that end, as all before them, at one of these `boundaries` between stages
    that no gradient goes back over."""
    needed = [any(spec.requires_grad for spec in boundary) for boundary in boundaries]
    return needed.index(True) if any(needed) else len(needed)


class StageRun:
    """One stage's part of a pipeline for one list of micro-batch sizes: train it (`depths` and `loss` given; the first `frozen`
    stages still run only forwards), or only forward. `index` of so many `stages`; `sides` say with which ranks it exchanges
    what enters, and what leaves; `rooms` have the buffers for what enters, and for the gradients of what leaves; `last_backward`
    is called before the last backward, and `seed` before the backward of a loss, for the gradient of its target's. `memory`:
    whether there is any for what is computed."""

    def __init__(
        self,
        module: Stage,
        *,
        index: int,
        stages: int,
        sides: tuple[Side, Side],
        lanes: Lanes,
        rooms: tuple[Room, Room],
        sizes: Sequence[int],
        depths: Sequence[int] | None,
        recorder: Recorder,
        loss: Callable[[Tensors, Wanted], Tensor] | None,
        last_backward: Callable[[], None],
        seed: Callable[[Wanted], float] = lambda _: 1.0,
        frozen: int = 0,
        memory: Memory | None = None,
    ) -> None:
        self.module, self.index, self.sizes, self.group = module, index, sizes, sides[0].group
        self.memory = memory or Memory.unwatched()
        self.recorder, self.loss, self._last_backward, self._seed = recorder, loss, last_backward, seed
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.trains, m = depths is not None, len(sizes)
        if depths is not None:
            check_depths(depths)
        every = [depth if s >= frozen else None for s, depth in enumerate(depths or [None] * stages)]
        before = every[index - 1] if index else None
        self.has_backward, self._depth_before = every[index] is not None, before
        self.order = agreed(every, m)[index] if lanes.one_by_one else early(every, index, m)
        self._inputs = self._gradients = self._outputs = self._returned = None
        if not self.is_first:
            self._inputs = Incoming(sides[0], lanes.activations, rooms[0])
            self._returned = Outgoing(sides[0], lanes.gradients) if before is not None else None
        if not self.is_last:
            self._gradients = Incoming(sides[1], lanes.gradients, rooms[1]) if self.has_backward else None
            self._outputs = Outgoing(sides[1], lanes.activations)

    def run(
        self,
        ends: Sequence[Ends],
        inputs: Sequence[Tensors] | None,
        targets: Sequence[Wanted] | None,
        on_output: Output | None = None,
    ) -> list[Tensor]:
        """Run all micro-batches; `ends` has what enters and leaves with each. The first stage takes `inputs`; the last one, where
        it trains, `targets`, and returns their losses, and else calls `on_output` with each output."""
        self._begin(ends)
        self.memory.drop = self._drop
        self._flying: deque[_Flight] = deque()
        self._unsent: deque[list[object]] = deque()  # outputs that no backward will let go
        self._leaving: dict[str, deque[list[Tensor]]] = {"F": deque(), "B": deque()}
        self._losses: list[Tensor] = []
        comes = {"RECV_F": self._inputs, "RECV_B": self._gradients}
        leaves = {"SEND_F": self._outputs, "SEND_B": self._returned}
        for kind, i in self.order:
            if kind == "F":
                self._forward(Action(self.index, "F", i), inputs, targets, on_output)
            elif kind == "B":
                self._backward(Action(self.index, "B", i), targets)
            elif (lane := comes.get(kind)) is not None:
                self.memory.attempt(lane.post, lane.post)
            elif (out := leaves.get(kind)) is not None:
                out.send(self._leaving[kind[-1]].popleft())
        for out in (self._outputs, self._returned):
            if out is not None:
                out.settle(len(self.sizes))
        self._unsent.clear()
        return self._losses

    def _begin(self, ends: Sequence[Ends]) -> None:
        self.ends = ends
        for out in (self._outputs, self._returned):
            if out is not None:
                out.begin()
        if self._inputs is not None:
            self._inputs.begin([entering for entering, _ in ends])
        if self._gradients is not None:
            self._gradients.begin([[spec for spec in leaving if spec.requires_grad] for _, leaving in ends])

    def _forward(
        self, action: Action, inputs: Sequence[Tensors] | None, targets: Sequence[Wanted] | None, on_output: Output | None
    ) -> None:
        i, recorder = action.microbatch, self.recorder
        if self._inputs is None:
            given = as_tuple(inputs[i]) if inputs is not None else ()
        else:
            recorder.note(f"the wait for the input of {action}")
            given = self._inputs.take()
            if self.has_backward:
                given = tuple(t.detach().requires_grad_(s.requires_grad) for t, s in zip(given, self.ends[i][0], strict=True))
        if self._returned is not None and self._depth_before is not None:
            self._returned.settle(i + 1 - self._depth_before)
        if not self.has_backward and self._outputs is not None:
            self._outputs.settle(i + 1 - FORWARD_ONLY)
            while len(self._unsent) >= FORWARD_ONLY:
                self._unsent.popleft()
        self._count_messages()
        flight = self.memory.attempt(
            lambda: self._computed(action, given, targets, on_output), lambda: self._in_place_of_output(action)
        )
        if self._outputs is not None:
            self._leaving["F"].append([t.detach() for t in flight.ends])
        if self.has_backward and self.memory.shortage is None:
            self._flying.append(flight)
        if not self.has_backward:
            self._unsent.append(flight.held)
            if self._inputs is not None:
                self._inputs.release()

    def _computed(
        self, action: Action, given: tuple[Tensor, ...], targets: Sequence[Wanted] | None, on_output: Output | None
    ) -> _Flight:
        i, recorder = action.microbatch, self.recorder
        meter = recorder.meter if self.trains else None
        recorder.begin(str(action), "F", i, self.sizes[i])
        with meter.hooks() if meter is not None else nullcontext():
            output = self.module(*given)
            ends = as_tuple(output)
            held = [meter.hold(t) for t in ends] if meter is not None else []
        if self.is_last and self.trains:
            assert self.loss is not None and targets is not None
            # What the loss saves is counted with the last layer, of which there is room for one where layers are recomputed.
            hooks = meter.hooks() if meter is not None and not self.module.recompute else nullcontext()
            with hooks, self._loss_saves(ends, targets[i]):
                ends = (self.loss(output, targets[i]),)
            self._losses.append(ends[0].detach())
        if self.is_last:
            if on_output is not None:
                on_output(output, i)
        else:
            self._check(ends, action)
        recorder.finish()
        return _Flight(given, ends, held)

    def _in_place_of_output(self, action: Action) -> _Flight:
        """Zeros, where there is no memory; those that share the stage do not wait, either."""
        entering, leaving = self.ends[action.microbatch]
        if self.group is not None:
            self.group.answer(self._messages(entering, leaving).forward[self.group.exchanged :])
        return _Flight((), () if self.is_last else self._zeros(leaving), [])

    def _loss_saves(self, output: tuple[Tensor, ...], wanted: Wanted) -> AbstractContextManager[None]:
        """In here the loss runs, which saves as a layer does."""
        if self.module.offload is None:
            return nullcontext()
        self.module.offload.stay((*output, *as_tuple(wanted.targets)))
        return self.module.offload.layer()

    def _backward(self, action: Action, targets: Sequence[Wanted] | None) -> None:
        i, gradients = action.microbatch, tuple[Tensor, ...]()
        if self._gradients is not None and self._outputs is not None:
            self.recorder.note(f"the wait for the gradient of {action}")
            gradients = self._gradients.take()
            self._outputs.settle(i + 1)
        self._count_messages()
        returned = self.memory.attempt(
            lambda: self._went_back(action, gradients, targets), lambda: self._in_place_of_gradients(action)
        )
        if self._gradients is not None:
            self._gradients.release()
        if self._inputs is not None:
            self._inputs.release()
        if self._returned is not None:
            self._leaving["B"].append(returned)

    def _went_back(self, action: Action, gradients: tuple[Tensor, ...], targets: Sequence[Wanted] | None) -> list[Tensor]:
        """The gradients of what has entered the stage with a micro-batch, if the stage before wants them."""
        i, recorder = action.microbatch, self.recorder
        flight = self._flying.popleft()
        if self.is_last:
            assert targets is not None
            gradients = (torch.full_like(flight.ends[0], self._seed(targets[i])),)
        recorder.begin(str(action), "B", i, self.sizes[i])
        ends = flight.ends
        if not self.is_last:  # what nothing later uses takes no part in backward
            ends = tuple(t for t, spec in zip(ends, self.ends[i][1], strict=True) if spec.requires_grad)
        pairs = [(t, g) for t, g in zip(ends, gradients, strict=True) if t.requires_grad]
        if i == len(self.sizes) - 1:
            self._last_backward()
        if pairs:
            with without_autocast(pairs[0][0].device):
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        if self.module.offload is not None:
            self.module.offload.end()
        returned = [
            t.grad if t.grad is not None else torch.zeros_like(t)  # zeros for an input that this micro-batch did not use
            for t, spec in zip(flight.inputs, self.ends[i][0], strict=True)
            if spec.requires_grad and self._returned is not None
        ]
        del flight, ends, pairs
        recorder.finish()
        return returned

    def _in_place_of_gradients(self, action: Action) -> list[Tensor]:
        entering, leaving = self.ends[action.microbatch]
        if self.group is not None:
            self.group.answer(self._messages(entering, leaving).backward[self.group.exchanged :])
        return [*self._zeros(spec for spec in entering if spec.requires_grad)] if self._returned is not None else []

    def _zeros(self, specs: Iterable[TensorSpec]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=self.recorder.device) for spec in specs)

    def _count_messages(self) -> None:
        if self.group is not None:
            self.group.exchanged = 0

    def _messages(self, entering: Sequence[TensorSpec], leaving: Sequence[TensorSpec]) -> Messages:
        assert self.group is not None
        return messages_of(self.module, self.group, entering, leaving, self.recorder.device)

    def _drop(self) -> None:
        """There is no memory: what is kept for backward is kept for nothing."""
        self._flying.clear()
        self._unsent.clear()
        if self.module.offload is not None:
            self.module.offload.drop()

    def _check(self, outputs: tuple[Tensor, ...], action: Action) -> None:
        """What the next stage has made room for is what there is."""
        specs = self.ends[action.microbatch][1]
        found = [(tuple(t.shape), t.dtype) for t in outputs]
        if found != [(spec.shape, spec.dtype) for spec in specs]:
            told = "; ".join(str(TensorSpec(shape, dtype, False)) for shape, dtype in found)
            raise InputError(
                f"{action}: the stage's output is {told}, and {'; '.join(map(str, specs))} when it was traced, for which the "
                "next stage has made room: a layer's shapes must depend on its input's shapes only"
            )
