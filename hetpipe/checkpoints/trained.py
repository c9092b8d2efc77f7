"""Trained weights out of a checkpoint, in one process, which needs neither the plan nor the ranks that saved it."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import check_adapted
from hetpipe.checkpoints.origin.base_numbers import check_numbers, numbers_of_base
from hetpipe.checkpoints.stores.folder import STATE_FILE, store_at, stored_at
from hetpipe.checkpoints.stores.store import Store, Stored
from hetpipe.checkpoints.training_state import read_saved
from hetpipe.documents.sections.adapter import CONFIG_FILE
from hetpipe.files.messages import InputError
from hetpipe.layers.weights import materialise, state_of
from hetpipe.processes.world import alone

LIKE_TRAINED = "build the model as it was built for training, and of the same type (model.to(torch.bfloat16), say)"


def find_checkpoint(place: str | os.PathLike[str] | Store) -> Stored:
    """The folder itself, if it is a checkpoint; else the newest in it, or in another store. InputError where there is none."""
    if isinstance(place, str | os.PathLike) and (itself := stored_at(place)).is_complete():
        return itself
    found = checkpoint.complete(store_at(place))
    if not found:
        raise InputError(
            f"{place} is no checkpoint and holds no checkpoints (folders step-… with a {STATE_FILE}){_instead(place)}"
        )
    return found[-1]


def _instead(place: str | os.PathLike[str] | Store) -> str:
    """What may have been meant by a folder without checkpoints."""
    if not isinstance(place, str | os.PathLike):
        return ""
    folder = Path(place)
    if below := sorted({file.parent.parent for file in folder.glob(f"*/step-*/{STATE_FILE}")}):
        return f". {below[0]} holds some: name that folder"
    if any((folder / name).is_file() for name in (CONFIG_FILE, "config.json")):
        return ". It holds weights as transformers and peft load them. Name the run's job, or its folder of checkpoints"
    return ""


def load_weights(model: nn.Module, folder: str | os.PathLike[str] | Store) -> int:
    """Load the weights of a checkpoint, or of the newest in a folder of them or another store, into a model like the one that was
    trained; returns the step after which they were saved. It takes one process, without torchrun, a plan or an optimizer.
    InputError, before anything is changed, if a file is damaged, or if the model's tensors have other names, shapes or types."""
    found = find_checkpoint(folder)
    if isinstance(model, nn.Sequential):
        state = read_saved(found)
        check_adapted(state, list(model), found)
        materialise(model)  # layers on the meta device
        check_numbers(state.base_numbers, numbers_of_base(model, alone()), found)
    if empty := next((name for name, p in state_of(model).items() if p.is_meta), None):
        raise InputError(
            f"{empty!r} of the model is on the meta device, so it has no memory to load into. Build the model "
            "without torch.device('meta')"
        )
    checkpoint.load(found, model, None, alone(), whole=model, advice=LIKE_TRAINED)
    return read_saved(found).step
