"""What every engine does alike with a batch before, and without, training on it: whether it is right, as all ranks say it, and
the forwards of evaluation."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError, cut
from hetpipe.layers.model import Model, RowShapes, Tensors, Wanted, as_tuple, as_value, batch_size, evaluating, row_shapes, select
from hetpipe.layers.numbers import callers_autocast, computing
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.processes.world import World
from hetpipe.runtime.base import Evaluation, Metric, even_sizes
from hetpipe.runtime.checks.agreement import Complaint, Statement, digest, marks_of, raise_batches, raise_first
from hetpipe.runtime.checks.given import Given
from hetpipe.runtime.checks.shortage import Memory, Shortage, raise_shortages, words_of
from hetpipe.runtime.checks.trained import Trained
from hetpipe.runtime.holder import Holder
from hetpipe.runtime.precision.boundaries import Boundaries

OnOutput = Callable[[Tensors, int], None]  # of a micro-batch, by its number


class ForwardEngine(Holder, ABC):
    """Runs a model by a plan, forward only, this process holding some stages of one replica."""

    boundaries: Boundaries
    _given: Given
    _trained: Trained

    def __init__(self, model: Model, plan: Plan, world: World) -> None:
        super().__init__(model, plan, world)
        self.loss = model.loss
        self.seed = 0  # of what layers draw: with the rank and the step
        self._like = row_shapes(model.inputs)
        self._shapes = self._like  # of the batch's inputs in this replica
        self._outputs: dict[tuple[RowShapes, bool], tuple[TensorSpec, ...] | None] = {}  # of the last layer, in training or not
        self._called = 0  # steps of this engine
        self._faults: list[str] = []  # of this rank, found in the midst of a step
        self.memory = Memory(self._shortage, lambda: self.recorders)

    @property
    def numbers(self) -> int:
        """Return how many numbers the inputs of a sample of the last batch have."""
        return sum(map(prod, self._shapes))

    @property
    def row_tokens(self) -> int | None:
        """Return how many tokens the first input of a sample of the last batch has; None if it is no row of whole numbers."""
        first = as_tuple(self._model.inputs)[0]
        return None if first.is_floating_point() or first.ndim != 2 else self._shapes[0][0]

    @abstractmethod
    def _infer(self, sizes: tuple[int, ...], inputs: Tensors | None, on_output: OnOutput) -> None:
        """Forward of these micro-batches without gradients, with `on_output(output, number)` where the outputs are."""

    @property
    def _devices(self) -> Sequence[torch.device]:
        """All of this process; the loss is computed on the last."""
        return [self.device]

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
        autocast = callers_autocast(self.device)
        if autocast is not None:
            torch.clear_autocast_cache()  # an optimizer may have stepped inside of it since weights were cast
        if self.boundaries.follow(autocast):
            self._retyped()
            self._outputs.clear()
        own = self.boundaries.stages[-1 if self.is_last else self.index].types
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            computing(own, devices[-1]),
            drawing(self.seed, self.drawing_rank, *place, devices=devices),
        ):
            yield

    def _mean_loss(self, output: Tensors, wanted: Wanted) -> Tensor:
        if self._faults:  # the step is refused at its end; this loss may not even run
            return self.loss.nothing(output)
        if wanted.weight == 0 and (lost := self.loss.lost(output, wanted.targets)) is not None:
            if not torch.is_grad_enabled():
                raise InputError(lost)
            self._faults.append(lost)  # which all ranks are told at the end of the step
        loss = self.loss.share(output, wanted.targets, wanted.weight or 1.0, wanted.weight)
        if torch.is_grad_enabled():
            self._faults += self._given.faults_of_loss(loss, output, whole=self._looks)
        return loss.float() if loss.element_size() < 4 else loss  # its gradient, which may be scaled, begins in float32

    def _told(self, inputs: Tensors | None, targets: Tensors | None, *, training: bool) -> tuple[Statement, Complaint]:
        """What this rank says of its part of a batch, and in full where something is wrong."""
        row, fault, marks = Statement.empty(len(self.plan.replicas)), None, tuple[int, ...]()
        given, counted = row.given, row.counted
        try:
            self.boundaries.check_autocast()
            if training:
                self._given.check_norms()
                self._trained.check()
            if self.is_first:
                given[self.replica] = self._given.rows(inputs, "inputs")
                if inputs is not None and given[self.replica]:
                    self._given.check_shapes(inputs, training=training)
                    if not self.is_last:
                        self._given.check_types(inputs)
            if self.is_last:
                counted[self.replica] = self._given.rows(targets, "targets")
                if targets is not None and counted[self.replica]:
                    row.weight = self._weigh(targets)
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
        row.callers, row.autocast = 1.0, float(self.boundaries.autocast_number)
        row.autocast_square = row.autocast**2
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

    def _weigh(self, targets: Tensors) -> float:
        """What the loss of these targets weighs, once they are known to do."""
        self._given.check_targets(targets)
        if (output := self._output(self._like, training=True)) is not None:
            self._given.check_labels(output, self._rows_traced, targets)
        return self.loss.count(targets)

    @property
    def _rows_traced(self) -> int:
        return self._replica_plan.microbatch_sizes[0]

    def _output(self, shapes: RowShapes, *, training: bool) -> tuple[TensorSpec, ...] | None:
        """What the last layer gives for `_rows_traced` samples of these shapes."""
        key = shapes, training
        if key not in self._outputs:
            try:
                self._outputs[key] = self.boundaries.of(self._rows_traced, training=training, shapes=shapes)[-1]
            except InputError:  # told where it matters: a stage of all layers need not know what leaves them
                self._outputs[key] = None
        return self._outputs[key]

    def _faults_of_loss(self, targets: Tensors | None, *, training: bool) -> list[str]:
        """What is wrong with the loss of such targets, the first time, and in steps in which all is looked at."""
        if targets is None or not self.is_last or batch_size(targets) == 0:
            return []
        if self._given.tried_loss and not (training and self._looks):
            return []
        if (output := self._output(self._shapes, training=training)) is not None:
            try:
                self._given.check_loss(output, self._rows_traced, targets, self._devices[-1])
            except InputError as error:
                return [str(error)]
        return []

    def _begin_step(self) -> None:
        for recorder in self.recorders:
            recorder.begin_step()

    def evaluate(self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None) -> Evaluation:
        """Forward only, without gradients, in evaluation mode: the mean loss (and metric) of the batch on every rank. `metric` is
        a function of the output and the targets of a micro-batch that gives (sum, count), such as the correct predictions and
        all of them: both are summed over all micro-batches and replicas, and `.metric` of what is returned is their ratio."""
        sums = [0.0, 0.0, 0.0, 0.0]
        with evaluating(self.stage), self.memory.watched():
            self.forward_only(inputs, targets, self._scorer(metric, sums))
            loss, weight, hits, count = self._sum_if_computed(sums)
        return Evaluation(loss / (weight or 1.0), hits / max(1.0, count) if metric is not None else None, weight, count)

    def _sum_if_computed(self, numbers: Sequence[float] = ()) -> list[float]:
        """The sum over all ranks; ShortMemoryError on each if one had no memory for what it has computed."""
        *found, short = self.world.sum([*numbers, self.memory.shortage is not None])
        if short:
            raise_shortages(self.world.gather(self.memory.shortage))
        return found

    def _shortage(self, error: Exception, bytes_there: int | None) -> Shortage:
        device = next(device for device, _, recorder in self._places() if recorder is self._latest)
        return Shortage(
            device=device, where=self.name, doing=self.doing, words=words_of(error, self.name), bytes_there=bytes_there
        )

    def evaluate_all(self, loader: Iterable[tuple[Tensors, Tensors]], metric: Metric | None = None) -> Evaluation:
        """The mean loss (and metric, see `evaluate`) of all batches of a loader, on every rank. Every rank gives the same whole
        batches (inputs, targets), of any number of samples, of which this takes its part. InputError on every rank if the loader
        gives none, or ranks are given other numbers of samples. Collective."""
        losses, weight, hits, count, batches = 0.0, 0.0, 0.0, 0.0, iter(loader)
        for number in itertools.count(1):
            inputs, targets = map(_as_given, next(batches, (None, None)))
            sizes = self.world.gather(batch_size(inputs) if inputs is not None else 0)
            if len(set(sizes)) > 1:
                told = ", ".join(f"rank {rank}: {size}" for rank, size in zip(self.world.ranks, sizes, strict=True))
                raise InputError(
                    f"batch {number} of the loader has other numbers of samples on other ranks ({told}; 0: there is none). Give "
                    "every rank a loader of the same batches"
                )
            if inputs is None or targets is None:
                break
            for first in range(0, sizes[0], self.plan.global_batch):
                rows = slice(first, first + self.plan.global_batch)
                part = self.evaluate(self.share(select(inputs, rows)), self.share(select(targets, rows)), metric)
                losses, weight = losses + part.loss * part.weight, weight + part.weight
                hits, count = hits + (part.metric or 0.0) * part.counted, count + part.counted
        if number == 1:
            raise InputError("the loader gives no batches, so there is nothing to evaluate")
        return Evaluation(losses / (weight or 1.0), hits / (count or 1.0) if metric is not None else None, weight, count)

    def forward_only(
        self, inputs: Tensors | None, targets: Tensors | None, score: Callable[[Tensors, Wanted], None] = lambda *_: None
    ) -> None:
        """Run a batch forward without gradients, every module in the mode it is in; `score(output, wanted)` for each micro-batch
        where the outputs are. Collective."""
        with self._by_itself("forward", self.steps):
            total = self._agree(inputs, targets)
            total.check_ends()
            sizes = self._sizes(total)
            wanted: list[Wanted] = []
            if sizes and targets is not None and self.is_last:
                wanted = list(self.loss.wanted(targets, sizes, self._devices[-1]))
            self._forward(sizes, inputs, (lambda output, i: score(output, wanted[i])) if self.is_last else lambda *_: None)

    def __call__(self, inputs: Tensors | None) -> Tensors | None:
        """What the model gives for these inputs (of this replica; None or empty: it has none), forward only, in evaluation mode:
        on the rank of the replica's last stage; None on the others. Every rank calls it."""
        found: list[tuple[Tensor, ...]] = []
        with evaluating(self.stage), self._by_itself("forward", self.steps):
            sizes = self._sizes(self._agree(inputs, None))
            self._forward(sizes, inputs, (lambda output, _: found.append(as_tuple(output))) if self.is_last else lambda *_: None)
        return as_value([torch.cat(column) for column in zip(*found, strict=True)]) if found else None

    def _in_replica(self, row: Statement, inputs: Tensors | None, *, training: bool) -> tuple[Statement, list[str]]:
        """What the ranks of this replica were given, and what all of them find wrong with it. By the shapes of its inputs each of
        them knows what it will be sent."""
        told = row_shapes(inputs) if inputs is not None and self.is_first and row.given[self.replica] and not row.faults else None
        total, self._shapes = Statement.of_shaped(self._sum_of_replica(row.shaped(told, self._like)), self._like)
        faults = self._other_autocasts(total)
        if not faults and not self.is_alone and total.given[self.replica] and not total.faults and self._shapes != self._like:
            try:
                self.boundaries.of(self._rows_traced, training=training, shapes=self._shapes)
            except InputError as error:
                faults.append(f"replica {self.replica}: {error}")
        return total, faults

    def _sum_of_replica(self, numbers: Sequence[float]) -> Sequence[float]:
        """The sum over the ranks of this replica."""
        return numbers

    def _other_autocasts(self, replica: Statement) -> list[str]:
        """What is said where the ranks of a replica are called in different autocasts, so that each would expect other types."""
        if not replica.autocasts_differ:
            return []
        told = (
            f"the stages of replica {self.replica} are called in other autocasts: call the engine in the same torch.autocast "
            "on all ranks of a pipeline, or say with precision= what devices compute in"
        )
        return [told]

    def _agree(self, inputs: Tensors | None, targets: Tensors | None) -> Statement:
        """What all ranks were given. Collective."""
        self._faults.clear()
        row, own = self._told(inputs, targets, training=False)
        replica, faults = self._in_replica(row, inputs, training=False)
        if not faults and not replica.faults and replica.given[self.replica]:
            faults += self._faults_of_loss(targets, training=False)
        for fault in faults:
            row.faults, own = 1.0, replace(own, fault=own.fault or fault)
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
            inputs, _ = self._shared_by_stage(inputs, None, training=False)
            with torch.no_grad():
                self._infer(sizes, inputs, on_output)

    def _shared_by_stage(
        self, inputs: Tensors | None, targets: Tensors | None, *, training: bool
    ) -> tuple[Tensors | None, Tensors | None]:
        """What the first device was given of those over which a stage is split, all of them have. Collective over them."""
        return inputs, targets

    def _scorer(self, metric: Metric | None, sums: list[float]) -> Callable[[Tensors, Wanted], None]:
        def score(output: Tensors, wanted: Wanted) -> None:
            sums[0] += float(self._mean_loss(output, wanted)) * wanted.weight
            sums[1] += wanted.weight
            if metric is not None:
                hits, count = _sum_and_count(metric(output, wanted.targets))
                sums[2] += hits
                sums[3] += count

        return score


def _sum_and_count(found: Any) -> tuple[float, float]:
    """InputError if a metric gives something else."""
    try:
        hits, count = found
        return float(hits), float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            "the metric of an evaluation must return (sum, count), two numbers for the micro-batch that it is given; it returned "
            f"{cut(str(found), 200)}"
        ) from error


def _as_given(part: Any) -> Any:
    """A DataLoader makes lists of tuples."""
    return tuple(part) if isinstance(part, list) else part
