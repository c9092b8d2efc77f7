"""What every engine that trains by a plan does alike: the step, its gradient contract and clipping. A back end adds how its
process runs the micro-batches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Model, Tensors, Wanted, named_layers
from hetpipe.layers.shards.split import pieces_in
from hetpipe.layers.trials.layer_check import Outcome, few_of_each_kind
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.rendezvous import give_back_at_exit
from hetpipe.processes.world import World
from hetpipe.runtime.base import take_sizes
from hetpipe.runtime.buffers import SharedBuffers
from hetpipe.runtime.checks import stale
from hetpipe.runtime.checks.agreement import Statement
from hetpipe.runtime.checks.given import Given
from hetpipe.runtime.checks.handover import Handover
from hetpipe.runtime.checks.shortage import Shortage
from hetpipe.runtime.checks.trained import Trained
from hetpipe.runtime.forward import ForwardEngine
from hetpipe.runtime.gradients import GradientSync, ReplicaMismatchError
from hetpipe.runtime.precision.loss_scale import Divisor, LossScale
from hetpipe.runtime.replicas import PlanGroups
from hetpipe.runtime.whole_state import whole_state

CHECK_REPLICAS_EVERY = 100  # steps, unless a job says otherwise


class PlanEngine(ForwardEngine):
    """Trains a model by a plan, this process holding some stages of one replica. All ranks of `world`, those that the plan uses,
    construct it and call it in the same order."""

    sync: GradientSync
    groups: PlanGroups

    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        super().__init__(model, plan, world)
        self.check_replicas_every = CHECK_REPLICAS_EVERY
        self.ask_to_stop: Callable[[], bool] = lambda: False  # of this rank, looked at in every step
        self.asked_to_stop = False  # whether any rank asked in the last step: the same on all
        self.is_busy_beside: Callable[[], bool] = lambda: False  # this rank, with what it does beside its steps
        self.any_busy_beside = False  # whether any rank was in the last step: the same on all
        self.finite = True  # whether the loss and all gradients of the last step are: the same on all
        self.loss_scale = LossScale()  # in use where a device of the plan computes in float16: the same on all
        self.scaled = False  # whether the last step's loss was
        self.overflowed = False  # whether the gradients of the last step did, of a loss that was scaled: the same on all
        self._owed: Shortage | None = None  # of the optimizer's last step, of which the others are not told yet
        self._weights: list[float] | None = None  # of the steps that add up their gradients
        self._divisor: Callable[[], Divisor] = lambda: Divisor(1.0, 1.0)  # of a step's losses, once all have said what they weigh
        give_back_at_exit(self)

    @abstractmethod
    def _train(self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None) -> list[Tensor]:
        """Forward and backward of these micro-batches; the losses that are known here."""

    @abstractmethod
    def _try_layers(self, inputs: Tensors | None, samples: int) -> Outcome:
        """Try this process's layers (see `layer_check`) on a few of the replica's samples, of which there are so many."""

    def _refused(self, inputs: Tensors | None, samples: int) -> bool:
        """Whether this step is refused before anything of it runs, as devices that share a stage must be told; once it is looked
        at how layers are split. Collective over the replica."""
        return False

    def _layers_to_try(self, stage: nn.Sequential, lo: int) -> list[tuple[str, nn.Module]]:
        """The layers that this look tries of a stage which begins with layer `lo`, by name: in the first step all, since layers
        that look alike may differ in what cannot be compared, and then a few of each kind."""
        named, kinds = named_layers(stage), self._model.kinds
        if kinds is None or self._called == 1:
            return named
        look = self.steps - self._called + self._called.bit_length()  # a run that resumes goes on with others
        return few_of_each_kind(named, kinds, lo, look)

    def _watch(self, process_groups: Mapping[tuple[int, ...], dist.ProcessGroup], device: torch.device | None = None) -> None:
        """The stage is there: from now on it is looked at whether it stays as it is. `device`: see `GradientSync`."""
        self._held = SharedBuffers(self.stage, self.sync.groups, self.world, process_groups, device)
        accepted = self._model.coupled_layers is not None or self._model.batch_norm is not None
        self._buffers = self._held if accepted and len(self.plan.replicas) > 1 else None
        self._given = Given(self._model, self.loss, self.stage, self.replica, self.name)
        self._trained = Trained(self.stage)
        self._handover = Handover(list(self.trained_parameters()), split=bool(pieces_in(self.stage)))

    def _seed(self, wanted: Wanted) -> float:
        """The gradient of the whole batch's loss by that of a micro-batch."""
        self.recorders[0].note("the wait for what the other replicas' targets weigh")
        return wanted.weight / self._divisor().divisor

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """One global batch: every rank gives its replica's share (first stage: inputs; last stage: targets; a replica without
        samples: None or empty). Returns the loss of the whole global batch; gradients are ready on return. What layers draw is
        decided by (seed, rank, step); the generators of torch, numpy and Python are afterwards as they were. InputError on
        every rank where something is wrong with any of it, and ShortMemoryError where a device has no memory for it; then no
        parameter has a gradient."""
        self.steps += 1
        self._called += 1
        try:
            with peers_named(), self._by_itself(self.steps), self._handover.inside(), self.memory.watched(self._owed):
                loss = self._step(inputs, targets)
        except BaseException:
            self.zero_grad()  # no optimizer takes a gradient of half a step, or of the step before
            raise
        self.left_to_others()
        return loss

    def _step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """The stages of a replica agree on their share before they send each other anything. What the whole batch weighs, by
        which losses are divided, is added up meanwhile: no replica waits for another's optimizer before its first backward of a
        loss. All else that ranks were given is said with the loss, in one message."""
        if self._called > 1 and (self.steps - 1) % self.check_replicas_every == 0:
            self.recorders[0].note("the comparison of replicas")
            self._sum_if_computed()
            self.check_replicas()
        if self._looks and len(self.plan.replicas) > 1:
            self._trained.check_modes(self.world)
        self.recorders[0].note("the agreement on shares")
        row, own = self._told(inputs, targets, training=True)
        row.adding = float(self._weights is not None)
        gone = self._handover.begin(kept=bool(self._weights))
        before = sum(self._weights or ())
        self._divisor = self._agreed_divisor(row.weight, before)
        self._faults[:] = [gone] if gone is not None else []
        sizes = take_sizes(self._replica_plan.microbatch_sizes, self._own_share(row, inputs))
        if sizes:
            self._faults += self._faults_of_loss(targets, training=True)
            inputs, targets = self._shared_by_stage(inputs, targets, training=True)
            if self._refused(inputs, sum(sizes)):
                sizes = ()
        if sizes and self._looks and self._model.coupled_layers is None:
            self.recorders[0].note("the trial of the layers", waits=False)
            self._faults += self._given.faults_of_layers(self._try_layers(inputs, sum(sizes)))
        self._begin_step()
        self.sync.begin(before / self._divisor().divisor if self._weights else None)
        losses = self._train(sizes, inputs, targets) if sizes else []
        self.recorders[0].note("the sum of gradients")
        self.memory.attempt(self.sync.finish, self.sync.give_up)
        divisor = self._divisor()
        if divisor.correction != 1.0:
            self.sync.scale(divisor.correction)
        odd_here = not self.sync.is_finite()  # before the loss is waited for: a card that still computes is given this, too
        local = float(torch.stack(losses).sum()) if losses and self.is_last else 0.0
        self.recorders[0].note("the sum of losses")
        if self._faults or self.memory.shortage is not None:  # found in the midst of it
            own = replace(own, fault=own.fault or next(iter(self._faults), None), shortage=self.memory.shortage)
            row.faults = 1.0
        own_part = [local, self.ask_to_stop(), odd_here, self.is_busy_beside()]
        loss, asked, odd, busy, *numbers = self.world.sum([*own_part, *row.numbers()])
        total = Statement.of(numbers)
        self._hear(total, own)
        total.check_ends()
        loss /= total.weight or 1.0
        if self._buffers is not None:
            if self._looks:
                self._buffers.look()
            self._buffers.make_equal(total.given)
        self._look_for_overflow(divisor.scaled, odd > 0, again=before > 0 and self.overflowed)
        if self._weights is not None:
            self._weights.append(total.weight)
        self.asked_to_stop, self.any_busy_beside = asked > 0, busy > 0
        self.finite = odd == 0 and math.isfinite(loss)
        if self.finite:
            self._handover.made()
        self.recorders[0].note("what follows the gradients", waits=False)
        return loss

    def _agreed_divisor(self, weight: float, before: float) -> Callable[[], Divisor]:
        """Of the losses of a step, as a function that waits until all ranks have said what they weigh; those to whose gradients
        the step adds its own weighed `before`. Collective."""
        types = [stage.types for stage in self.boundaries.stages]
        casts, scales = (any(getattr(t, name) for t in types) for name in ("casts", "loss_is_scaled"))
        own = self.loss_scale.exponent
        told = self.world.sum_later([weight, casts, scales, own, own**2])

        def found() -> Divisor:
            total, casting, scaling, exponents, squares = told()
            if scaling and squares * self.world.size != exponents**2:
                self._faults.append(
                    f"the ranks have different loss scales, here {self.loss_scale.scale:g}: set engine.loss_scale alike on all"
                )
            return Divisor.of((before + total) or 1.0, casts=casting > 0, scale=self.loss_scale.scale if scaling else None)

        return cache(found)

    def _look_for_overflow(self, scaled: bool, odd: bool, *, again: bool) -> None:
        """Whether gradients of a scaled loss are `odd`. `again`: those to which a step has added its own were already."""
        self.scaled, self.overflowed = scaled, scaled and odd
        if self.overflowed:
            self._handover.leave_out()
        if scaled and not again:
            self.loss_scale.update(overflow=odd)

    def _own_share(self, row: Statement, inputs: Tensors | None) -> int:
        """The samples that this replica trains, by what its ranks were given in total; none if any of that is wrong, as all are
        told at the end of the step."""
        total, faults = self._in_replica(row, inputs, training=True)
        self._faults += faults
        if faults or (total.ends == 2 and total.digest):
            row.faults = total.faults = 1.0
        given, counted = total.given[self.replica], total.counted[self.replica]
        return int(given) if given == counted and not total.faults else 0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """The steps in here add up: after each, gradients are those of the batches of all of them so far as one batch, each
        sample (or token) counted once. Without it a step drops the gradients of the step before, which an optimizer must have
        taken. Every rank enters it."""
        if self._weights is not None:
            raise InputError("engine.accumulate() is in use already: it cannot be entered again")
        self._weights = []
        try:
            yield
        finally:
            self._weights = None

    def zero_grad(self) -> None:
        """No parameter has a gradient; in `accumulate` the sum begins anew. Every rank calls it."""
        self.sync.forget()
        self._handover.forget()
        if self._weights is not None:
            self._weights.clear()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients by the one global norm (each layer once however many replicas hold it). Returns the norm before. As
        with torch's own, gradients are no numbers afterwards where the norm is none, on every rank."""
        norm = self.grad_norm()
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:
            self.sync.scale(factor)
            self._handover.made()
        return norm

    def grad_norm(self) -> float:
        """The global gradient norm: squares summed in float64, the same bits on every rank."""
        return math.sqrt(self.world.sum([self.sync.square_norm()])[0])

    def check_replicas(self, *, buffers: bool = False) -> None:
        """ReplicaMismatchError on every rank if replicas of a layer hold different parameters, or buffers. Collective."""
        own = self.sync.difference() or (self._held.difference() if buffers else None)
        told = next((message for message in self.world.gather(own) if message is not None), None)
        if told is not None:
            raise ReplicaMismatchError(told)

    def whole_state_dict(self) -> dict[str, Tensor] | None:
        """The parameters and buffers of the whole model, by their names in it, on the engine's first rank, where
        `engine.world.is_main`; None on the others, which send one tensor after the other. They are copies on the CPU; a tensor
        that several layers share is one under each of its names. Every rank of the engine calls it. ReplicaMismatchError on every
        rank if replicas of a layer hold different parameters, of which only one would be in it."""
        with peers_named():
            self.check_replicas()
            return whole_state(self.layers, self.stage, self.world)

    def optimize(self, optimizer: torch.optim.Optimizer, *, told: bool = False) -> None:
        """Let the optimizer of this process's parameters take its step, as an action of each of its stages. Where one has no
        memory for it, ShortMemoryError on every rank: now, if all are to be `told` (then this is collective), or else in the
        next step. Then some have taken the step, and some a part of it."""
        with self.memory.watched():
            self.memory.attempt(lambda: self._optimize(optimizer), lambda: None)
            if self.memory.shortage is not None:
                self.memory.shortage = self._owed = replace(self.memory.shortage, spoils=True)
            if told:
                self._sum_if_computed()

    @property
    def has_half_a_step(self) -> bool:
        """Whether an optimizer's last step had no memory here, of which others do not know yet."""
        return self._owed is not None

    def leave(self) -> None:
        """Close, and end the plan's process groups. Every rank of the engine calls it."""
        with peers_named():
            self.world.barrier()
        self.close()
        self.groups.close()
        self.world.close()

    def close(self) -> None:
        """Give hooks and buffers back."""
        stale.close(self.layers)
        self._handover.close()
        self.sync.close()
