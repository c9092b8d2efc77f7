"""A transformer of diffusers: its weights as a folder for `from_pretrained`, and its adapters as a file for pipelines of
diffusers, and for all that read such files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetpipe.checkpoints.state_tensors import MODEL
from hetpipe.checkpoints.stores.tensor_files import save_tensors
from hetpipe.documents.sections.adapter import AdapterSection
from hetpipe.layers.adapters.names import Trained
from hetpipe.layers.model import named_layers
from hetpipe.layers.replay.layers import Replayed
from hetpipe.layers.transforms import lineage_of, uncompiled
from hetpipe.processes.progress import warn

WEIGHTS = "diffusion_pytorch_model.safetensors"
LORA = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."  # of names in that file


def transformer_of(layers: nn.Sequential) -> Any:
    """The model of diffusers of which these layers are, without their modules; None of others."""
    first = layers[0]
    lineage = lineage_of(first)
    found = uncompiled(lineage.written if lineage is not None else first)
    model = found.model if isinstance(found, Replayed) else None
    return model if type(model).__module__.partition(".")[0] == "diffusers" else None


def stored_names(layers: nn.Sequential) -> dict[str, str]:
    """Name in the model of diffusers → key in a checkpoint, of all that `save_pretrained` stores."""
    found = dict[str, str]()
    for label, layer in named_layers(layers):
        own = uncompiled(layer)
        assert isinstance(own, Replayed)
        kept = own.state_dict().keys()
        for name, outside in own.library_names.items():
            if name in kept:
                found.setdefault(outside, f"{MODEL}{label}.{name}")
    return found


def write_lora(trained: Trained, section: AdapterSection, read: Callable[[str], Tensor], folder: Path) -> None:
    """Write adapters as diffusers' `save_lora_weights` does, with alpha in them: some of those who read such a file take alpha
    from its metadata, others from tensors beside, and others take it to be the rank, as it then is."""
    if trained.whole:
        warn(f"note: {LORA} is left out, since it has no place for layers that were trained as a whole (train_also)")
        return
    scale = section.alpha / (math.sqrt(section.r) if section.rank_stabilized else section.r)
    tensors = dict[str, Tensor]()
    for name, (path, kind) in trained.adapters.items():
        value = read(name)
        tensors[f"{PREFIX}{path}.{kind}"] = value * scale if kind.startswith("lora_B") else value
    save_tensors(tensors, folder / LORA)
