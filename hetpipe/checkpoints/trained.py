"""Trained weights out of a checkpoint, in one process, which needs neither the plan nor the ranks that saved it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.training_state import STATE_FILE, read_saved
from hetpipe.files.messages import InputError
from hetpipe.layers.weights import materialise, state_of
from hetpipe.processes.world import alone

LIKE_TRAINED = "build the model as it was built for training, and of the same type (model.to(torch.bfloat16), say)"


def find_checkpoint(folder: str | Path) -> Path:
    """The folder itself, if it is a checkpoint; else the newest in it. InputError where there is none."""
    if (Path(folder) / STATE_FILE).exists():
        return Path(folder)
    found = checkpoint.list_checkpoints(folder)
    if not found:
        raise InputError(f"{folder} is no checkpoint, and holds none (folders step-… with a {STATE_FILE})")
    return found[-1]


def load_weights(model: nn.Module, folder: str | Path) -> int:
    """Load the weights of a checkpoint, or of the newest in a folder of them, into a model like the one that was trained; returns
    the step after which they were saved. It takes one process, without torchrun, a plan or an optimizer. InputError, before
    anything is changed, if a file is damaged, or if the model's tensors have other names, shapes or types."""
    found = find_checkpoint(folder)
    if isinstance(model, nn.Sequential):
        materialise(model)  # layers on the meta device
    if empty := next((name for name, p in state_of(model).items() if p.is_meta), None):
        raise InputError(f"{empty!r} of the model is on the meta device, and has no memory to load it into; build the model "
                         "without torch.device('meta')")  # fmt: skip
    checkpoint.load(found, model, None, alone(), whole=model, advice=LIKE_TRAINED)
    return read_saved(found).step
