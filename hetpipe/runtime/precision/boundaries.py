"""What crosses the boundaries of a replica's stages, by the number types of their devices: found alike at both ends of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import get_args

import torch
from torch import nn

from hetpipe.documents.number_types import NumberType, NumberTypes
from hetpipe.documents.plan import ReplicaPlan
from hetpipe.files.messages import InputError
from hetpipe.layers.model import Model, RowShapes, evaluating, row_shapes
from hetpipe.layers.numbers import StageTypes, stage_types
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.untouched.boundaries import trace
from hetpipe.layers.untouched.kinds import Kinds


class Boundaries:
    """Those of one replica, whose stages compute in these `types`. `layers` are all of the model's, traced on `device` (None:
    each where it is)."""

    def __init__(
        self,
        model: Model,
        layers: nn.Sequential,
        replica: ReplicaPlan,
        types: Sequence[NumberTypes],
        device: torch.device | None = None,
    ) -> None:
        self._model, self._layers, self._types, self._device = model, layers, types, device
        self._bounds = [stage.layers for stage in replica.stages]
        self._autocast: NumberType | None = None
        self._specs: dict[tuple[int, RowShapes, bool], list[tuple[TensorSpec, ...]]] = {}
        self._kinds: dict[bool, Kinds | None] = {True: model.kinds}  # in training or not: as the first trace found them
        self.stages: list[StageTypes] = stage_types(self._bounds, types)

    def follow(self, autocast: NumberType | None) -> bool:
        """Let stages of which nobody said what they compute in compute in this, the caller's; whether they did not before."""
        if autocast == self._autocast:
            return False
        self._autocast = autocast
        types = [own if own.computed is not None else own._replace(computed=autocast) for own in self._types]
        self.stages = stage_types(self._bounds, types)
        self._specs.clear()
        return True

    @property
    def autocast_number(self) -> int:
        """The caller's autocast as a number; 0: none."""
        return 0 if self._autocast is None else 1 + list(get_args(NumberType)).index(self._autocast)

    def check_autocast(self) -> None:
        """InputError if the caller has another autocast than a stage computes in, of which that was said."""
        for stage, types in zip(self.stages, self._types, strict=True):
            if self._autocast not in (None, types.computed or self._autocast):
                raise InputError(
                    f"layers {[stage.lo, stage.hi]} compute in {types.computed} by the plan, but the engine is called in "
                    f"torch.autocast of {self._autocast}: leave that out, since each device enters its own"
                )

    def of(self, size: int, *, training: bool, shapes: RowShapes | None = None) -> list[tuple[TensorSpec, ...]]:
        """What crosses all boundaries between layers with a micro-batch of this size (see `trace`), whose samples have these
        `shapes`; None: the sample's. All layers run for the first one, and one of each kind for the others."""
        key = size, shapes or row_shapes(self._model.inputs), training
        if key not in self._specs:
            with nullcontext() if training else evaluating(self._layers):
                found = trace(
                    self._layers,
                    self._model.shaped(size, key[1]),
                    self._device,
                    stages=self.stages,
                    kinds=self._kinds.get(training),
                )
            self._specs[key], self._kinds[training] = found
        return self._specs[key]
