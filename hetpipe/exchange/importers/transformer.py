"""What planners that publish only times assume about a GPT: its layers' parameters and activations, from its sizes."""

from __future__ import annotations

from typing import NamedTuple

from hetpipe.exchange.importers.options import ImportOptions


class GptBytes(NamedTuple):
    """Bytes of each layer (embedding, blocks, head), on one device of a tensor-parallel group."""

    parameters: tuple[int, ...]
    saved: tuple[int, ...]
    outputs: tuple[int, ...]


def gpt_bytes(layers: int, options: ImportOptions, degree: int = 1) -> GptBytes:
    """With h the hidden size, s the sequence length, a the heads, v the vocabulary, t the degree, p bytes a number.

    Parameters: 12h² + 13h of a block (4h² attention, 8h² MLP, biases and two LayerNorms), vh of the embedding and of
    the head, all over t. Saved per sample: a block s·h·(10 + 24/t + 5·a·s/(h·t)) bytes at p = 2 (Korthikanti et al.
    2022), twice that at p = 4 but for its one-byte dropout masks, of which s·h·(2 + a·s/(h·t)); the head's logits and
    probabilities 2·s·v·p/t. Outputs: s·h·p, and 4 bytes of loss.
    """
    h, s, a, v, p, t = (
        options.hidden_size, options.sequence_length, options.attention_heads, options.vocabulary, options.number_bytes, degree,
    )  # fmt: skip
    masks = 2 + a * s / (h * t)
    block = s * h * ((10 + 24 / t + 5 * a * s / (h * t) - masks) * p / 2 + masks)
    inner = layers - 2
    return GptBytes(
        parameters=(v * h * p // t, *[(12 * h * h + 13 * h) * p // t] * inner, v * h * p // t),
        saved=(0, *[round(block)] * inner, round(s * h * p + 2 * s * v * p / t)),
        outputs=(*[s * h * p] * (layers - 1), 4),
    )
