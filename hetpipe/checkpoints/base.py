"""The model that adapters were added to: a checkpoint does not hold it, but says which one it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hetpipe.checkpoints.stores.pieces import note_tensor
from hetpipe.files.messages import InputError, listed, shown
from hetpipe.layers.transforms import adapter_of, kept_elsewhere, lineage_of, tensors_of, uncompiled

KEY = "model.base"  # of what a run depends on


def base_of(layers: Iterable[nn.Module]) -> str | None:
    """A digest of it: of what it was read or drawn from, where its layers say so (`base_digest`); else of names, types, shapes
    and a few numbers of each of its tensors. None where nothing was added."""
    found, own = list(map(uncompiled, layers)), hashlib.sha256()
    if not any(map(_is_adapted, found)):
        return None
    for number, layer in enumerate(found):
        source = getattr(lineage.written if (lineage := lineage_of(layer)) is not None else layer, "base_digest", None)
        if isinstance(source, str):
            return source
        trained = {name for name, p in layer.named_parameters(remove_duplicate=False) if p.requires_grad}
        for name, tensor in sorted(tensors_of(layer).items()):
            if name in kept_elsewhere(layer) or (name not in trained and name not in layer.state_dict()):
                note_tensor(own, f"{number}.{name}", tensor.detach())
    return own.hexdigest()[:32]


def _is_adapted(layer: nn.Module) -> bool:
    found = lineage_of(layer)
    return found is not None and found.adapter is not None


def pinned_base(layers: Iterable[nn.Module]) -> dict[str, Any]:
    """It, as one of the keys of what a run depends on."""
    found = base_of(layers)
    return {KEY: found} if found is not None else {}


def adapter_keys(layers: Iterable[nn.Module]) -> dict[str, Any] | None:
    """As which adapters were added, by the keys of a job's section; None without any. (Dropout may change.)"""
    found = adapter_of(layers)
    return found.model_dump(mode="json", exclude={"dropout"}) if found is not None else None


def check_adapted(state: object, layers: Sequence[nn.Module], checkpoint: object) -> None:
    """InputError where adapters would go on beside another model than that with which they were trained, or otherwise. `state`:
    the plain part of a checkpoint."""
    job: Mapping[str, Any] = getattr(state, "job", None) or {}
    saved, own = getattr(state, "base", None) or job.get(KEY), base_of(layers)
    if saved != own:
        told = [f"adapters of the model {base}" if base is not None else "no adapters" for base in (saved, own)]
        raise InputError(
            f"checkpoint {checkpoint} was saved with {told[0]}, and now there are {told[1]} (digests of names, shapes and a few "
            "numbers of all tensors): build the model as it was, or name another folder to start anew"
        )
    keys = {name.removeprefix("adapter."): value for name, value in job.items() if name.startswith("adapter.")}
    before, now = getattr(state, "adapter", None) or keys, adapter_keys(layers) or {}
    others = [f"adapter.{key} was {shown(before.get(key))}, is {shown(value)}"
              for key, value in now.items() if before.get(key) != value]  # fmt: skip
    if others:
        raise InputError(f"checkpoint {checkpoint} is of other adapters; set these back:\n{listed(others)}")


def other_base(saved: Mapping[str, Any]) -> str:
    """What is said where a job's model is another."""
    return "the adapters that were saved are of another model: write model.args.weights as it was" + (
        f" ({saved['model.args.weights']})" if "model.args.weights" in saved else ""
    )
