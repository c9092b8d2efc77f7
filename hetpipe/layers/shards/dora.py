"""DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", section 4) beside a linear layer that is split:
y = m / |W + sBA| · (W + sBA)x + b, in which | | are the lengths of rows, through which no gradient goes (section 4.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.layers.adapters.names import ADAPTER
from hetpipe.layers.shards.linears import GatheredLinear, HeadLinear, RowLinear, TakingLinear, group_of


class SplitDora(nn.Module):
    """Takes the place of peft's DoraLinearLayer, whose `weight` are the lengths m that train: of all outputs that the layer
    beside it makes, which may be some of the whole layer's."""

    weight: nn.Parameter  # [outputs]

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: nn.Linear,
        base_result: Tensor | None = None,
        adapter_name: str = ADAPTER,
    ) -> Tensor:
        """What is added to what the base made (`base_result`; None where its input was another, before dropout)."""
        made = base_layer(x) if base_result is None else base_result
        share = self.weight / row_lengths(base_layer, lora_A.weight, lora_B.weight, scaling, x.dtype)  # [outputs]
        bias: Tensor | None = base_layer.bias
        if isinstance(base_layer, HeadLinear):
            share, bias = base_layer.own(share), None if bias is None else base_layer.own(bias)
        elif isinstance(base_layer, GatheredLinear) and bias is not None:
            bias = group_of(base_layer).joined(bias)
        if bias is not None:
            made = made - bias
        result: Tensor = (share - 1) * made + share * lora_B(lora_A(x)) * scaling
        return result


@torch.no_grad()
def row_lengths(base: nn.Linear, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """The lengths of the rows of W + sBA of the outputs that the layer makes, [outputs], where W, a shard, has pieces of them, or
    of some. Collective over its group, if it takes some of the inputs or gathers outputs."""
    group = group_of(base)
    if isinstance(base, GatheredLinear):  # beside it the adapter is whole
        b = b.chunk(group.degree, 0)[group.number]
    if isinstance(base, TakingLinear):
        a = a.chunk(group.degree, 1)[group.number]
    rows: Tensor = base.weight.to(dtype) + scaling * (b @ a).to(dtype)
    lengths: Any = torch.linalg.vector_norm(rows if rows.element_size() > 2 else rows.float(), dim=1)
    if isinstance(base, RowLinear):
        lengths = group.add_up(lengths.square()).sqrt()
    if isinstance(base, GatheredLinear):
        lengths = torch.cat(group.gather(lengths))
    found: Tensor = lengths.to(dtype)
    return found
