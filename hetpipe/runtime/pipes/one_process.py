"""The engine of the back ends fairscale and torchgpipe: one process drives all devices of a replica."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.documents.number_types import NumberTypes
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Model, Tensors, move, named_layers, split_rows
from hetpipe.layers.numbers import computing, without_autocast
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.split import joint_gradients, tied_layers
from hetpipe.layers.stage import Stage
from hetpipe.layers.trials.layer_check import Outcome, try_layers
from hetpipe.layers.trials.rows import cut_to_try
from hetpipe.layers.weights import materialise
from hetpipe.processes.world import World
from hetpipe.runtime.checks import stale
from hetpipe.runtime.forward import OnOutput
from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.pipes.batch_norm import DeferredStatistics
from hetpipe.runtime.pipes.pipe_stage import PipeCall, skipping_stage
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.precision.boundaries import Boundaries
from hetpipe.runtime.recorder import GpipeRecorder
from hetpipe.runtime.replicas import PlanGroups, local_groups, plan_groups


@dataclass(frozen=True, kw_only=True)
class Library:
    """What differs between the two. `pipe`: the class that runs a pipeline. `skippable`: the class of modules with skip
    connections. `verify(layers)`: TypeError if these do not fit together."""

    name: str
    pipe: Callable[..., nn.Module]
    skippable: type
    verify: Callable[[nn.Sequential], None]


class OneProcessEngine(PlanEngine):
    """Trains one replica of a plan with a library that drives several devices from one process.

    The libraries cut a batch into equal chunks and return the outputs put together. Here the batch they are given is a row of m
    places, so that they cut it into exactly m, and the stages at the two ends exchange a place for the micro-batch of the plan,
    of whatever size, and an output for its loss (`PipeStage`): one call a step for any micro-batch sizes, and neither
    the whole input nor the whole output travels. All forwards are run before the first backward (GPipe). Recomputation
    is the plan's, stage by stage, and not the library's, which knows one choice for all.

    A parameter that several stages share (a tied weight) is copied to each, since a module lives on one device; the copies'
    gradients are summed, so they stay equal. On CPU devices, which share one worker thread, stages run one after the other.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        world: World,
        groups: PlanGroups,
        devices: Sequence[torch.device],
        types: Sequence[NumberTypes],
        library: Library,
    ) -> None:
        super().__init__(model, plan, world)
        self.is_last, self.groups = True, groups
        self.devices, self.device, self._library = list(devices), devices[0], library
        bounds = [stage.layers for stage in self._replica_plan.stages]
        _check_skips(model.layers, plan, library)
        stale.check_fresh(model.layers, 0, len(model.layers), world)
        materialise(model.layers)
        self.stage, copies = separate_stages(model.layers, bounds)
        self.boundaries = Boundaries(model, self.stage, self._replica_plan, types)
        self._clocks = [GpipeRecorder(device) for device in devices]
        self.recorders = [*self._clocks]
        make = skipping_stage(library.skippable)
        self._parts = [
            make(
                make_stage(self.stage, *stage.layers, device, recompute=stage.recompute, types=self.boundaries.stages[s]),
                s,
                len(bounds),
                clock,
            )
            for s, (stage, device, clock) in enumerate(zip(self._replica_plan.stages, devices, self._clocks, strict=True))
        ]
        self._chunks = len(self._replica_plan.microbatch_sizes)
        self._pipe = library.pipe(
            nn.Sequential(*self._parts), balance=[1] * len(bounds), devices=self.devices, chunks=self._chunks, checkpoint="never"
        )
        self._statistics = DeferredStatistics(self.stage) if model.batch_norm == "deferred" else None
        self.sync = self._gradient_sync(groups, copies)
        self._watch(groups.owners, self.device)

    def _gradient_sync(self, groups: PlanGroups, copies: Mapping[nn.Parameter, Sequence[nn.Parameter]]) -> GradientSync:
        layers = self._model.layers
        ties = tied_layers(layers)
        by_name = dict(layers.named_parameters(remove_duplicate=False))
        return GradientSync(
            local_groups(
                layers,
                0,
                len(layers),
                plan_groups(self.plan, self.world.rank_of, ties),
                self.plan,
                ties,
                {by_name[name]: name for name in ties},
            ),
            groups.owners,
            self.world.rank,
            device=self.device,
            copies=copies,
        )

    @property
    def place(self) -> str:
        """`replica 1 (torchgpipe), device n1/0, n1/1`, for messages."""
        where = ", ".join(stage.device for stage in self._replica_plan.stages)
        return f"replica {self.replica} ({self._library.name}), device {where}"

    def _needed(self, sizes: Sequence[int]) -> list[list[bool]]:
        """Behind each stage but the last: does a gradient come back for the tensor, in any micro-batch? One size of micro-batches
        tells where a single tensor crosses, since that one is used or the loss is a constant."""
        cuts = [stage.layers[1] for stage in self._replica_plan.stages[:-1]]
        if all(len(self.boundaries.of(sizes[0], training=True)[at]) == 1 for at in cuts):
            sizes = sizes[:1]
        rows = [[self.boundaries.of(size, training=True)[at] for size in sorted(set(sizes))] for at in cuts]
        return [[spec.requires_grad for spec in joint_gradients(row)[0]] for row in rows]

    def _retyped(self) -> None:
        for part, types in zip(self._parts, self.boundaries.stages, strict=True):
            part.stage.types = types

    @property
    def _devices(self) -> Sequence[torch.device]:
        return self.devices

    def _call(
        self, sizes: Sequence[int], inputs: Tensors, consume: Callable[[Tensors, int], Tensor], *, training: bool
    ) -> Tensor:
        needed = self._needed(sizes) if training else None
        call = PipeCall(split_rows(move(inputs, self.devices[0]), sizes), needed, consume)
        for part in self._parts:
            part.begin(call)
        try:
            result: Tensor = self._pipe(torch.zeros(len(sizes), device=self.devices[0]))
        finally:
            for part in self._parts:
                part.begin(None)
        return result

    def _train(self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None) -> list[Tensor]:
        return self.memory.attempt(lambda: self._computed(sizes, inputs, targets), list)

    def _computed(self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None) -> list[Tensor]:
        assert inputs is not None and targets is not None
        wanted = self.loss.wanted(targets, sizes, self.devices[-1])
        losses = self._call(sizes, inputs, lambda output, i: self._mean_loss(output, wanted[i]), training=True)
        if self._statistics is not None:
            self._statistics.pause()
        with without_autocast(losses.device):
            losses.backward(torch.tensor([self._seed(w) for w in wanted], dtype=losses.dtype, device=losses.device))
        for clock in self._clocks:
            clock.close()
        return [loss.double() * w.weight for loss, w in zip(losses.detach(), wanted, strict=True)]

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        """One global batch: every process gives its replica's share of both (a replica without samples: None or empty). Returns
        the loss of the whole global batch; gradients are ready on return."""
        if self._statistics is None:
            return super().step(inputs, targets)
        self._statistics.begin()
        loss = super().step(inputs, targets)
        self._statistics.commit(self.world)
        return loss

    def _infer(self, sizes: tuple[int, ...], inputs: Tensors | None, on_output: OnOutput) -> None:
        assert inputs is not None
        starts = range(0, len(sizes), self._chunks)
        parts = [sizes[at : at + self._chunks] for at in starts]
        for at, part, x in zip(starts, parts, split_rows(inputs, [sum(part) for part in parts]), strict=True):

            def consume(output: Tensors, i: int, at: int = at) -> Tensor:
                on_output(output, at + i)
                return torch.zeros(1, device=self.devices[-1])

            self.memory.attempt(partial(self._call, part, x, consume, training=False), partial(torch.zeros, len(part)))

    def _try_layers(self, inputs: Tensors | None, samples: int) -> Outcome:
        assert inputs is not None
        given = cut_to_try(inputs, self._parts[0].stage[0])
        seats = zip(self._replica_plan.stages, self._parts, self.boundaries.stages, self.devices, strict=True)
        for stage, part, types, device in seats:
            entering = given.to(device).each(types.entered)
            with computing(types.types, device):
                tried = try_layers(self._layers_to_try(part.stage, stage.layers[0]), entering)
            if tried.found is None:
                return tried
            given = tried.found.each(types.left)
        return tried

    def close(self) -> None:
        """Give hooks, buffers and the library's threads back."""
        super().close()
        if self._statistics is not None:
            self._statistics.close()
        self.__dict__.pop("_pipe", None)  # where it was made


