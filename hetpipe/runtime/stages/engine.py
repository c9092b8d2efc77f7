"""The torch back end's Engine: one process, one stage of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.documents.number_types import NumberTypes
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError, counted
from hetpipe.layers.device import Emulation, MemoryMeter, module_bytes, static_storages
from hetpipe.layers.host.offload import Offload
from hetpipe.layers.model import Model, RowShapes, Tensors, Wanted, as_tuple, as_value, move, named_layers, split_rows
from hetpipe.layers.numbers import StageTypes
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.shards.layout import Cut, Layout
from hetpipe.layers.shards.split import check_split, refuse_shards, refuse_use, whole, whole_in
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.split import joint_gradients, tied_layers, tied_names
from hetpipe.layers.stage import Stage
from hetpipe.layers.trials.layer_check import Outcome, norms_off, try_layers
from hetpipe.layers.trials.rows import TrialRows, cut_to_try, sizes_to_try
from hetpipe.layers.trials.split_check import Compared, shards_off
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.processes.progress import say, warn
from hetpipe.processes.world import World
from hetpipe.runtime.checks import stale
from hetpipe.runtime.forward import OnOutput
from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.precision.boundaries import Boundaries
from hetpipe.runtime.recorder import Recorder
from hetpipe.runtime.replicas import PlanGroups, Sharing, local_groups, plan_groups
from hetpipe.runtime.stages.executor import Ends, StageRun, forward_stages
from hetpipe.runtime.stages.handed_on import handed_on
from hetpipe.runtime.stages.transfers import Room, Side
from hetpipe.runtime.stages.trying import Trying

FEW = 4  # layers that a message names


class _Crossing(NamedTuple):
    """What enters and leaves a stage with each micro-batch, and how many first stages of the replica run forwards only."""

    ends: list[Ends]
    frozen: int


class TorchEngine(PlanEngine):
    """Trains a model by a plan, this process being one stage. All ranks of `world` construct it and call it in the same order."""

    stage: Stage

    def __init__(
        self,
        model: Model,
        plan: Plan,
        world: World,
        groups: PlanGroups,
        device: torch.device,
        types: Sequence[NumberTypes],
        *,
        emulation: Emulation | None = None,
    ) -> None:
        super().__init__(model, plan, world)
        self.device, self.groups = device, groups
        self.boundaries = Boundaries(model, model.layers, self._replica_plan, types, device)
        self._stage_plan = self._replica_plan.stages[self.index]
        lo, hi = self._stage_plan.layers
        stale.check_fresh(model.layers, lo, hi, world)
        self._check_split()
        self.group = self._own_group(groups)
        self._lanes = groups.pipelines[self.replica]
        before, after = (self._side(peers) for peers in plan.peers(self.seats[0]))
        self._sides = before, after
        if device.type == "cuda":
            self._lanes.warm_up(before.peers, after.peers, device)
        # From here on a device may have no memory, of which the others are told when all have come to the end (`open_engine`).
        recompute = self._stage_plan.recompute
        self.stage = make_stage(model.layers, lo, hi, device, recompute=recompute, types=self._own_types, group=self.group)
        if self.group is not None and self.group.number == 0:
            self._say_what_is_whole(self.group.degree)
        self.sync = self._gradient_sync(groups)
        self.recorder = Recorder(device, meter=self._meter(emulation))
        self.recorders = [self.recorder]
        self._rooms = self._empty_of_all(self.recorder.meter)
        if self._stage_plan.offload:
            self.stage.offload = Offload(device, self.recorder.meter, self.recorder.pacer.real)
        if emulation is not None:
            self._pace(emulation)
        self._runs: dict[tuple[tuple[int, ...], int | None], StageRun] = {}
        # What the last step was, in training or not: its sizes and the shapes of its samples, and what crossed the boundaries.
        self._crossed: dict[bool, tuple[tuple[tuple[int, ...], RowShapes], _Crossing]] = {}
        self._usable = refuse_use(model.layers, self.group) if self.group is not None else lambda: None
        self._compared = False  # whether the split layers of this replica are known to compute what the whole ones do
        self._watch(groups.owners)

    def _own_group(self, groups: PlanGroups) -> Group | None:
        """The devices over which this stage is split."""
        number, degree = self.shard
        if degree == 1:
            return None
        ranks = [self.world.rank_of[device] for device in self._stage_plan.devices]
        return Group(ranks, number, groups.stages[self.replica, self.index])

    def _side(self, peers: Sequence[str]) -> Side:
        number, degree = self.shard
        return Side([self.world.rank_of[d] for d in peers], number * len(peers), degree * len(peers), self.group)

    def _empty_of_all(self, meter: MemoryMeter | None) -> tuple[Room, Room]:
        before, after = self._sides
        return Room(self.device, meter, before.pieces), Room(self.device, meter, after.pieces)

    def _check_split(self) -> None:
        """InputError on every rank if a layer cannot be cut into the pieces that its owners have, or has been cut before.
        Collective."""
        named, (lo, hi) = named_layers(self._model.layers), self._stage_plan.layers
        self.world.together(lambda: refuse_shards(dict(named[lo:hi])))
        tied = tied_names(self._model.layers)
        self._layouts = {
            name: check_split(name, layer, len(owners.pieces), tied)[1]
            for owners in self.plan.owners()
            for name, layer in named[owners.lo : owners.hi]
            if len(owners.pieces) > 1
        }

    def _say_what_is_whole(self, degree: int) -> None:
        names = whole_in(self.stage)
        if names:
            few = ", ".join(map(repr, names[:FEW])) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
            say(
                f"{self.place}: {counted(len(names), 'layer')} of a split stage stay whole on each of its {degree} devices, "
                f"since nothing says how to split them: {few}"
            )

    def _sharing(self) -> Sharing:
        """How the parameters of this stage are cut by those who own them."""
        cuts, partial = dict[nn.Parameter, Cut](), set[nn.Parameter]()
        for name, layer in named_layers(self.stage):
            layout, own = self._layouts.get(name, Layout()), dict(layer.named_parameters(remove_duplicate=False))
            cuts |= {own[tensor]: cut for tensor, cut in layout.cut.items() if tensor in own}
            partial |= {own[tensor] for tensor in layout.partial}
        return Sharing(*self.shard, cuts, partial)

    def _gradient_sync(self, groups: PlanGroups) -> GradientSync:
        lo, hi = self._stage_plan.layers
        ties = tied_layers(self._model.layers)
        by_name = dict(self._model.layers.named_parameters(remove_duplicate=False))
        mine = set(self.stage.parameters())
        tied_names = {by_name[name]: name for name in ties if by_name[name] in mine}
        segments = plan_groups(self.plan, self.world.rank_of, ties)
        own = local_groups(self.stage, lo, hi, segments, self.plan, ties, tied_names, self._sharing())
        return GradientSync(own, groups.owners, self.world.rank)

    def _pace(self, emulation: Emulation) -> None:
        """Let actions last as long as on the emulated device."""
        lo, hi = self._stage_plan.layers
        self.recorder.seconds = lambda kind, size: emulation.seconds(
            kind, lo, hi, size, recompute=self._stage_plan.recompute, numbers=self.numbers
        )
        self.sync.ready = lambda parameters: self._as_late(emulation, parameters)
        if self.group is not None:
            self.group.paced = self.recorder.pacer.meeting

    def _as_late(self, emulation: Emulation, parameters: Sequence[nn.Parameter]) -> None:
        """An emulated device has made these gradients no sooner than its slower backward would."""
        lo, hi = self._stage_plan.layers
        at = min(i for i, layer in enumerate(self.stage) if not set(parameters).isdisjoint(layer.parameters()))
        recompute, numbers = self._stage_plan.recompute, self.numbers
        seconds = emulation.seconds("B", lo + at, hi, self._last_size, recompute=recompute, numbers=numbers)
        self.recorder.pacer.reach(seconds)

    def _meter(self, emulation: Emulation | None) -> MemoryMeter | None:
        if emulation is None:
            return None
        meter = MemoryMeter(limit=emulation.memory_bytes, where=self.name, exclude=static_storages(self.stage))
        parameters, buffers = module_bytes(self.stage)
        meter.add(parameters + buffers, f"the parameters and buffers of layers {list(self._stage_plan.layers)}")
        meter.add(self.sync.gradient_bytes, "gradients")
        meter.add(emulation.transient_bytes, "the recomputed layer")
        return meter

    def _crossing(self, sizes: tuple[int, ...], *, training: bool) -> _Crossing:
        """What crosses the boundaries with micro-batches of these sizes: that of the step before where it was of the same."""
        key, known = (sizes, self._shapes), self._crossed.get(training)
        if known is None or known[0] != key:
            rows = {size: self.boundaries.of(size, training=training, shapes=self._shapes) for size in set(sizes)}
            inputs, outputs = (joint_gradients([rows[size][at] for size in sizes]) for at in self._stage_plan.layers)
            bounds = [stage.layers[1] for stage in self._replica_plan.stages[:-1]]
            frozen = min(forward_stages([row[at] for at in bounds]) for row in rows.values())
            known = self._crossed[training] = key, _Crossing(list(zip(inputs, outputs, strict=True)), frozen)
        return known[1]

    @property
    def _own_types(self) -> StageTypes:
        return self.boundaries.stages[self.index]

    def _run(self, sizes: tuple[int, ...], *, training: bool) -> StageRun:
        key = sizes, self._crossing(sizes, training=True).frozen if training else None
        if key not in self._runs:
            planned = self._replica_plan.microbatch_sizes
            for old in [k for k in self._runs if (k[1] is not None) == training and not (training and k[0] == planned)]:
                del self._runs[old]
            depths = self._replica_plan.depths(self.plan.schedule, len(sizes)) if training else None
            self._runs[key] = StageRun(
                self.stage,
                index=self.index,
                stages=len(self._replica_plan.stages),
                sides=self._sides,
                lanes=self._lanes,
                rooms=self._rooms,
                sizes=sizes,
                depths=depths,
                recorder=self.recorder,
                loss=self._mean_loss if training else None,
                last_backward=self.sync.last_backward,
                seed=self._seed,
                frozen=key[1] or 0,
                memory=self.memory,
            )
        return self._runs[key]

    def _retyped(self) -> None:
        """What crosses the boundaries has other types: their buffers are made anew."""
        self._runs.clear()
        self._crossed.clear()
        self._empty_rooms()
        self.stage.types = self._own_types

    def _empty_rooms(self) -> None:
        for room in self._rooms:
            room.empty()

    def _sum_of_replica(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers if self.is_alone else self._lanes.sum(numbers)

    def _train(self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None) -> list[Tensor]:
        self._last_size = sizes[-1]
        with ExitStack() as held:
            given, wanted = self.memory.attempt(lambda: self._taken(sizes, inputs, targets, held), lambda: (None, None))
            losses = self._run(sizes, training=True).run(self._crossing(sizes, training=True).ends, given, wanted)
        if self.memory.shortage is not None:
            return []
        return [loss.double() * w.weight for loss, w in zip(losses, wanted or (), strict=True)]

    def _taken(
        self, sizes: tuple[int, ...], inputs: Tensors | None, targets: Tensors | None, held: ExitStack
    ) -> tuple[list[Tensors] | None, Sequence[Wanted] | None]:
        """The inputs and targets of each micro-batch, which the device holds as long as `held` does."""
        wanted = self.loss.wanted(targets, sizes, self.device) if targets is not None and self._ends else None
        given = self._microbatches(sizes, inputs)
        held.enter_context(self._holding([*(given or ()), *(w.targets for w in wanted or ())]))
        return given, wanted

    def _holding(self, batches: Sequence[Tensors]) -> AbstractContextManager[None]:
        """Let an emulated device hold the inputs and targets of a whole step."""
        meter = self.recorder.meter
        if meter is None:
            return nullcontext()
        return meter.lent([t for batch in batches for t in as_tuple(batch)], "the inputs and targets of a step")

    def _microbatches(self, sizes: tuple[int, ...], inputs: Tensors | None) -> list[Tensors] | None:
        return split_rows(move(inputs, self.device), sizes) if inputs is not None and self.index == 0 else None

    @property
    def _ends(self) -> bool:
        """Whether this is the stage in which losses are computed."""
        return self.index == len(self._replica_plan.stages) - 1

    def _shared_by_stage(
        self, inputs: Tensors | None, targets: Tensors | None, *, training: bool
    ) -> tuple[Tensors | None, Tensors | None]:
        if self.group is not None and self.index == 0:
            inputs = handed_on(inputs, self.group, self.device)
        if self.group is not None and self._ends and training:
            targets = handed_on(targets, self.group, self.device)
        return inputs, targets

    def _infer(self, sizes: tuple[int, ...], inputs: Tensors | None, on_output: OnOutput) -> None:
        ends = self._crossing(sizes, training=False).ends
        given = self.memory.attempt(lambda: self._microbatches(sizes, inputs), lambda: None)
        self._run(sizes, training=False).run(ends, given, None, on_output)
        self._empty_rooms()  # a stage that keeps nothing has more micro-batches in flight than one that trains

    def _try_layers(self, inputs: Tensors | None, samples: int) -> Outcome:
        given = self._entered(inputs, samples)
        if isinstance(given, str):
            return Outcome(untried=given)
        if self.group is None:
            return try_layers(self._layers_to_try(self.stage, self._stage_plan.layers[0]), given)
        # Which few of a kind are chosen hangs on numbers, which differ from shard to shard: all are tried, whole, one by one.
        for named in named_layers(self.stage):
            found = try_layers([named], given, whole)
            if self.group.any(found.found is None):
                return found if found.found is None else Outcome(untried=f"{named[0]!r}: as another device says")
            assert found.found is not None
            given = found.found
        return Outcome(found=given)

    @property
    def _is_split(self) -> bool:
        """Whether a stage of this replica is."""
        return any(len(stage.devices) > 1 for stage in self._replica_plan.stages)

    def _refused(self, inputs: Tensors | None, samples: int) -> bool:
        if not self._is_split:
            return False
        given: TrialRows | str = ""
        if not self._compared:
            given = self._entered(inputs, samples)
        if not self._compared and self.group is not None:
            found = Compared(given) if isinstance(given, str) else shards_off(self.stage, given.whole, self.group)
            self._faults += [found.fault] if found.fault is not None else []
            if found.untried is not None and self.shard[0] == 0:
                warn(f"note: whether split layers compute what whole ones do could not be tried: {found.untried}")
        self._compared = True
        return self._sum_of_replica([float(len(self._faults))])[0] > 0

    def _entered(self, inputs: Tensors | None, samples: int) -> TrialRows | str:
        """What enters this stage, with a few samples together and apart, which comes through the stages before it; or why it does
        not."""
        if len(self._replica_plan.stages) == 1:
            assert inputs is not None
            return cut_to_try(inputs, self.stage[0]).to(self.device).each(self._own_types.entered)
        sizes = sizes_to_try(samples)
        try:
            ends = self._crossing(sizes, training=True).ends
        except InputError as error:  # on all stages alike
            return str(error)
        cut = cut_to_try(inputs, self.stage[0]) if inputs is not None and self.index == 0 else None
        trying = Trying(self.stage, [leaves for _, leaves in ends])
        run = StageRun(
            trying,
            index=self.index,
            stages=len(self._replica_plan.stages),
            sides=self._sides,
            lanes=self._lanes,
            rooms=self._empty_of_all(None),
            sizes=sizes,
            depths=None,
            recorder=Recorder(self.device),
            loss=None,
            last_backward=lambda: None,
        )
        given = [move(as_value(rows), self.device) for rows in (cut.whole, *cut.parts)] if cut is not None else None
        with torch.no_grad(), kept(self.stage), norms_off(self.stage), drawing("trial"):
            run.run(ends, given, None, lambda *_: None)
        whole_rows, *parts = (
            [t.requires_grad_(s.requires_grad) for t, s in zip(row, specs, strict=True)]
            for row, (specs, _) in zip(trying.entered, ends, strict=True)
        )
        return TrialRows(tuple(whole_rows), (tuple(parts[0]), tuple(parts[1])), sizes[1:]).each(self._own_types.entered)

    def close(self) -> None:
        """Give hooks and buffers back."""
        super().close()
        self._runs.clear()
        self._usable()
        if self.group is not None:
            self.group.close()
