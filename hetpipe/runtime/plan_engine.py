"""What every engine that trains by a plan does alike: the step, its gradient contract, clipping and evaluation. A back end
adds how its process runs the micro-batches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError, listed
from hetpipe.layers.model import Model, Tensors, Wanted, batch_size, evaluating, select
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.weights import load_state, plain_name, state_of
from hetpipe.planning.shares import shares_for
from hetpipe.processes.pulse import peers_named
from hetpipe.processes.rendezvous import give_back_at_exit
from hetpipe.processes.world import World
from hetpipe.runtime.base import Evaluation, Metric, even_sizes, take_sizes
from hetpipe.runtime.given import Given
from hetpipe.runtime.gradients import GradientSync, is_finite
from hetpipe.runtime.recorder import Recorder
from hetpipe.spec.plan import Plan

Score = Callable[[Tensors, Wanted], None]
Span = tuple[str, int, int, str, int, float, float]  # device, replica, stage, kind, micro-batch, start, end


class PlanEngine(ABC):
    """Trains a model by a plan, this process holding some stages of one replica. All ranks of `world` construct it and call it
    in the same order. `stage` has the layers of this process under their names in the whole model."""

    stage: nn.Sequential
    sync: GradientSync
    recorders: list[Recorder]  # one for each stage of this process
    device: torch.device  # the process's first

    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        self.plan, self.world, self.loss = plan, world, model.loss
        plan.check(layers=len(model.layers))
        refuse_unexecutable(plan)
        self._model = model
        self.replica, self.index = _position(plan, world)
        self._replica_plan = plan.replicas[self.replica]
        self.is_first, self.is_last = self.index == 0, self.index == len(self._replica_plan.stages) - 1
        self._denominator = 1.0  # what losses are divided by
        self._outputs: dict[bool, tuple[TensorSpec, ...] | None] = {}  # of the last layer, in training and in evaluation
        self.steps = 0  # begun so far
        self.ask_to_stop: Callable[[], bool] = lambda: False  # of this rank, looked at in every step
        self.asked_to_stop = False  # whether any rank asked in the last step: the same on all
        self.finite = True  # whether the loss and all gradients of the last step are: the same on all
        give_back_at_exit(self)

    @abstractmethod
    def _train(self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None) -> list[Tensor]:
        """Forward and backward of these micro-batches; the losses that are known here."""

    @abstractmethod
    def _score(
        self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None, score: Score
    ) -> None:
        """Forward of these micro-batches without gradients, with `score(output, wanted)` for each where the outputs are."""

    @abstractmethod
    def _boundaries(self, size: int, *, training: bool) -> list[tuple[TensorSpec, ...]]:
        """What crosses all boundaries with a micro-batch of this size (see `trace_boundaries`)."""

    @property
    def _loss_device(self) -> torch.device:
        """Where the loss is computed."""
        return self.device

    @cached_property
    def _given(self) -> Given:
        return Given(self._model, self.loss, self.stage, self.replica, self.name)

    @property
    def name(self) -> str:
        """`rank 3, replica 0 stage 1, device n0/1`, for messages."""
        return f"rank {self.world.rank}, {self.place}"

    @property
    def place(self) -> str:
        """`replica 0 stage 1, device n0/1`."""
        return f"replica {self.replica} stage {self.index}, device {self.world.device_id}"

    @property
    def doing(self) -> str:
        """The action that began last, and in which step, for messages."""
        current = max(self.recorders, key=lambda r: r.began).current
        return f"{current} of step {self.steps}" if self.steps else current

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters; one without elements if it has none, since torch's optimizers refuse an empty list."""
        own = list(self.stage.parameters())
        return iter(own or [nn.Parameter(torch.empty(0, device=self.device))])

    @property
    def layers(self) -> nn.Sequential:
        """The whole model; only this process's layers have their values here."""
        return self._model.layers

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters with their names in the whole model, in which nothing is called compiled."""
        return ((plain_name(name), parameter) for name, parameter in self.stage.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by their names in the whole model; all processes together have all of them."""
        return state_of(self.stage)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's part of a state: of the whole model's, or of what `state_dict` gave here. InputError, before
        anything is changed, where it lacks a tensor of this process, has one that the model has not, or one of another shape."""
        own, state = state_of(self.stage), {plain_name(name): tensor for name, tensor in state.items()}
        strange = state.keys() - state_of(self.layers).keys()
        faults = [f"it has {name!r}, which the model has not" for name in sorted(strange)]
        for name, tensor in own.items():
            if name not in state:
                faults.append(f"it has no {name!r}")
            elif state[name].shape != tensor.shape:
                faults.append(f"{name!r} has shape {tuple(state[name].shape)}, in the model {tuple(tensor.shape)}")
        if faults:
            raise InputError(f"{self.name}: this is not a state of the model:\n{listed(faults)}")
        load_state(self.stage, {name: state[name] for name in own})

    def parameters_are_finite(self) -> bool:
        """Whether all numbers of the model's parameters are, on all devices. Collective."""
        return self.world.sum([not is_finite(*(p.detach() for p in self.stage.parameters()))])[0] == 0

    def share(self, batch: Tensors) -> Tensors:
        """This replica's rows of a global batch, for `step`: its planned samples, or its part of a smaller (last) batch."""
        shares = [sum(sizes) for sizes in shares_for(self.plan, batch_size(batch))]
        begin = sum(shares[: self.replica])
        return select(batch, slice(begin, begin + shares[self.replica]))

    def _places(self) -> list[tuple[str, int, Recorder]]:
        """(device, stage, recorder) of each stage of this process."""
        stages = self._replica_plan.stages[self.index : self.index + len(self.recorders)]
        return [
            (stage.device, self.index + s, recorder)
            for s, (stage, recorder) in enumerate(zip(stages, self.recorders, strict=True))
        ]

    def spans(self) -> list[Span]:
        """The actions of the step just done, in seconds since it began."""
        return [
            (device, self.replica, s, *span)
            for device, s, recorder in self._places()
            for span in recorder.end_step()
        ]

    def usage(self) -> list[tuple[str, int | None, float]]:
        """(device, peak bytes where they are known, seconds of overrun) of each stage of this process."""
        return [
            (device, recorder.peak_bytes, recorder.pacer.overrun_seconds)
            for device, _, recorder in self._places()
        ]

    def _share_of_loss(self, output: Tensors, wanted: Wanted) -> Tensor:
        return self.loss.share(output, wanted.targets, self._denominator, wanted.weight)

    def _agree(self, inputs: Tensors | None, targets: Tensors | None, *, training: bool) -> tuple[list[int], float]:
        """(samples of each replica, global denominator). Collective."""
        row, fault = self._given_here(inputs, targets, training=training)
        return self._heard(self.world.sum(row), fault)

    def _given_here(
        self, inputs: Tensors | None, targets: Tensors | None, *, training: bool
    ) -> tuple[list[float], str | None]:
        """What this rank adds to the agreement: the samples of each replica's inputs (counted by its first stage) and of its
        targets (by its last), their weight, whether any of it is wrong; and what."""
        count = len(self.plan.replicas)
        given, counted, weight, fault = [0.0] * count, [0.0] * count, 0.0, None
        try:
            if training:
                self._given.check_norms()
            if self.is_first:
                given[self.replica] = self._given.rows(inputs, "inputs")
                if inputs is not None and given[self.replica] and not self.is_last:
                    self._given.check_inputs(inputs)
            if self.is_last:
                counted[self.replica] = self._given.rows(targets, "targets")
                if targets is not None and counted[self.replica]:
                    weight = self._weigh(targets, training=training)
            most = self._replica_plan.samples
            if training and given[self.replica] > most:
                raise InputError(
                    f"replica {self.replica} was given {given[self.replica]:.0f} samples, but the plan gives it at most {most}; "
                    "its memory was planned for that"
                )
        except InputError as error:
            fault = str(error)
        return [*given, *counted, weight, fault is not None], fault

    def _heard(self, total: Sequence[float], fault: str | None) -> tuple[list[int], float]:
        """(samples of each replica, global denominator) by the sum over all ranks. InputError on every rank if what any of them
        was given is wrong."""
        count = len(self.plan.replicas)
        if total[-1]:
            raise InputError(next(text for text in self.world.gather(fault) if text is not None))
        given, counted = total[:count], total[count : 2 * count]
        for r, (a, b) in enumerate(zip(given, counted, strict=True)):
            _check_ends(r, a, b)
        return [int(x) for x in given], total[-2] or 1.0

    def _weigh(self, targets: Tensors, *, training: bool) -> float:
        """What the loss of these targets weighs, once they and it are known to do."""
        rows = self._replica_plan.microbatch_sizes[0]
        self._given.check_targets(targets)
        if training not in self._outputs:
            try:
                self._outputs[training] = self._boundaries(rows, training=training)[-1]
            except InputError:  # told where it matters: a stage of all layers need not know what leaves them
                self._outputs[training] = None
        if (output := self._outputs[training]) is not None:
            self._given.check_loss(output, rows, targets, self._loss_device)
        return self.loss.count(targets)

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """One global batch: every rank gives its replica's share (first stage: inputs; last stage: targets; a replica without
        samples: None or empty). Returns the loss of the whole global batch; gradients are ready on return."""
        self.steps += 1
        try:
            with peers_named():
                return self._step(inputs, targets)
        except BaseException:
            self.sync.forget()  # no optimizer takes a gradient of half a step, or of the step before
            raise

    def _step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """The stages of a replica agree on their share before they send each other anything. No replica waits for another's
        optimizer: of several, losses are divided by the samples of the plan's batch, what each was given and what it weighs is
        said with the loss, in one message, and gradients of a batch of another weight are corrected then."""
        self.recorders[0].note("the agreement on shares")
        row, fault = self._given_here(inputs, targets, training=True)
        own = self._sum_of_replica(row)
        sizes = take_sizes(self._replica_plan.microbatch_sizes, self._own_share(own))
        self._denominator = own[-2] or 1.0 if len(self.plan.replicas) == 1 else float(self.plan.global_batch)
        self._begin_step()
        self.sync.begin()
        losses = self._train(sizes, inputs, targets) if sizes else []
        self.recorders[0].note("the sum of gradients")
        self.sync.finish()
        odd_here = not self.sync.is_finite()  # before the loss is waited for: a card that still computes is given this, too
        local = float(torch.stack([loss.detach().double() for loss in losses]).sum()) if losses else 0.0
        self.recorders[0].note("the sum of losses")
        loss, asked, odd, *total = self.world.sum([local, self.ask_to_stop(), odd_here, *row])
        _, denominator = self._heard(total, fault)
        if denominator != self._denominator:
            self.sync.scale(self._denominator / denominator)
            loss *= self._denominator / denominator
        self.asked_to_stop, self.finite = asked > 0, odd == 0 and math.isfinite(loss)
        self.recorders[0].note("what follows the gradients")
        return loss

    def _own_share(self, total: Sequence[float]) -> int:
        """The samples that this replica trains, by what its ranks were given in total; none if any of that is wrong, as all are
        told at the end of the step."""
        given, counted = total[self.replica], total[len(self.plan.replicas) + self.replica]
        return int(given) if given == counted and not total[-1] else 0

    def _sum_of_replica(self, row: Sequence[float]) -> Sequence[float]:
        """The sum over the ranks of this replica."""
        return row

    def _begin_step(self) -> None:
        for recorder in self.recorders:
            recorder.begin_step()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients by the one global norm (each layer once however many replicas hold it). Returns the norm before. As
        with torch's own, gradients are no numbers afterwards where the norm is none, on every rank."""
        norm = self.grad_norm()
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:
            self.sync.scale(factor)
        return norm

    def grad_norm(self) -> float:
        """The global gradient norm: squares summed in float64, the same bits on every rank."""
        return math.sqrt(self.world.sum([self.sync.square_norm()])[0])

    def evaluate(
        self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None
    ) -> Evaluation:
        """Forward only, without gradients, in evaluation mode: the mean loss (and metric) of the batch, on every rank."""
        sums = [0.0, 0.0, 0.0, 0.0]
        with evaluating(self.stage):
            self.forward_only(inputs, targets, self._scorer(metric, sums))
        loss, weight, hits, count = self.world.sum(sums)
        return Evaluation(loss, hits / max(1.0, count) if metric is not None else None, weight, count)

    def forward_only(self, inputs: Tensors | None, targets: Tensors | None, score: Score = lambda *_: None) -> None:
        """Run a batch forward without gradients, every module in the mode it is in; `score(output, wanted)` for each micro-batch
        where the outputs are. Collective."""
        shares, self._denominator = self._agree(inputs, targets, training=False)
        sizes = even_sizes(max(self._replica_plan.microbatch_sizes), shares[self.replica])
        self._begin_step()
        if sizes:
            self._score(sizes, inputs, targets, score)

    def _scorer(self, metric: Metric | None, sums: list[float]) -> Score:
        def score(output: Tensors, wanted: Wanted) -> None:
            sums[0] += float(self._share_of_loss(output, wanted))
            sums[1] += wanted.weight
            if metric is not None:
                hits, count = metric(output, wanted.targets)
                sums[2] += hits
                sums[3] += count

        return score

    def close(self) -> None:
        """Give hooks and buffers back."""
        self.sync.close()


def _check_ends(replica: int, given: float, counted: float) -> None:
    if given != counted:
        raise InputError(
            f"replica {replica}: its first stage was given {given:.0f} samples of inputs, its last stage {counted:.0f} of "
            "targets; give both the same share"
        )


def _position(plan: Plan, world: World) -> tuple[int, int]:
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            if world.device_id in stage.devices:
                return r, s
    raise InputError(f"device {world.device_id} has no part in the plan, which uses {list(plan.device_ids)}")


def refuse_unexecutable(plan: Plan) -> None:
    """Tensor-parallel stages and precisions are planned and priced, but not yet executed."""
    lower = {kind: precision for kind, precision in (plan.precision or {}).items() if precision != "fp32"}
    if lower:
        told = ", ".join(f"{precision} on {kind!r}" for kind, precision in lower.items())
        raise InputError(
            f"the plan computes in {told}; a precision of each device type can be planned and simulated, but not yet trained: "
            "training computes in fp32. Plan with --precision fp32"
        )
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            if len(stage.devices) > 1:
                raise InputError(
                    f"replica {r} stage {s} is tensor-parallel over {list(stage.devices)}; such stages can be planned and "
                    "simulated, but not yet trained"
                )
