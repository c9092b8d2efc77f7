"""What does it take to try layers before they train? See README.md beside this file.

python -m bench.trials.run [--steps N]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, NamedTuple

import torch
import typer
from torch import nn

from bench.tables import markdown
from hetpipe.layers.model import Tensors, as_tuple, named_layers
from hetpipe.layers.trials.layer_check import try_layers
from hetpipe.layers.trials.rows import cut_to_try
from hetpipe.layers.weights import materialise
from hetpipe.models import bert, gpt, gpt2, llama, resnet

BATCH, WORDS, REPEATS = 16, 128, 5


class Case(NamedTuple):
    """A model, and how its inputs are drawn."""

    name: str
    build: Callable[[], nn.Sequential]
    draw: Callable[[], Tensors]


def words(most: int = 1000) -> Tensors:
    """A batch of words."""
    return torch.randint(3, most, (BATCH, WORDS))


CASES = [
    Case("GPT, 12 blocks of width 384", lambda: gpt.build(layers=12, width=384, context=WORDS), lambda: words(90)),
    Case("GPT-2, 12 blocks of width 384", lambda: gpt2.build(n_layer=12, n_embd=384, n_head=6, vocab_size=1000), words),
    Case(
        "Llama, 12 blocks of width 384",
        lambda: llama.build(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=6,
            vocab_size=1000,
        ),
        words,
    ),
    Case(
        "BERT, 12 blocks of width 384",
        lambda: bert.build(hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, vocab_size=1000),
        words,
    ),
    Case("ResNet-18, 32 × 32 pixels", resnet.build, lambda: torch.randn(BATCH, 3, 32, 32)),
]


def step(net: nn.Sequential, inputs: Tensors) -> float:
    """Seconds of a forward and a backward of all layers."""
    began = time.perf_counter()
    sum(t.double().sum() for t in as_tuple(net(inputs)) if t.is_floating_point()).backward()  # type: ignore[union-attr]
    return time.perf_counter() - began


def trial(net: nn.Sequential, inputs: Tensors) -> float:
    """Seconds of a trial of all layers."""
    began = time.perf_counter()
    found = try_layers(named_layers(net), cut_to_try(inputs))
    seconds = time.perf_counter() - began
    assert (found.fault, found.untried) == (None, None), found
    return seconds


def main(steps: Annotated[int, typer.Option(help="Of the run whose share of trials is told.")] = 1000) -> None:
    """Print the table of README.md."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        net, inputs = case.build().train(), case.draw()
        materialise(net)
        step(net, inputs)
        pairs = [(step(net, inputs), trial(net, inputs)) for _ in range(REPEATS)]  # in turns, since machines are shared
        ratios = sorted(t / s for s, t in pairs)
        share = steps.bit_length() * median(ratios) / steps  # in steps 1, 2, 4, 8, …
        rows.append(
            [
                case.name,
                str(len(net)),
                f"{sum(p.numel() for p in net.parameters()) / 1e6:.1f}",
                f"{median(s for s, _ in pairs):.2f}",
                f"{median(t for _, t in pairs):.2f}",
                f"{median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                f"{share:.1%}",
            ]
        )
    print(
        markdown(
            [
                "model",
                "layers",
                "million parameters",
                f"forward and backward of {BATCH} samples, s",
                "trial, s",
                "ratio",
                "spread",
                f"share of {steps} steps",
            ],
            rows,
            words=1,
        )
    )


if __name__ == "__main__":
    typer.run(main)
