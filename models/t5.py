"""T5 of transformers (`T5ForConditionalGeneration`) as a chain of layers: logits, loss and gradients are the same bits.

Encoder and decoder are one chain. What travels through the encoder is (features, bias, source mask, target tokens), through the
decoder (features, bias, encoder output, source mask), and a target mask at the end where one is given. The bias [1, heads, q, k]
is the relative position bias: the first block of each stack computes it for all others, so its gradient is summed as
transformers does. It has all heads; a block that is split over devices takes its own out of it.
Shapes: b samples, s source tokens, t target tokens, w features, v vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

from torch import Tensor, nn

from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.configs import configure, empty_model
from hetpipe.hf.masks import as_mask, expand, hand_on
from hetpipe.layers.model import Tensors, as_tuple

from transformers import T5Config, T5ForConditionalGeneration  # isort: skip
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask  # isort: skip
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack  # isort: skip

SIZES: dict[str, dict[str, int]] = {
    "t5-small": {},  # T5Config's own defaults
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-3b": {"d_model": 1024, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "d_kv": 128},
}


class Embedding(HFLayer):
    """Source tokens [b, s], source mask, target tokens [b, t] (and a target mask) to features [b, s, w] and the rest."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.embed_tokens, self.dropout = model.encoder.embed_tokens, model.encoder.dropout

    def forward(self, given: Tensors) -> Tensors:
        source, mask, target, *rest = as_tuple(given)
        features = self.dropout(self.embed_tokens(source))
        return hand_on(features, as_mask(mask), target, as_mask(rest[0] if rest else None))


class _Block(HFLayer):
    """One block of a stack. The first makes the bias."""

    def __init__(self, stack: T5Stack, index: int) -> None:
        super().__init__()
        self.block, self.config, self.own_heads = stack.block[index], stack.config, nn.Identity()
        self.is_first, self.is_last = index == 0, index == len(stack.block) - 1
        named = ((name, name.rpartition(".")[2]) for name, module in self.named_modules() if isinstance(module, nn.Linear))
        heads = f"colwise/{stack.config.num_heads}"
        styles = {"q": heads, "k": heads, "v": heads, "o": "rowwise", "wo": "rowwise"}  # others: the first of the feed-forward
        self.tensor_parallel = {"own_heads": "split_heads"} | {name: styles.get(last, "colwise") for name, last in named}

    def bias(self, features: Tensor, rest: list[Tensor]) -> Tensor:
        """[1, heads, q, k]: made here, or the first of the rest, which is taken."""
        if not self.is_first:
            return rest.pop(0)
        length, attention = features.shape[1], cast(T5Attention, self.block.get_submodule("layer.0.SelfAttention"))
        made: Tensor = attention.compute_bias(length, length, device=features.device)
        return made


class EncoderBlock(_Block):
    """One encoder block. The last hands no bias on."""

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        bias = self.bias(features, rest)
        full, mask = expand(
            rest.pop(0),
            "encoder",
            lambda m: create_bidirectional_mask(config=self.config, inputs_embeds=features, attention_mask=m),
        )
        features, *_ = self.block(features, full, self.own_heads(bias))
        return hand_on(features, None if self.is_last else bias, mask, *rest)


class Bridge(HFLayer):
    """From encoder to decoder: last normalisation of the one, embedding of the target for the other."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.norm, self.encoder_dropout = model.encoder.final_layer_norm, model.encoder.dropout
        self.embed_tokens, self.decoder_dropout = model.decoder.embed_tokens, model.decoder.dropout

    def forward(self, given: Tensors) -> Tensors:
        features, mask, target, *rest = as_tuple(given)
        encoded = self.encoder_dropout(self.norm(features))
        return hand_on(self.decoder_dropout(self.embed_tokens(target)), encoded, mask, *rest)


class DecoderBlock(_Block):
    """One decoder block. The last hands on its features only."""

    def forward(self, given: Tensors) -> Tensors:
        features, *rest = as_tuple(given)
        bias = self.bias(features, rest)
        encoded, mask, *last = rest
        across, mask_on = expand(mask, "decoder", lambda m: self._across(features, encoded, m))
        full, last_on = expand(
            last[0] if last else None,
            "causal",
            lambda m: create_causal_mask(config=self.config, inputs_embeds=features, attention_mask=m, past_key_values=None),
        )
        features, *_ = self.block(features, full, self.own_heads(bias), encoded, across)
        return features if self.is_last else hand_on(features, bias, encoded, mask_on, last_on)

    def _across(self, features: Tensor, encoded: Tensor, mask: Tensor | None) -> Any:
        return create_bidirectional_mask(
            config=self.config, inputs_embeds=features, attention_mask=mask, encoder_hidden_states=encoded
        )


class Head(HFLayer):
    """Last normalisation, dropout and projection: [b, t, w] to logits [b, t, v]."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.norm, self.dropout, self.lm_head = (model.decoder.final_layer_norm, model.decoder.dropout, model.lm_head)
        self.scale = model.config.d_model**-0.5 if model.config.scale_decoder_outputs else None

    def forward(self, features: Tensor) -> Tensor:
        features = self.dropout(self.norm(features))
        return self.lm_head(features if self.scale is None else features * self.scale)  # type: ignore[no-any-return]


def build(size: str | None = None, *, weights: str | None = None, attention: str = "sdpa", **config: Any) -> nn.Sequential:
    """T5 on the meta device: (source [b, s], source mask [b, s], target [b, t]), int64, to logits [b, t, v]. The target is what
    the decoder reads: the labels, shifted to the right, behind the start token (which is the padding token). A fourth
    tensor, a mask of the target, may follow.

    Args:
        size: one of SIZES, if no weights are given; t5-small by default.
        weights: a folder that `save_pretrained` wrote, or a name on Hugging Face; its configuration and values are used.
        attention: sdpa, or eager.
        config: keys of T5Config in the place of the preset's or the folder's, such as num_layers or dropout_rate.
    """
    settings, folder = configure("t5", T5Config, SIZES, size, weights, attention, config)
    if getattr(settings, "decoder_start_token_id", None) is None:
        settings.decoder_start_token_id = settings.pad_token_id
    model = empty_model(T5ForConditionalGeneration, settings, folder)
    children: OrderedDict[str, HFLayer] = OrderedDict(embed=Embedding(model))
    for index in range(settings.num_layers):
        children[f"encoder{index}"] = EncoderBlock(model.encoder, index)
    children["bridge"] = Bridge(model)
    for index in range(settings.num_decoder_layers):
        children[f"decoder{index}"] = DecoderBlock(model.decoder, index)
    children["head"] = Head(model)
    return Origin(model, folder).assemble(children)
