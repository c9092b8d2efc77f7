"""What every engine that trains by a plan does alike: the step, its gradient contract, clipping and evaluation. A back end
adds how its process runs the micro-batches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.files.messages import InputError
from hetpipe.layers.model import Model, Tensors, Wanted, as_tuple, as_value, evaluating
from hetpipe.layers.numbers import callers_autocast, computing
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.trials.layer_check import Outcome
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.rendezvous import give_back_at_exit
from hetpipe.processes.world import World
from hetpipe.runtime.base import Evaluation, Metric, even_sizes, take_sizes
from hetpipe.runtime.boundaries import Boundaries
from hetpipe.runtime.buffers import SharedBuffers
from hetpipe.runtime.checks import stale
from hetpipe.runtime.checks.agreement import (
    Complaint,
    Statement,
    digest,
    marks_of,
    raise_batches,
    raise_first,
)
from hetpipe.runtime.checks.given import Given
from hetpipe.runtime.checks.handover import Handover
from hetpipe.runtime.checks.trained import Trained
from hetpipe.runtime.gradients import GradientSync, ReplicaMismatchError
from hetpipe.runtime.holder import Holder
from hetpipe.runtime.replicas import PlanGroups
from hetpipe.runtime.whole_state import whole_state
from hetpipe.spec.plan import Plan

OnOutput = Callable[[Tensors, int], None]  # of a micro-batch, by its number
CHECK_REPLICAS_EVERY = 100  # steps, unless a job says otherwise


class PlanEngine(Holder, ABC):
    """Trains a model by a plan, this process holding some stages of one replica. All ranks of `world`, those that the plan uses,
    construct it and call it in the same order."""

    sync: GradientSync
    groups: PlanGroups
    boundaries: Boundaries

    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        super().__init__(model, plan, world)
        self.loss = model.loss
        self.seed = 0  # of what layers draw: with the rank and the step
        self.check_replicas_every = CHECK_REPLICAS_EVERY
        self.ask_to_stop: Callable[[], bool] = lambda: False  # of this rank, looked at in every step
        self.asked_to_stop = False  # whether any rank asked in the last step: the same on all
        self.finite = True  # whether the loss and all gradients of the last step are: the same on all
        self._outputs: dict[bool, tuple[TensorSpec, ...] | None] = {}  # of the last layer, in training and in evaluation
        self._called = 0  # steps of this engine
        self._faults: list[str] = []  # of this rank, found in the midst of a step
        self._weights: list[float] | None = None  # of the steps that add up their gradients
        self._whole: Callable[[], float] = lambda: 1.0  # what all of a step's targets weigh, and those of such steps before it
        give_back_at_exit(self)

    @abstractmethod
    def _train(self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None) -> list[Tensor]:
        """Forward and backward of these micro-batches; the losses that are known here."""

    @abstractmethod
    def _infer(self, sizes: tuple[int, ...], inputs: Tensors | None, on_output: OnOutput) -> None:
        """Forward of these micro-batches without gradients, with `on_output(output, number)` where the outputs are."""

    @abstractmethod
    def _try_layers(self, inputs: Tensors | None, samples: int) -> Outcome:
        """Try this process's layers (see `layer_check`) on a few of the replica's samples, of which there are so many."""

    @property
    def _devices(self) -> Sequence[torch.device]:
        """All of this process; the loss is computed on the last."""
        return [self.device]

    def _watch(self, process_groups: Mapping[tuple[int, ...], dist.ProcessGroup], device: torch.device | None = None) -> None:
        """The stage is there: from now on it is looked at whether it stays as it is. `device`: see `GradientSync`."""
        self._held = SharedBuffers(self.stage, self.sync.groups, self.world, process_groups, device)
        accepted = self._model.coupled_layers is not None or self._model.batch_norm is not None
        self._buffers = self._held if accepted and len(self.plan.replicas) > 1 else None
        self._given = Given(self._model, self.loss, self.stage, self.replica, self.name)
        self._trained = Trained(self.stage)
        self._handover = Handover(list(self.stage.parameters()))

    @property
    def _looks(self) -> bool:
        """Whether this step is one of those (1, 2, 4, 8, …) in which all is looked at that would take too long in each."""
        return self._called & (self._called - 1) == 0

    @abstractmethod
    def _retyped(self) -> None:
        """The stages have other number types from now on (`boundaries.stages`)."""

    @contextmanager
    def _by_itself(self, *place: int | str) -> Iterator[None]:
        """Whatever the caller has switched off (torch.no_grad, torch.inference_mode) or drawn: in here gradients are made, and
        what layers draw is decided by the engine's seed, the rank and this place. The caller's autocast is every stage's, of
        which the plan does not say what it computes in."""
        devices = self._devices
        if self.boundaries.follow(callers_autocast(self.device)):
            self._retyped()
        own = self.boundaries.stages[-1 if self.is_last else self.index].types
        with torch.inference_mode(False), torch.enable_grad(), computing(own, devices[-1]), \
                drawing(self.seed, self.world.rank, *place, devices=devices):  # fmt: skip
            yield

    def _mean_loss(self, output: Tensors, wanted: Wanted) -> Tensor:
        if wanted.weight == 0 and (lost := self.loss.lost(output, wanted.targets)) is not None:
            if not torch.is_grad_enabled():
                raise InputError(lost)
            self._faults.append(lost)  # which all ranks are told at the end of the step
        loss = self.loss.share(output, wanted.targets, wanted.weight or 1.0, wanted.weight)
        if torch.is_grad_enabled():
            self._faults += self._given.faults_of_loss(loss, output, whole=self._looks)
        return loss

    def _seed(self, wanted: Wanted) -> float:
        """The gradient of the whole batch's loss by that of a micro-batch."""
        self.recorders[0].note("the wait for what the other replicas' targets weigh")
        return wanted.weight / self._whole()

    def _told(self, inputs: Tensors | None, targets: Tensors | None, *, training: bool) -> tuple[Statement, Complaint]:
        """What this rank says of its part of a batch, and in full where something is wrong."""
        row, fault, marks = Statement.empty(len(self.plan.replicas)), None, tuple[int, ...]()
        given, counted = row.given, row.counted
        try:
            if training:
                self._given.check_norms()
                self._trained.check()
            if self.is_first:
                given[self.replica] = self._given.rows(inputs, "inputs")
                if inputs is not None and given[self.replica] and not self.is_last:
                    self._given.check_inputs(inputs)
            if self.is_last:
                counted[self.replica] = self._given.rows(targets, "targets")
                if targets is not None and counted[self.replica]:
                    row.weight = self._weigh(targets, training=training)
            most = self._replica_plan.samples
            if training and given[self.replica] > most:
                raise InputError(
                    f"replica {self.replica} was given {given[self.replica]:.0f} samples, but the plan gives it at most {most}; "
                    "its memory was planned for that"
                )
            if self.is_first != self.is_last and inputs is not None and targets is not None:
                marks = marks_of(inputs, targets, whole=training and self._looks)
                row.ends, row.digest = float(bool(marks)), (1 if self.is_first else -1) * float(digest(marks))
        except InputError as error:
            fault = str(error)
        row.faults = float(fault is not None)
        batch = self.shared_of(targets) if self.is_last else None
        if batch is not None:
            row.shared, row.batch, row.square = 1.0, float(batch), float(batch**2)
        return row, Complaint(self.replica, self.is_first, fault, marks, batch)

    def _hear(self, total: Statement, own: Complaint) -> None:
        """InputError on every rank if what any of them was given is wrong, by the sum over all. Collective."""
        if total.faults:
            raise_first(self.world.gather(own))
        if total.batches_differ:
            raise_batches(self.world.ranks, self.world.gather(own))
        if 0 < total.adding < len(self.world.ranks):
            raise InputError("some ranks are in 'with engine.accumulate():', and others are not: every rank must enter it")

    def _weigh(self, targets: Tensors, *, training: bool) -> float:
        """What the loss of these targets weighs, once they and it are known to do."""
        rows = self._replica_plan.microbatch_sizes[0]
        self._given.check_targets(targets)
        if training not in self._outputs:
            try:
                self._outputs[training] = self.boundaries.of(rows, training=training)[-1]
            except InputError:  # told where it matters: a stage of all layers need not know what leaves them
                self._outputs[training] = None
        if (output := self._outputs[training]) is not None:
            self._given.check_loss(output, rows, targets, self._devices[-1], again=training and self._looks)
        return self.loss.count(targets)

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """One global batch: every rank gives its replica's share (first stage: inputs; last stage: targets; a replica without
        samples: None or empty). Returns the loss of the whole global batch; gradients are ready on return. What layers draw is
        decided by (seed, rank, step); the generators of torch, numpy and Python are afterwards as they were. InputError on
        every rank where something is wrong with any of it; then no parameter has a gradient."""
        self.steps += 1
        self._called += 1
        try:
            with peers_named(), self._by_itself(self.steps), self._handover.inside():
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
            self.check_replicas()
        if self._looks and len(self.plan.replicas) > 1:
            self._trained.check_modes(self.world)
        self.recorders[0].note("the agreement on shares")
        row, own = self._told(inputs, targets, training=True)
        row.adding = float(self._weights is not None)
        gone = self._handover.begin(kept=bool(self._weights))
        weight = self.world.sum_later([row.weight])
        before = sum(self._weights or ())
        self._whole = cache(lambda: (before + weight()[0]) or 1.0)
        sizes = take_sizes(self._replica_plan.microbatch_sizes, self._own_share(row))
        self._faults[:] = [gone] if gone is not None else []
        if sizes and self._looks and self._model.coupled_layers is None:
            self.recorders[0].note("the trial of the layers", waits=False)
            self._faults += self._given.faults_of_layers(self._try_layers(inputs, sum(sizes)))
        self._begin_step()
        self.sync.begin(before / self._whole() if self._weights else None)
        losses = self._train(sizes, inputs, targets) if sizes else []
        self.recorders[0].note("the sum of gradients")
        self.sync.finish()
        odd_here = not self.sync.is_finite()  # before the loss is waited for: a card that still computes is given this, too
        local = float(torch.stack(losses).sum()) if losses else 0.0
        self.recorders[0].note("the sum of losses")
        if self._faults:  # found in the midst of it
            row.faults, own = 1.0, replace(own, fault=own.fault or self._faults[0])
        loss, asked, odd, *numbers = self.world.sum([local, self.ask_to_stop(), odd_here, *row.numbers()])
        total = Statement.of(numbers)
        self._hear(total, own)
        total.check_ends()
        loss /= total.weight or 1.0
        if self._buffers is not None:
            if self._looks:
                self._buffers.look()
            self._buffers.make_equal(total.given)
        if self._weights is not None:
            self._weights.append(total.weight)
        self.asked_to_stop, self.finite = asked > 0, odd == 0 and math.isfinite(loss)
        if self.finite:
            self._handover.made()
        self.recorders[0].note("what follows the gradients", waits=False)
        return loss

    def _own_share(self, row: Statement) -> int:
        """The samples that this replica trains, by what its ranks were given in total; none if any of that is wrong, as all are
        told at the end of the step."""
        total = Statement.of(self._sum_of_replica(row.numbers()))
        if total.ends == 2 and total.digest:
            row.faults = total.faults = 1.0
        given, counted = total.given[self.replica], total.counted[self.replica]
        return int(given) if given == counted and not total.faults else 0

    def _sum_of_replica(self, numbers: Sequence[float]) -> Sequence[float]:
        """The sum over the ranks of this replica."""
        return numbers

    def _begin_step(self) -> None:
        for recorder in self.recorders:
            recorder.begin_step()

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

    def evaluate(
        self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None
    ) -> Evaluation:
        """Forward only, without gradients, in evaluation mode: the mean loss (and metric) of the batch on every rank. `metric` is
        a function of the output and the targets of a micro-batch that gives (sum, count), such as the correct predictions and
        all of them: both are summed over all micro-batches and replicas, and `.metric` of what is returned is their ratio."""
        sums = [0.0, 0.0, 0.0, 0.0]
        with evaluating(self.stage):
            self.forward_only(inputs, targets, self._scorer(metric, sums))
        loss, weight, hits, count = self.world.sum(sums)
        return Evaluation(loss / (weight or 1.0), hits / max(1.0, count) if metric is not None else None, weight, count)

    def forward_only(
        self, inputs: Tensors | None, targets: Tensors | None, score: Callable[[Tensors, Wanted], None] = lambda *_: None
    ) -> None:
        """Run a batch forward without gradients, every module in the mode it is in; `score(output, wanted)` for each micro-batch
        where the outputs are. Collective."""
        with self._by_itself("forward", self.steps):
            total = self._agree(inputs, targets)
            total.check_ends()
            sizes = self._sizes(total)
            wanted = self.loss.wanted(targets, sizes, self._devices[-1]) if targets is not None and self.is_last else []
            self._forward(sizes, inputs, lambda output, i: score(output, wanted[i]))

    def __call__(self, inputs: Tensors | None) -> Tensors | None:
        """What the model gives for these inputs (of this replica; None or empty: it has none), forward only, in evaluation mode:
        on the rank of the replica's last stage; None on the others. Every rank calls it."""
        found: list[tuple[Tensor, ...]] = []
        with evaluating(self.stage), self._by_itself("forward", self.steps):
            sizes = self._sizes(self._agree(inputs, None))
            self._forward(sizes, inputs, lambda output, _: found.append(as_tuple(output)))
        return as_value([torch.cat(column) for column in zip(*found, strict=True)]) if found else None

    def _agree(self, inputs: Tensors | None, targets: Tensors | None) -> Statement:
        """What all ranks were given. Collective."""
        row, own = self._told(inputs, targets, training=False)
        total = Statement.of(self.world.sum(row.numbers()))
        pipelines = [given > 0 and len(r.stages) > 1 for given, r in zip(total.given, self.plan.replicas, strict=True)]
        if total.digest and total.ends == 2 * sum(pipelines):
            total.faults += 1.0
        self._hear(total, own)
        return total

    def _sizes(self, total: Statement) -> tuple[int, ...]:
        return even_sizes(max(self._replica_plan.microbatch_sizes), int(total.given[self.replica]))

    def _forward(self, sizes: tuple[int, ...], inputs: Tensors | None, on_output: OnOutput) -> None:
        self._begin_step()
        if sizes:
            with torch.no_grad():
                self._infer(sizes, inputs, on_output)

    def _scorer(self, metric: Metric | None, sums: list[float]) -> Callable[[Tensors, Wanted], None]:
        def score(output: Tensors, wanted: Wanted) -> None:
            sums[0] += float(self._mean_loss(output, wanted)) * wanted.weight
            sums[1] += wanted.weight
            if metric is not None:
                hits, count = metric(output, wanted.targets)
                sums[2] += hits
                sums[3] += count

        return score

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
