"""What a layer with adapters keeps for backward, and what adapters and quantised matrices take beside its products.

Bytes are those of what autograd saves in the layers of Llama and Qwen3 as transformers has them, attention by
scaled_dot_product_attention (`tests/test_what_if_adapters.py` compares them with torch's). A base that does not train needs no
inputs of its matrices; what is left are the inputs of norms (float32 in all precisions, with a number for each mean), queries,
keys, values, what attention gives with a number for each head, and three times the MLP's inner width. An adapter saves its input
and r numbers: in float32 one input for all that read it; under autocast each makes a copy of its own.

Seconds beside the measured ones are those of bytes moved over the bandwidth of the card, and of FLOPs over its rate. An adapter's
two products read and write each number once, and the sum of it and the matrix's product reads two and writes one; backward does
that twice. A matrix is made of a quantised one by reading that and writing it, in forward and again in backward (bitsandbytes'
MatMul4Bit; that this is bound by memory is an assumption: some ten operations for each two bytes or more)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from hetpipe.documents.number_types import BYTES, TYPE_OF, Precision
from hetpipe.hf.sizes import Matrix, Widths
from hetpipe.whatif.adapters.base import QUANTISED, Base, made_bytes, matrix_bytes
from hetpipe.whatif.adapters.lora import Lora
from hetpipe.whatif.cards import Card

ADAPTER_BYTES = 4  # of a number of an adapter: float32


class Extra(NamedTuple):
    """Seconds of one layer beside its own: of each sample (backward takes twice as long), and of each micro-batch, both ways."""

    sample_seconds: float
    microbatch_seconds: float


def saved_bytes(
    widths: Widths, modules: Collection[str], lora: Lora, targets: Sequence[Matrix], tokens: int, precision: Precision
) -> int:
    """Bytes that one sample of so many tokens leaves for backward in one layer of these modules."""
    number = BYTES[TYPE_OF[precision]]
    h, queries, keys, inner, heads = widths
    normed = 2 * (h + 1)
    normed += queries + heads if "q_norm" in modules else 0
    normed += keys + heads * keys // queries if "k_norm" in modules else 0
    frozen = 4 * (normed + heads) + number * (2 * queries + 2 * keys + 3 * inner)
    if precision == "fp32":
        inputs = sum({matrix.reads: matrix.inputs for matrix in targets if matrix.reads != "attention"}.values())
    else:
        inputs = sum(matrix.inputs for matrix in targets)
    return tokens * (frozen + number * (inputs + lora.r * len(targets)))


def extra(
    lora: Lora, targets: Sequence[Matrix], matrices: Sequence[Matrix], base: Base, tokens: int, precision: Precision, card: Card
) -> Extra:
    """What one layer takes beside its own products on a card."""
    number = BYTES[TYPE_OF[precision]]
    moved = number * tokens * sum(m.inputs + 2 * lora.r + 4 * m.outputs for m in targets)
    flops = 2 * tokens * sum(map(lora.parameters, targets))
    made = sum(made_bytes(m, base, precision) + matrix_bytes(m, base, "bfloat16", precision) for m in matrices)
    return Extra(flops / card.flops(precision) + moved / card.bandwidth, made / card.bandwidth if base in QUANTISED else 0.0)
