"""Small models with adapters, and rows of words for their jobs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.layers.model import evaluating
from hetpipe.models import causal_lm
from tests.support.zoo import LENGTH, WORDS

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "rsLoRA of two": {"rank_stabilized": True, "targets": ["q_proj", "v_proj"]},
    "nf4, DoRA": {"base": "nf4", "use_dora": True},
    "fp8": {"base": "fp8"},
    "int8": {"base": "int8"},
    "with norms, embedding, head": {"train_also": ["norms", "embed", "head"]},
    "of embedding and head": {"targets": ["embed_tokens", "lm_head"]},
}


def qwen3(**more: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return causal_lm.build(type="qwen3", **SIZES, **more)


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(WORDS, (rows, 9), generator=torch.Generator().manual_seed(1))


def logits(layers: nn.Sequential) -> Tensor:
    with torch.no_grad(), evaluating(layers):
        found: Tensor = layers(tokens())
    return found


def trained_a_little(layers: nn.Sequential) -> nn.Sequential:
    draw = torch.Generator().manual_seed(2)
    for parameter in layers.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return layers


def words() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """48 samples, and 6 for testing."""
    draw = torch.Generator().manual_seed(8)
    rows = torch.randint(WORDS, (54, LENGTH + 1), generator=draw)
    pairs = [(row[:-1], row[1:]) for row in rows]
    return pairs[:48], pairs[48:]
