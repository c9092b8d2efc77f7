"""A Gemma split by hand, in float64: what rounds in it, and that it is not the split.

Gemma's RMSNorm, unlike Llama's, multiplies by its weight in float32 (`1.0 + weight.float()`), in a model of any type. So the
gradient of that weight, a sum over samples and tokens, is a sum of float32: it depends on how a batch is cut into
micro-batches, by about 1e-7 of its size, in transformers' own model as in any pipeline. All other gradients, whose sums are
float64, do not. Nothing of it is hetpipe's; a norm that keeps the type of its input takes the difference away.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRMSNorm

from hetpipe.layers.device import one_thread
from hetpipe.layers.model import Loss, cross_entropy, split_rows
from tests.support.zoo import LENGTH, SAMPLES, WORDS

SIZES = (3, 1, 2)
LOSS = Loss(function=cross_entropy, weight="tokens")


class Block(nn.Module):
    """A decoder layer that makes its own mask and angles, [b, t, w] to the same."""

    def __init__(self, model: GemmaForCausalLM, layer: GemmaDecoderLayer) -> None:
        super().__init__()
        self.layer, self.rotary, self.config = layer, model.model.rotary_emb, model.config

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None)
        found: Tensor = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return found


def gemma() -> tuple[GemmaForCausalLM, nn.Sequential]:
    """transformers' model in float64, and a chain of its own modules."""
    torch.manual_seed(3)
    config = GemmaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=WORDS,
        max_position_embeddings=32,
        use_cache=False,
    )
    model = GemmaForCausalLM(config).double()
    blocks = [Block(model, layer) for layer in model.model.layers]
    return model, nn.Sequential(model.model.embed_tokens, *blocks, model.model.norm, model.lm_head)


def gradients(model: GemmaForCausalLM, forward: nn.Module, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Of the mean loss of one batch, cut into these micro-batches, by name in transformers' model."""
    draw = torch.Generator().manual_seed(7)
    words, labels = (torch.randint(2, WORDS, (SAMPLES, LENGTH), generator=draw) for _ in range(2))
    model.zero_grad()
    for inputs, targets in zip(split_rows(words, sizes), split_rows(labels, sizes), strict=True):
        output = forward(inputs)
        LOSS.share(getattr(output, "logits", output), targets, labels.numel()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, float]:
    """The largest difference, in parts of the gradient's largest number: among the norms' weights, and among all others."""
    assert a.keys() == b.keys()
    found = {name: float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a}
    return max(d for n, d in found.items() if "norm" in n), max(d for n, d in found.items() if "norm" not in n)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(torch.device("cpu")):
        yield


def test_only_the_norms_weights_round_and_as_transformers_does() -> None:
    model, chain = gemma()
    whole, parts = (gradients(model, model, sizes) for sizes in ((SAMPLES,), SIZES))
    split = gradients(model, chain, SIZES)
    assert all(torch.equal(split[name], parts[name]) for name in parts)  # hetpipe's part: nothing
    norms, others = apart(split, whole)
    assert others < 1e-13
    assert 1e-10 < norms < 1e-6


def test_a_norm_in_the_type_of_its_input_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: GemmaRMSNorm, x: Tensor) -> Tensor:
        found: Tensor = self._norm(x) * (1.0 + self.weight)
        return found

    monkeypatch.setattr(GemmaRMSNorm, "forward", forward)
    model, chain = gemma()
    assert max(apart(gradients(model, chain, SIZES), gradients(model, model, (SAMPLES,)))) < 1e-13