def _check_skips(layers: nn.Sequential, plan: Plan, library: Library) -> None:
    """InputError on every rank if skip connections have no other end, or would be recomputed."""
    try:
        library.verify(layers)
    except TypeError as error:
        raise InputError(f"{library.name}: the model's skip connections do not fit together: {error}") from None
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            for name, layer in named_layers(layers)[slice(*stage.layers)]:
                if stage.recompute and isinstance(layer, library.skippable):
                    raise InputError(
                        f"replica {r} stage {s} is recomputed, but its layer {name!r} is @skippable: run again, it would stash "
                        "its tensor a second time; plan with allow_recompute: false, or carry the tensor from layer to layer"
                    )


def separate_stages(
    layers: nn.Sequential, bounds: Sequence[tuple[int, int]]
) -> tuple[Stage, dict[nn.Parameter, list[nn.Parameter]]]:
    """The layers, under their names, such that no two stages share a parameter or a buffer: where one does, the later stage
    gets a copy of the layer in which the shared ones are copied. Also parameter → its copies. All else is the same object."""
    whole, copies = Stage(), dict[nn.Parameter, list[nn.Parameter]]()
    earlier: set[Tensor] = set()
    for lo, hi in bounds:
        memo: dict[int, Any] = {}  # one a stage: layers that share within it go on doing so
        own: set[Tensor] = set()
        for name, layer in named_layers(layers)[lo:hi]:
            held = [*layer.parameters(), *layer.buffers()]
            shared = [t for t in held if t in earlier]
            if shared:
                memo |= {id(t): t for t in held if t not in earlier}
                new = [t for t in shared if id(t) not in memo]
                layer = copy.deepcopy(layer, memo)
                for tensor in new:
                    if isinstance(tensor, nn.Parameter):
                        copies.setdefault(tensor, []).append(memo[id(tensor)])
            own.update(held)
            whole.add_module(name, layer)
        earlier |= own
    return whole, copies
