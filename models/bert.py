"""BERT of transformers with a classifier (`BertForSequenceClassification`) as a chain of layers: logits, loss and gradients are
the same bits.

A mask [b, t] of 1 (token) and 0 (padding) travels with the features; without one nothing but the features crosses a boundary.
Shapes: b samples, t tokens, w features.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.configs import configure, empty_model
from hetpipe.hf.masks import as_mask, expand, hand_on
from hetpipe.layers.model import Tensors, as_tuple

from transformers import BertConfig, BertForSequenceClassification  # isort: skip
from transformers.masking_utils import create_bidirectional_mask  # isort: skip

SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},  # BertConfig's own defaults
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


class Embedding(HFLayer):
    """Tokens [b, t], and mask and token types or none, to features [b, t, w], and the mask."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.embeddings = model.bert.embeddings

    def forward(self, given: Tensors) -> Tensors:
        tokens, mask, types, *_ = (*as_tuple(given), None, None)
        return hand_on(self.embeddings(input_ids=tokens, token_type_ids=types), as_mask(mask))


class Layer(HFLayer):
    """One layer of the encoder: [b, t, w], and the mask, to the same."""

    def __init__(self, model: BertForSequenceClassification, index: int) -> None:
        super().__init__()
        self.layer, self.config = model.bert.encoder.layer[index], model.config
        heads = f"colwise/{model.config.num_attention_heads}"
        self.tensor_parallel = {
            **{f"layer.attention.self.{name}": heads for name in ("query", "key", "value")},
            "layer.attention.output.dense": "rowwise",
            "layer.intermediate.dense": "colwise",
            "layer.output.dense": "rowwise",
        }

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        full, mask = expand(
            rest[0] if rest else None,
            "mask",
            lambda m: create_bidirectional_mask(config=self.config, inputs_embeds=features, attention_mask=m),
        )
        return hand_on(self.layer(features, attention_mask=full), mask)


class Head(HFLayer):
    """Pooler and classifier: [b, t, w], and the mask, to logits [b, num_labels]."""

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = model.get_submodule("bert.pooler"), model.dropout, model.classifier

    def forward(self, given: Tensors) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(self.pooler(as_tuple(given)[0])))
        return logits


def build(size: str | None = None, *, weights: str | None = None, attention: str = "sdpa", **config: Any) -> nn.Sequential:
    """BERT on the meta device: int64 [b, t] tokens, or (tokens, mask), or (tokens, mask, token types), to logits [b, num_labels].

    Args:
        size: one of SIZES, if no weights are given; bert-base by default.
        weights: a folder that `save_pretrained` wrote, or a name on Hugging Face; its configuration and values are used. Pooler
            and classifier are drawn anew, with a warning, if the folder lacks them.
        attention: sdpa, or eager.
        config: keys of BertConfig in the place of the preset's or the folder's, such as num_labels.
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
