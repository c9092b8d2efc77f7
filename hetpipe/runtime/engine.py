"""The torch back end's Engine: one process, one stage of one replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hetpipe.device import Emulation, MemoryMeter, module_bytes, static_storages
from hetpipe.formats import InputError
from hetpipe.model import Model, Tensors, batch_size, move, select, split_rows
from hetpipe.plan import Plan
from hetpipe.replicas import GradientSync, PlanGroups, local_groups, plan_groups
from hetpipe.runtime.base import Evaluation, Metric, even_sizes, take_sizes
from hetpipe.runtime.torch_pipelining import Ends, Recorder, StageRun
from hetpipe.shares import shares_for
from hetpipe.split import TensorSpec, joint_gradients, make_stage, tied_layers, trace_boundaries
from hetpipe.world import World


class TorchEngine:
    """Trains a model by a plan, this process being one stage. All ranks of `world` construct it and call it in the same order."""

    def __init__(self, model: Model, plan: Plan, world: World, groups: PlanGroups, device: torch.device, *,
                 emulation: Emulation | None = None) -> None:  # fmt: skip
        self.plan, self.world, self.loss, self.device = plan, world, model.loss, device
        plan.check(layers=len(model.layers))
        refuse_tensor_parallel(plan)
        self.replica, self.index = _position(plan, world)
        self._replica_plan = plan.replicas[self.replica]
        self._stage_plan = self._replica_plan.stages[self.index]
        self.is_first, self.is_last = self.index == 0, self.index == len(self._replica_plan.stages) - 1
        self._model = model
        lo, hi = self._stage_plan.layers
        self.stage = make_stage(model.layers, lo, hi, recompute=self._stage_plan.recompute).to(device)
        self._pipeline_group = groups.pipelines[self.replica]
        self.sync = self._gradient_sync(groups)
        self.recorder = Recorder(device, meter=self._meter(emulation))
        if emulation is not None:
            self.recorder.seconds = lambda kind, size: emulation.seconds(
                kind, lo, hi, size, recompute=self._stage_plan.recompute
            )
        self._runs: dict[tuple[tuple[int, ...], bool], StageRun] = {}
        self._specs: dict[tuple[int, bool], list[tuple[TensorSpec, ...]]] = {}
        self._denominator = 1.0

    def _gradient_sync(self, groups: PlanGroups) -> GradientSync:
        lo, hi = self._stage_plan.layers
        ties = tied_layers(self._model.layers)
        by_name = dict(self._model.layers.named_parameters(remove_duplicate=False))
        mine = set(self.stage.parameters())
        tied_names = {by_name[name]: name for name in ties if by_name[name] in mine}
        segments = plan_groups(self.plan, self.world.rank_of, ties)
        return GradientSync(
            local_groups(self.stage, lo, hi, segments, self.plan, ties, tied_names),
            groups.owners,
            self.world.rank,
        )

    def _meter(self, emulation: Emulation | None) -> MemoryMeter | None:
        if emulation is None:
            return None
        meter = MemoryMeter(
            limit=emulation.memory_bytes, where=self.name, exclude=static_storages(self.stage)
        )
        parameters, buffers = module_bytes(self.stage)
        meter.add(
            parameters + buffers, f"the parameters and buffers of layers {list(self._stage_plan.layers)}"
        )
        meter.add(self.sync.gradient_bytes, "gradients")
        meter.add(emulation.transient_bytes, "the recomputed layer")
        return meter

    @property
    def name(self) -> str:
        """`rank 3, replica 0 stage 1, device n0/1`, for messages."""
        return f"rank {self.world.rank}, replica {self.replica} stage {self.index}, device {self.world.device_id}"

    def parameters(self) -> Iterator[nn.Parameter]:
        """This stage's parameters; one without elements if it has none, since torch's optimizers refuse an empty list."""
        own = list(self.stage.parameters())
        return iter(own or [nn.Parameter(torch.empty(0, device=self.device))])

    def share(self, batch: Tensors) -> Tensors:
        """This replica's rows of a global batch, for `step`: its planned samples, or its part of a smaller (last) batch."""
        shares = [sum(sizes) for sizes in shares_for(self.plan, batch_size(batch))]
        begin = sum(shares[: self.replica])
        return select(batch, slice(begin, begin + shares[self.replica]))

    def _ends(self, sizes: Sequence[int], *, training: bool) -> list[Ends]:
        lo, hi = self._stage_plan.layers
        for size in set(sizes):
            if (size, training) not in self._specs:
                self._model.layers.train(training)
                self._specs[size, training] = trace_boundaries(
                    self._model.layers, self._model.sample(size)[0]
                )
        inputs, outputs = (
            joint_gradients([self._specs[size, training][at] for size in sizes]) for at in (lo, hi)
        )
        return list(zip(inputs, outputs, strict=True))

    def _run(self, sizes: tuple[int, ...], *, training: bool) -> StageRun:
        key = (sizes, training)
        if key not in self._runs:
            planned = (self._replica_plan.microbatch_sizes, True)
            for old in [k for k in self._runs if k != planned and k[1] == training]:
                self._release(old)
            depths = self._replica_plan.depths(self.plan.schedule, len(sizes)) if training else None
            self._runs[key] = StageRun(
                self.stage,
                index=self.index,
                ranks=[self.world.rank_of[s.device] for s in self._replica_plan.stages],
                group=self._pipeline_group,
                sizes=sizes,
                depths=depths,
                ends=self._ends(sizes, training=training),
                recorder=self.recorder,
                loss=self._share if training else None,
            )
        return self._runs[key]

    def _release(self, key: tuple[tuple[int, ...], bool]) -> None:
        self._runs.pop(key).release()

    def _share(self, output: Tensors, targets: Tensors) -> Tensor:
        return self.loss.share(output, targets, self._denominator)

    def _agree(self, inputs: Tensors | None, targets: Tensors | None) -> tuple[list[int], float]:
        """(samples of each replica, global denominator): the first stages count samples, the last ones count targets."""
        count = len(self.plan.replicas)
        counts = [0.0] * (3 * count)
        if self.is_first:
            counts[self.replica] = _rows(inputs, "inputs", self.name)
        if self.is_last:
            counts[count + self.replica] = _rows(targets, "targets", self.name)
            counts[2 * count + self.replica] = self.loss.count(targets) if targets is not None else 0
        total = self.world.sum(counts)
        given, wanted = total[:count], total[count : 2 * count]
        for r, (a, b) in enumerate(zip(given, wanted, strict=True)):
            if a != b:
                raise InputError(
                    f"replica {r}: its first stage was given {a:.0f} samples of inputs, its last stage {b:.0f} of targets; "
                    "give both the same share"
                )
        return [int(x) for x in given], max(1.0, sum(total[2 * count :]))

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """One global batch: every rank gives its replica's share (first stage: inputs; last stage: targets; a replica without
        samples: None or empty). Returns the loss of the whole global batch; gradients are ready on return."""
        shares, self._denominator = self._agree(inputs, targets)
        for r, (samples, replica) in enumerate(zip(shares, self.plan.replicas, strict=True)):
            if samples > replica.samples:
                raise InputError(f"replica {r} was given {samples} samples, but the plan gives it at most {replica.samples}; "
                                 "its memory was planned for that")  # fmt: skip
        samples = shares[self.replica]
        sizes = take_sizes(self._replica_plan.microbatch_sizes, samples)
        self.stage.train()
        self.recorder.begin_step()
        self.sync.begin(len(sizes))
        losses: list[Tensor] = []
        if sizes:
            losses = self._pipeline(self._run(sizes, training=True), sizes, inputs, targets)
        self.recorder.current = "gradient sum"
        self.sync.finish()
        local = float(torch.stack([loss.detach().double() for loss in losses]).sum()) if losses else 0.0
        self.recorder.current = "loss sum"
        return self.world.sum([local])[0]

    def _pipeline(
        self, run: StageRun, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None
    ) -> list[Tensor]:
        cut = [split_rows(move(x, self.device), sizes) if x is not None and needed else None
               for x, needed in ((inputs, self.is_first), (targets, self.is_last))]  # fmt: skip
        return run.run(cut[0], cut[1])

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients by the one global norm (each layer once however many replicas hold it). Returns the norm before."""
        norm = self.grad_norm()
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            self.sync.scale(factor)
        return norm

    def grad_norm(self) -> float:
        """The global gradient norm: squares summed in float64, the same bits on every rank."""
        return math.sqrt(self.world.sum([self.sync.square_norm()])[0])

    def evaluate(
        self, inputs: Tensors | None, targets: Tensors | None, metric: Metric | None = None
    ) -> Evaluation:
        """Forward only, without gradients, in evaluation mode: the mean loss (and metric) of the batch, on every rank."""
        shares, self._denominator = self._agree(inputs, targets)
        sizes = even_sizes(max(self._replica_plan.microbatch_sizes), shares[self.replica])
        self.recorder.begin_step()
        sums = [0.0, 0.0, 0.0, 0.0]
        if sizes:
            run = self._run(sizes, training=False)
            wanted = (
                split_rows(move(targets, self.device), sizes) if self.is_last and targets is not None else []
            )
            run.runtime.on_output = self._scorer(wanted, metric, sums)
            self.stage.eval()
            with torch.no_grad():
                self._pipeline(run, sizes, inputs, None)
            self.stage.train()
            run.runtime.on_output = None
        loss, weight, hits, count = self.world.sum(sums)
        return Evaluation(loss, hits / max(1.0, count) if metric is not None else None, int(weight))

    def _scorer(
        self, targets: list[Tensors], metric: Metric | None, sums: list[float]
    ) -> Callable[[Tensors, int], None]:
        def score(output: Tensors, i: int) -> None:
            sums[0] += float(self._share(output, targets[i]))
            sums[1] += self.loss.count(targets[i])
            if metric is not None:
                hits, count = metric(output, targets[i])
                sums[2] += hits
                sums[3] += count

        return score

    def close(self) -> None:
        """Give hooks and buffers back."""
        self.sync.close()
        self._runs.clear()


def _rows(value: Tensors | None, what: str, who: str) -> int:
    if value is None:
        return 0
    try:
        return batch_size(value)
    except (TypeError, IndexError) as error:
        raise InputError(
            f"{who}: {what} must be a tensor or a tuple of tensors whose dimension 0 counts samples: {error}"
        ) from None


def _position(plan: Plan, world: World) -> tuple[int, int]:
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            if world.device_id in stage.devices:
                return r, s
    raise InputError(f"device {world.device_id} has no part in the plan, which uses {list(plan.device_ids)}")


def refuse_tensor_parallel(plan: Plan) -> None:
    """Tensor-parallel stages are planned and priced, but not yet executed."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            if len(stage.devices) > 1:
                raise InputError(
                    f"replica {r} stage {s} is tensor-parallel over {list(stage.devices)}; such stages can be planned and "
                    "simulated, but not yet trained"
                )
