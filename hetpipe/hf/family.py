"""A family of models of transformers whose layers are alike: what differs from one to the other, in words. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpipe.hf.sizes import Kind


@dataclass(frozen=True, kw_only=True)
class Family:
    """Modules are given by their paths in the model of transformers, with the names that they have in a layer of the chain, which
    checkpoints hold. The name of the file is transformers' `model_type`, and what jobs call the model.

    Args:
        model: transformers' class.
        kind: what its layers are like.
        sizes: presets, in keys of its configuration, the first of which is taken where none is named.
        embed: modules of the first layer, of which the first takes the tokens and each other what the one before gives.
        positions: the one of them that embeds positions, which is added, and the key that says how many there are.
        token_types: whether a sample may have token types, beside a mask.
        layers: the list of layers.
        layer: what each is called.
        rotary: the module that gives rotary angles. Each layer computes them for itself: they have no parameters, so none travel.
        causal: whether a token sees only those before it.
        arguments: what each layer is given besides.
        head: modules of the last layer, one after the other.
        refused: keys of the configuration that must not be set, with the reason.
        new: what the names of tensors begin with that a folder may lack, because fine-tuning adds them.
    """

    model: str
    kind: Kind
    sizes: Mapping[str, Mapping[str, int]]
    embed: Mapping[str, str]
    positions: tuple[str, str] | None = None
    token_types: bool = False
    layers: str
    layer: str = "layer"
    rotary: str | None = None
    causal: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    head: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)
    new: tuple[str, ...] = ()
