"""GPT-2 as a chain of layers, over bytes unless told otherwise.

Architecture and sizes: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section
2.3 and table 2: pre-normalisation, a last normalisation before the head, learned positions, GELU (tanh
approximation); head and embedding share one weight. The published code has 20 and 25 heads for the two large
sizes. Every transformer block is two layers (attention, MLP), so that cuts are fine.
Shapes: b samples, t tokens, w width, h heads, d = w / h, v vocabulary.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.models._parts import require_choice, require_dropout, require_positive


@dataclass(frozen=True, kw_only=True)
class Size:
    """A preset: blocks, features, attention heads, and the longest sequence in tokens."""

    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": Size(layers=4, width=128, heads=4, context=128),
    "small": Size(layers=8, width=256, heads=8, context=256),
    "gpt2": Size(layers=12, width=768, heads=12, context=1024),
    "gpt2-medium": Size(layers=24, width=1024, heads=16, context=1024),
    "gpt2-large": Size(layers=36, width=1280, heads=20, context=1024),
    "gpt2-xl": Size(layers=48, width=1600, heads=25, context=1024),
}


class Embedding(nn.Module):
    """Token plus position embedding: int64 [b, t] to [b, t, w]."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise ValueError(
                f"gpt: a sample has {length} tokens, the model's context is {context}: "
                f"shorten the samples or build the model with context={length}"
            )
        positions = torch.arange(length, device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """x + project(causal attention(norm(x))): [b, t, w] to [b, t, w]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.tensor_parallel = {"query_key_value": f"colwise:3/{heads}", "project": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        projected = self.query_key_value(self.norm(x)).view(b, t, 3, -1, w // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each [b, h, t, d]
        dropped = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        return x + self.dropout(self.project(mixed))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """x + project(gelu(expand(norm(x)))): [b, t, w] to [b, t, w], through 4 w features."""

    tensor_parallel: ClassVar = {"expand": "colwise", "project": "rowwise"}

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.expand(self.norm(x)), approximate="tanh")  # [b, t, 4w]
        return x + self.dropout(self.project(hidden))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Last normalisation and projection to logits: [b, t, w] to [b, t, v]."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))  # type: ignore[no-any-return]


def initialise(model: nn.Sequential, layers: int) -> None:
    """GPT-2's initialisation (section 2.3 of the paper; the deviations are those of its published code).

    Weights have standard deviation 0.02, positions 0.01, biases zero; projections onto the residual stream
    are scaled by 1 / sqrt(N) for its N = 2 * layers additions.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            into_residual = isinstance(model.get_submodule(name.rpartition(".")[0]), Attention | MLP)
            residual_scale = 1 / math.sqrt(2 * layers) if into_residual and name.endswith("project") else 1.0
            nn.init.normal_(module.weight, std=0.02 * residual_scale)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.01 if name.endswith("position") else 0.02)


def build(
    size: str = "tiny",
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    context: int | None = None,
    vocabulary: int = 256,
    dropout: float = 0.0,
    tied: bool = True,
) -> nn.Sequential:
    """A GPT-2 of `size`, each given argument in the preset's place: int64 [b, t] to logits [b, t, v].

    Args:
        size: one of SIZES.
        layers: transformer blocks; the model has 2 * layers + 2 children.
        width: features of the residual stream.
        heads: attention heads; they divide the width.
        context: the most tokens of a sample.
        vocabulary: distinct tokens; 256 are the bytes.
        dropout: probability, at the embedding, in attention and at each addition to the residual stream.
        tied: the head's weight is the embedding's: one Parameter in the first and the last child.
    """
    require_choice("gpt", "size", size, tuple(SIZES))
    preset = SIZES[size]
    layers = preset.layers if layers is None else layers
    width = preset.width if width is None else width
    heads = preset.heads if heads is None else heads
    context = preset.context if context is None else context
    require_positive("gpt", dict(layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary))
    require_dropout("gpt", dropout)
    if width % heads:
        raise ValueError(f"gpt: width {width} is not divisible by heads {heads}")

    embed, head = Embedding(vocabulary, context, width, dropout), Head(width, vocabulary)
    children: OrderedDict[str, nn.Module] = OrderedDict(embed=embed)
    for block in range(layers):
        children[f"block{block}_attention"] = Attention(width, heads, dropout)
        children[f"block{block}_mlp"] = MLP(width, dropout)
    children["head"] = head
    if tied:
        head.project.weight = embed.token.weight
    model = nn.Sequential(children)
    initialise(model, layers)
    return model
