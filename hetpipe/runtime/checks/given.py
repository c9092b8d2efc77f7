"""What a rank is given for a step, looked at before anything runs: whatever is wrong with it is said on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.batch_norm import may_normalise_batches, needs_a_choice, normalises_batches
from hetpipe.layers.model import Loss, Model, RowShapes, Tensors, as_tuple, batch_size, row_shapes
from hetpipe.layers.numbers import type_name
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.trials.layer_check import Outcome
from hetpipe.layers.trials.loss_check import DETACHED, check_labels, check_loss, held_by_loss, holds
from hetpipe.layers.trials.loss_trial import Trial
from hetpipe.processes.progress import warn
from hetpipe.processes.pulse import first_to_say


class Given:
    """Looks at what one rank is given. `layers` are those of this process."""

    def __init__(self, model: Model, loss: Loss, layers: nn.Module, replica: int, who: str) -> None:
        self._model, self._loss, self._replica, self._who = model, loss, f"replica {replica}", who
        self._quiet = replica > 0
        self._norms = may_normalise_batches(layers) if model.batch_norm is None else []
        self._tried = self._noted = self._layers_noted = False

    def rows(self, value: Tensors | None, what: str) -> int:
        """How many samples `value` has."""
        if value is None:
            return 0
        try:
            return batch_size(value)
        except (TypeError, IndexError) as error:
            raise InputError(
                f"{self._who}: {what} must be a tensor or a tuple of tensors whose dimension 0 counts samples: {error}"
            ) from None

    def check_norms(self) -> None:
        """InputError if a BatchNorm trains that did not when the model was wrapped."""
        for name, module in self._norms:
            if normalises_batches(module):
                raise InputError(f"{self._replica}: {needs_a_choice(name, module)}")

    def check_shapes(self, inputs: Tensors, *, training: bool) -> None:
        """InputError if they are other tensors than the sample's, whatever the lengths of their dimensions; in training, too, if
        they are larger than those."""
        found, wanted = row_shapes(inputs), row_shapes(self._model.inputs)
        if [len(shape) for shape in found] != [len(shape) for shape in wanted]:
            raise InputError(
                f"{self._replica}: a sample of its inputs has the shapes {_told(found)}, of the sample batch {_told(wanted)}; "
                "from step to step dimensions may have other lengths, but must be as many"
            )
        if training and any(prod(own) > prod(most) for own, most in zip(found, wanted, strict=True)):
            raise InputError(
                f"{self._replica}: a sample of its inputs has the shapes {_told(found)}, of the sample batch {_told(wanted)}, by "
                "which memory was planned: wrap the model with a sample as large as any that it trains on, or cut the inputs"
            )

    def check_types(self, inputs: Tensors) -> None:
        """InputError if their numbers have other types than the sample's: what crosses from stage to stage has the sample's."""
        types, wanted = ([t.dtype for t in as_tuple(batch)] for batch in (inputs, self._model.inputs))
        for found, other in zip(types, wanted, strict=True) if not _autocast() else ():
            if found != other and found.is_floating_point and other.is_floating_point:
                raise InputError(
                    f"{self._replica}: its inputs are {type_name(found)}, those of the sample batch {type_name(other)}; what "
                    "crosses from stage to stage has the types that the sample gave: convert the inputs, or wrap the model with "
                    "a sample like them"
                )

    def check_targets(self, targets: Tensors) -> None:
        """InputError if some are to be ignored that the loss's weight counts."""
        loss = self._loss
        if loss.skips_samples(targets):
            raise InputError(f"{self._replica}: its {loss.skipped()}")

    def check_labels(self, output: Sequence[TensorSpec], rows: int, targets: Tensors) -> None:
        """InputError if a target is no class. `output` is what the last layer gives for so many rows of the sample."""
        trial = Trial(model=self._model, loss=self._loss, output=output, rows=rows, targets=targets)
        check_labels(trial, f"{self._replica}'s share of the batch")

    @property
    def tried_loss(self) -> bool:
        """Whether it was tried."""
        return self._tried

    def check_loss(self, output: Sequence[TensorSpec], rows: int, targets: Tensors, device: torch.device) -> None:
        """InputError if the loss does not do (see `loss_check`). `output` is what the last layer gives for so many rows of this
        batch, on this device."""
        trial = Trial(model=self._model, loss=self._loss, output=output, rows=rows, targets=targets)
        self._loss.count(targets)  # what it says of them is told, and not as a note of the trial
        self._tried = True
        note = check_loss(trial, list(dict.fromkeys([torch.device("cpu"), device])))
        if note is not None and not self._quiet and not self._noted:
            self._noted = True
            warn(f"note: whether the loss is a mean over its batch could not be tried: {note}")

    def faults_of_layers(self, tried: Outcome) -> list[str]:
        """What is wrong with the layers; that it could not be found out is said once."""
        if tried.untried is not None and not self._quiet and not self._layers_noted:
            self._layers_noted = True
            note = f"note: whether layers couple samples, or keep state, could not be tried from here on: {tried.untried}"
            if first_to_say(note):
                warn(note)
        return [tried.fault] if tried.fault is not None else []

    def faults_of_loss(self, loss: Tensor, output: Tensors, *, whole: bool) -> list[str]:
        """What is wrong with the loss of a micro-batch; by its graph, if the `whole` of it is to be looked at."""
        outputs = [t for t in as_tuple(output) if t.requires_grad]
        if outputs and not loss.requires_grad:
            return [f"{self._who}: {DETACHED}"]
        held = held_by_loss(loss, outputs) if whole else []
        return [f"{self._who}: {holds(held, self._loss, self._model)}"] if held else []


def _autocast() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _told(shapes: RowShapes) -> str:
    return ", ".join(map(str, shapes))
