"""BERT of transformers with a classifier (`BertForSequenceClassification`) as a chain of layers: logits, loss and gradients
are the same bits.

Shapes: b samples, t tokens, w features. Inputs are int64 [b, t] tokens, or a tuple of these, a mask [b, t] of 1 (token) and 0
(padding) and, if wanted, token types [b, t]; the mask travels with the features.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from hetpipe.layers.model import Tensors, as_tuple
from hetpipe.models._hf import HFLayer, Origin, as_mask, configure, empty_model, expand, hand_on

from transformers import BertConfig, BertForSequenceClassification  # isort: skip
from transformers.masking_utils import create_bidirectional_mask  # isort: skip

SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},  # BertConfig's own defaults
    "bert-large": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    },
}  # fmt: skip


class Embedding(HFLayer):
    """Sum of the three embeddings, normalised: tokens, and mask and types or none, to [b, t, w], and the mask."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.embeddings = model.bert.embeddings

    def forward(self, given: Tensors) -> Tensors:
        tokens, mask, types, *_ = (*as_tuple(given), None, None)
        return hand_on(self.embeddings(input_ids=tokens, token_type_ids=types), as_mask(mask))


class Layer(HFLayer):
    """One encoder layer: [b, t, w], and the mask, to the same."""

    def __init__(self, model: BertForSequenceClassification, index: int) -> None:
        super().__init__()
        self.layer, self.config = model.bert.encoder.layer[index], model.config

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        full, mask = expand(
            rest[0] if rest else None,
            "bidirectional",
            lambda m: create_bidirectional_mask(config=self.config, inputs_embeds=features, attention_mask=m),
        )
        return hand_on(self.layer(features, full), mask)


class Head(HFLayer):
    """Pooler, dropout and classifier: [b, t, w], and the mask, to logits [b, num_labels]."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = model.bert.pooler, model.dropout, model.classifier

    def forward(self, given: Tensors) -> Tensors:
        pooled = self.pooler(as_tuple(given)[0])  # type: ignore[misc]  # it is there: add_pooling_layer is true
        return self.classifier(self.dropout(pooled))  # type: ignore[no-any-return]


def build(
    size: str | None = None, *, weights: str | None = None, attention: str = "sdpa", **config: Any
) -> nn.Sequential:
    """BERT for sequence classification, on the meta device: int64 [b, t], (tokens, mask) or (tokens, mask, types), to logits
    [b, num_labels].

    Args:
        size: one of SIZES, if no weights are given; bert-base by default.
        weights: a folder that `save_pretrained` wrote; its configuration and values are used. A pooler or classifier that it
            lacks is drawn anew, with a warning.
        attention: sdpa, or eager.
        config: keys of BertConfig in the place of the preset's or the folder's, such as num_labels or num_hidden_layers.
    """
    settings, folder = configure("bert", BertConfig, SIZES, size, weights, attention, config)
    if settings.is_decoder:
        raise ValueError("bert: is_decoder is not supported: this is the encoder with a classifier")
    model = empty_model(BertForSequenceClassification, settings, folder)
    children: OrderedDict[str, HFLayer] = OrderedDict(embed=Embedding(model))
    for index in range(settings.num_hidden_layers):
        children[f"layer{index}"] = Layer(model, index)
    children["head"] = Head(model)
    return Origin(model, folder, new=("bert.pooler.", "classifier.")).assemble(children)
