"""From the description of a family to a chain of layers: logits, loss and gradients are the same bits as transformers' own.

Shapes: b samples, t tokens, w features, v what the head gives. Inputs are int64 [b, t] tokens, or a tuple of these and a mask
[b, t] of 1 (token) and 0 (padding); the mask travels with the features. Without one nothing but the features crosses a boundary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.configs import configure, empty_model
from hetpipe.hf.families import family
from hetpipe.hf.family import Family
from hetpipe.hf.masks import as_mask, expand, hand_on
from hetpipe.layers.model import Tensors, as_tuple

import transformers  # isort: skip
from transformers import PreTrainedModel  # isort: skip
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask  # isort: skip


class Embedding(HFLayer):
    """Tokens, and mask and types or none, to [b, t, w], and the mask."""

    def __init__(self, name: str, described: Family, model: PreTrainedModel) -> None:
        super().__init__()
        for own, path in described.embed.items():
            self.add_module(own, model.get_submodule(path))
        self.model_name, self.token_types = name, described.token_types
        self.positions, self.longest = described.positions or ("", "")

    def forward(self, given: Tensors) -> Tensors:
        tokens, mask, types, *_ = (*as_tuple(given), None, None)
        if self.positions:
            self._check_length(tokens.shape[1])
        first, *others = self.named_children()
        features: Tensor = first[1](input_ids=tokens, token_type_ids=types) if self.token_types else first[1](tokens)
        for own, module in others:
            if own == self.positions:
                features = features + module(torch.arange(tokens.shape[1], device=tokens.device)[None])
            else:
                features = module(features)
        return hand_on(features, as_mask(mask))

    def _check_length(self, length: int) -> None:
        longest: Any = getattr(self, self.positions).num_embeddings
        if length > longest:
            raise ValueError(
                f"{self.model_name}: a sample has {length} tokens, the model's {self.longest} is {longest}: shorten the samples"
            )


class Layer(HFLayer):
    """One layer of those that are alike: [b, t, w], and the mask, to the same."""

    def __init__(self, described: Family, model: PreTrainedModel, index: int) -> None:
        super().__init__()
        layers: Any = model.get_submodule(described.layers)
        self.add_module(described.layer, layers[index])
        if described.rotary is not None:
            self.rotary = model.get_submodule(described.rotary)
        self.own, self.arguments, self.config = described.layer, dict(described.arguments), model.config
        self.causal, self.rotates = described.causal, described.rotary is not None

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        full, mask = expand(rest[0] if rest else None, "mask", lambda m: self._expanded(features, m))
        arguments = dict(self.arguments)
        if self.rotates:
            positions = torch.arange(features.shape[1], device=features.device)[None]
            arguments["position_embeddings"] = self.rotary(features, position_ids=positions)
        return hand_on(getattr(self, self.own)(features, attention_mask=full, **arguments), mask)

    def _expanded(self, features: Tensor, mask: Tensor | None) -> Any:
        if self.causal:
            return create_causal_mask(config=self.config, inputs_embeds=features, attention_mask=mask, past_key_values=None)
        return create_bidirectional_mask(config=self.config, inputs_embeds=features, attention_mask=mask)


class Head(HFLayer):
    """What the last layers make of the features: [b, t, w], and the mask, to logits [b, t, v], or [b, v] behind a pooler."""

    def __init__(self, described: Family, model: PreTrainedModel) -> None:
        super().__init__()
        for own, path in described.head.items():
            self.add_module(own, model.get_submodule(path))

    def forward(self, given: Tensors) -> Tensors:
        features = as_tuple(given)[0]
        for module in self.children():
            features = module(features)
        return features


def builder(name: str) -> Callable[..., nn.Sequential]:
    """The function `build` of the model of a family."""
    described = family(name)
    model_class: Any = getattr(transformers, described.model)

    def build(size: str | None = None, *, weights: str | None = None, attention: str = "sdpa", **config: Any) -> nn.Sequential:
        """The model on the meta device: int64 [b, t], or (tokens, mask), to what transformers' model gives as logits.

        Args:
            size: one of the family's, if no weights are given; the first by default.
            weights: a folder that `save_pretrained` wrote, or a name on Hugging Face; its configuration and values are used. What
                fine-tuning adds and the folder lacks is drawn anew, with a warning.
            attention: sdpa, or eager.
            config: keys of its configuration in the place of the preset's or the folder's.
        """
        settings, folder = configure(name, model_class.config_class, described.sizes, size, weights, attention, config)
        for key, reason in described.refused.items():
            if getattr(settings, key):
                raise ValueError(f"{name}: {key} is not supported: {reason}")
        model = empty_model(model_class, settings, folder)
        children: OrderedDict[str, HFLayer] = OrderedDict(embed=Embedding(name, described, model))
        count = len(model.get_submodule(described.layers))
        children |= {f"{described.layer}{index}": Layer(described, model, index) for index in range(count)}
        children["head"] = Head(described, model)
        return Origin(model, folder, new=described.new).assemble(children)

    return build
