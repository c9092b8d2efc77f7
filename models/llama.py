"""Llama of transformers (`LlamaForCausalLM`) as a chain of layers: logits, loss and gradients are the same bits.

Shapes: b samples, t tokens, w features, v vocabulary. Inputs are int64 [b, t] tokens, or a tuple of these and a mask [b, t] of
1 (token) and 0 (padding). Each layer computes the rotary angles for itself: they have no parameters, so none need to travel.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from hetpipe.layers.model import Tensors, as_tuple
from hetpipe.models._hf import HFLayer, Origin, as_mask, configure, empty_model, expand, hand_on

from transformers import LlamaConfig, LlamaForCausalLM  # isort: skip
from transformers.masking_utils import create_causal_mask  # isort: skip

SIZES: dict[str, dict[str, int]] = {
    "llama-7b": {},  # LlamaConfig's own defaults
    "llama-13b": {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
}  # fmt: skip


class Embedding(HFLayer):
    """Token embedding: tokens, and a mask or none, to [b, t, w], and the mask."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, given: Tensors) -> Tensors:
        tokens, *rest = as_tuple(given)
        return hand_on(self.embed_tokens(tokens), as_mask(rest[0] if rest else None))


class Layer(HFLayer):
    """One decoder layer: [b, t, w], and the mask, to the same."""

    def __init__(self, model: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        self.layer, self.rotary, self.config = model.model.layers[index], model.model.rotary_emb, model.config

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        positions = torch.arange(features.shape[1], device=features.device)[None]
        full, mask = expand(
            rest[0] if rest else None,
            "causal",
            lambda m: create_causal_mask(
                config=self.config, inputs_embeds=features, attention_mask=m, past_key_values=None
            ),
        )
        angles = self.rotary(features, position_ids=positions)
        return hand_on(self.layer(features, attention_mask=full, position_embeddings=angles), mask)


class Head(HFLayer):
    """Last normalisation and projection: [b, t, w], and the mask, to logits [b, t, v]."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, given: Tensors) -> Tensors:
        return self.lm_head(self.norm(as_tuple(given)[0]))  # type: ignore[no-any-return]


def build(
    size: str | None = None, *, weights: str | None = None, attention: str = "sdpa", **config: Any
) -> nn.Sequential:
    """Llama on the meta device: int64 [b, t], or (tokens, mask), to logits [b, t, v].

    Args:
        size: one of SIZES, if no weights are given; llama-7b by default.
        weights: a folder that `save_pretrained` wrote; its configuration and values are used.
        attention: sdpa, or eager.
        config: keys of LlamaConfig in the place of the preset's or the folder's, such as num_hidden_layers.
    """
    settings, folder = configure("llama", LlamaConfig, SIZES, size, weights, attention, config)
    model = empty_model(LlamaForCausalLM, settings, folder)
    children: OrderedDict[str, HFLayer] = OrderedDict(embed=Embedding(model))
    for index in range(settings.num_hidden_layers):
        children[f"layer{index}"] = Layer(model, index)
    children["head"] = Head(model)
    return Origin(model, folder).assemble(children)
