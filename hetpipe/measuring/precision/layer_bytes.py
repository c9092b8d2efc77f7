"""The bytes of layers: what they hold, what a sample leaves in them for backward, and what leaves them.

Saved bytes come from one forward, by saved-tensor hooks: shared storage once, parameters never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.documents.number_types import AS_BUILT, NumberTypes
from hetpipe.documents.profile import LayerProfile
from hetpipe.layers.device import MemoryMeter, module_bytes, static_storages, trained_bytes
from hetpipe.layers.model import Model, Tensors, alongside, as_tuple, as_value, move, named_layers
from hetpipe.layers.numbers import StageTypes
from hetpipe.layers.recipe import layer_on
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.split import tied_layers
from hetpipe.layers.stage import alias, works_in_place
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.kinds import Kinds, likeness
from hetpipe.measuring.layer_run import loss_of, without_history
from hetpipe.measuring.precision.casts import Copy, kept_copies


class Kept(NamedTuple):
    """Bytes per layer: what one sample leaves for backward, behind the layer before and as the first of a stage, and the copies
    of parameters that autocast keeps during a step."""

    per_sample: list[int]
    first: list[int]
    cast: list[int]


def kinds_of(model: Model) -> Kinds:
    """Which layers compute the same, found out here where it is not known yet."""
    return model.kinds or trace(model.layers, model.inputs).kinds


def saved_bytes(model: Model, device: torch.device, types: NumberTypes = AS_BUILT, group: Group | None = None) -> Kept:
    """What each layer keeps. The layers run one after the other, each in a graph of its own, so that its parameters can go with
    it; what it saved stays, and is not counted again in a later layer, nor are the inputs that come so far, nor targets, which
    are in buffers. As the first of a stage a layer does not save what enters, which is in such buffers, but what else layers of
    one stage share (tables of positions, which a layer hands on beside its output). Copies of parameters that autocast makes anew
    in each forward (of those that do not train) belong to a micro-batch; they are counted with each of its samples, which is
    never too little. `group`: over whose devices the layers are split. Of one kind, layers run once for each choice of what
    enters them and was saved before."""
    inputs, targets = (move(x, device) for x in model.sample(1))
    run = _Run(model, device, types, targets, group)
    known, rows, given = dict[Hashable, _Found](), list[_Found](), _Given.of(as_tuple(inputs), set())
    with kept(model.layers):
        for index, kind in enumerate(kinds_of(model).first):
            key = kind, index == 0, given.likeness  # what enters the first counts as saved behind it
            if key not in known:
                known[key] = run.passed(index, given)
            rows.append(known[key])
            given = known[key].left
    return Kept([row.per_sample for row in rows], [row.first for row in rows], [row.cast for row in rows])


class _Given(NamedTuple):
    """What enters a layer; for each tensor, whether its storage was counted before, and which is the first that has it. By its
    `likeness` it saves what others save."""

    tensors: tuple[Tensor, ...]
    counted: tuple[tuple[bool, int], ...]
    likeness: Hashable

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], known: set[int]) -> _Given:
        """These, where storages at these addresses are counted."""
        storages = [t.untyped_storage().data_ptr() for t in tensors]
        counted = tuple((storage in known, storages.index(storage)) for storage in storages)
        return cls(tensors, counted, (counted, likeness(tensors), tuple(t.untyped_storage().nbytes() for t in tensors)))


class _Found(NamedTuple):
    per_sample: int
    first: int
    cast: int
    left: _Given


class _Run:
    """Layers that are passed by one sample."""

    def __init__(
        self, model: Model, device: torch.device, types: NumberTypes, targets: Tensors, group: Group | None = None
    ) -> None:
        self.model, self.device, self.types, self.targets, self.group = model, device, types, targets, group
        self.meter, self.held = MemoryMeter(), list[Tensor]()  # the tensors that are counted so far

    def passed(self, index: int, given: _Given) -> _Found:
        """What a layer keeps and gives. (What enters may have been counted since, behind a layer of the same kind.)"""
        layers, meter, tensors = self.model.layers, self.meter, given.tensors
        new = _storages(t for t, (counted, _) in zip(tensors, given.counted, strict=True) if not counted)
        loss = loss_of(self.model, self.targets) if index == len(layers) - 1 else None
        with layer_on(layers, layers[index], self.device, self.types, self.group) as running:
            copies = _copies_of(running, tensors) if self.types.casts else []
            own = static_storages(running) | {copy.address for copy in copies} | _storages(as_tuple(self.targets))
            first = _saved_first(running, tensors, loss, own)
            known = _storages(self.held) - new
            meter.exclude = known | own
            before = meter.used
            with meter.hooks():
                output = _forward(running, tensors)
                end = loss(output) if loss is not None else None
            saved = meter.used - before
            now = [*meter.held, *(tensors if index == 0 else ())]
            self.held += now
            outputs = tuple(alongside(t.detach().requires_grad_(), t) if t.requires_grad else t for t in as_tuple(output))
            del output, end
        return _Found(saved, first, sum(copy.size_bytes for copy in copies), _Given.of(outputs, known | _storages(now)))


def _saved_first(layer: nn.Module, tensors: tuple[Tensor, ...], loss: Callable[[Tensors], Tensor] | None, own: set[int]) -> int:
    """What the layer saves in a stage that has received these: if it works in place, of a copy of them."""
    received = _fresh(tensors)
    given = _fresh(received) if works_in_place(layer) else received
    meter = MemoryMeter(exclude=own | _storages(received))
    with meter.hooks():
        output = _forward(layer, given)
        end = loss(output) if loss is not None else output
        saved = meter.used
    del output, end
    return saved


def _forward(layer: nn.Module, tensors: tuple[Tensor, ...]) -> Tensors:
    output: Tensors = layer(as_value([alongside(alias(t) if t.requires_grad else t.detach(), t) for t in tensors]))
    return output


def _fresh(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """These values, which a layer may overwrite."""
    return tuple(t.clone() for t in without_history(tensors))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def _copies_of(layer: nn.Module, tensors: tuple[Tensor, ...]) -> list[Copy]:
    return kept_copies(layer, lambda: _forward(layer, _fresh(tensors)))


def saved_bytes_somewhere(model: Model, device: torch.device, types: NumberTypes = AS_BUILT) -> Kept:
    """On the device if one sample of the whole model fits it, else on the CPU (whose kernels may save a little more)."""
    try:
        return saved_bytes(model, device, types)
    except torch.OutOfMemoryError:
        return saved_bytes(model, torch.device("cpu"), types)


def boundary_bytes(model: Model, device: torch.device | None = None, types: NumberTypes = AS_BUILT) -> list[int]:
    """Bytes of one sample that enter layer 0, and that leave each layer, where all are computed in these types."""
    stages = [] if types == AS_BUILT else [StageTypes(0, len(model.layers), types)]
    rows = trace(model.layers, model.sample(1)[0], device, stages=stages, kinds=model.kinds).rows
    return [sum(spec.size_bytes for spec in specs) for specs in rows]


def layer_profiles(model: Model, device: torch.device) -> tuple[tuple[LayerProfile, ...], int]:
    """The bytes of every layer, and the bytes of one sample's input."""
    ends, saved = boundary_bytes(model), saved_bytes_somewhere(model, device)
    by_name = dict(model.layers.named_parameters(remove_duplicate=False))
    ties: dict[int, list[str]] = {}
    for name, members in tied_layers(model.layers).items():
        for member in members:
            ties.setdefault(member, []).append(name)
    rows = []
    for index, (name, layer) in enumerate(named_layers(model.layers)):
        parameters, buffers = module_bytes(layer)
        shared, trained = ties.get(index, []), trained_bytes(layer.parameters())
        tied, frozen = [by_name[n] for n in shared], trained < parameters
        rows.append(
            LayerProfile(
                name=name,
                parameter_bytes=parameters,
                output_bytes_per_sample=ends[index + 1],
                saved_bytes_per_sample=saved.per_sample[index],
                first_saved_bytes_per_sample=saved.first[index],
                buffer_bytes=buffers,
                tied=shared[0] if shared else None,
                tied_parameter_bytes=sum(p.numel() * p.element_size() for p in tied),
                trained_bytes=trained if frozen else None,
                tied_trained_bytes=trained_bytes(tied) if frozen and shared else None,
            )
        )
    return tuple(rows), ends[0]
