"""GPT-2 of transformers (`GPT2LMHeadModel`) as a chain of layers: logits, loss and gradients are the same bits.

Shapes: b samples, t tokens, w features, v vocabulary. Inputs are int64 [b, t] tokens, or a tuple of these and a mask [b, t] of
1 (token) and 0 (padding); the mask travels with the features. Without one nothing but the features crosses a boundary.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from hetpipe.layers.model import Tensors, as_tuple
from hetpipe.models._hf import HFLayer, Origin, as_mask, configure, empty_model, expand, hand_on

from transformers import GPT2Config, GPT2LMHeadModel  # isort: skip
from transformers.masking_utils import create_causal_mask  # isort: skip

SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}


class Embedding(HFLayer):
    """Token plus position embedding: tokens, and a mask or none, to [b, t, w], and the mask."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        inner = model.transformer
        self.wte, self.wpe, self.drop = inner.wte, inner.wpe, inner.drop

    def forward(self, given: Tensors) -> Tensors:
        tokens, *rest = as_tuple(given)
        length, longest = tokens.shape[1], self.wpe.num_embeddings
        if length > longest:
            raise ValueError(
                f"gpt2: a sample has {length} tokens, the model's n_positions is {longest}: shorten the samples"
            )
        positions = torch.arange(length, device=tokens.device)[None]
        features = self.drop(self.wte(tokens) + self.wpe(positions))
        return hand_on(features, as_mask(rest[0] if rest else None))


class Block(HFLayer):
    """One transformer block: [b, t, w], and the mask, to the same."""

    def __init__(self, model: GPT2LMHeadModel, index: int) -> None:
        super().__init__()
        self.block, self.config = model.transformer.h[index], model.config

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        full, mask = expand(
            rest[0] if rest else None,
            "causal",
            lambda m: create_causal_mask(
                config=self.config, inputs_embeds=features, attention_mask=m, past_key_values=None
            ),
        )
        return hand_on(self.block(features, attention_mask=full, use_cache=False), mask)


class Head(HFLayer):
    """Last normalisation and projection: [b, t, w], and the mask, to logits [b, t, v]."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, given: Tensors) -> Tensors:
        return self.lm_head(self.ln_f(as_tuple(given)[0]))  # type: ignore[no-any-return]


def build(
    size: str | None = None, *, weights: str | None = None, attention: str = "sdpa", **config: Any
) -> nn.Sequential:
    """GPT-2 on the meta device: int64 [b, t], or (tokens, mask), to logits [b, t, v]; one layer for each block.

    Args:
        size: one of SIZES, if no weights are given; gpt2 by default.
        weights: a folder that `save_pretrained` wrote; its configuration and values are used.
        attention: sdpa, or eager.
        config: keys of GPT2Config in the place of the preset's or the folder's, such as n_layer or resid_pdrop.
    """
    settings, folder = configure("gpt2", GPT2Config, SIZES, size, weights, attention, config)
    if settings.add_cross_attention:
        raise ValueError("gpt2: add_cross_attention is not supported: there is no encoder here")
    model = empty_model(GPT2LMHeadModel, settings, folder)
    children: OrderedDict[str, HFLayer] = OrderedDict(embed=Embedding(model))
    for index in range(settings.n_layer):
        children[f"block{index}"] = Block(model, index)
    children["head"] = Head(model)
    return Origin(model, folder).assemble(children)
