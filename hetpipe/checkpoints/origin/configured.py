"""How a model of transformers is configured: what its layers compute with their weights (an epsilon, rotary frequencies)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hetpipe.files.messages import InputError, listed, shown
from hetpipe.layers.transforms import lineage_of, uncompiled

CONFIG = "model.config."  # before its keys, of what a run depends on


def config_of(layers: Iterable[nn.Module]) -> dict[str, Any]:
    """`{"model.config.rms_norm_eps": 1e-06, …}`, as the layers say it (their `configuration`); nothing of others."""
    for layer in map(uncompiled, layers):
        written = lineage.written if (lineage := lineage_of(layer)) is not None else layer
        if isinstance(found := getattr(written, "configuration", None), Mapping):
            return {f"{CONFIG}{key}": value for key, value in found.items()}
    return {}


def config_changes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The keys of both with other values: what only one of them says, another version of transformers knows."""
    return [key for key in saved if key.startswith(CONFIG) and key in own and saved[key] != own[key]]


def check_config(saved: Mapping[str, Any] | None, layers: Iterable[nn.Module], checkpoint: object) -> None:
    """InputError where weights would be written beside another configuration than that with which they were trained."""
    own = config_of(layers)
    if saved and (changed := config_changes(saved, own)):
        raise InputError(
            f"checkpoint {checkpoint} was saved with another configuration of its model. Set these keys back in the model's "
            "config.json, or in model.args of the job:\n"
            f"{listed([f'{key} was {shown(saved[key])}, is {shown(own[key])}' for key in changed])}"
        )
