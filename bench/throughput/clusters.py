"""The mixed clusters and the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hetpipe.building.datasets import DataSplits, Vectors

# Milliseconds of a layer of bert-large (512 tokens, float32, one sample more) forward, as Zorse's authors measured it on each
# card (model_latencies.json of github.com/benson-guo/zorse; Guo et al. 2025, arXiv 2507.10392), and GiB.
CARDS = {
    "l40s": (0.68, 48),
    "a6000": (1.00, 48),
    "a10g": (1.15, 24),
    "v100": (1.19, 32),
    "l4": (1.92, 24),
    "p100": (2.76, 16),
    "p40": (3.28, 24),
    "t4": (3.70, 16),
}
TIMES = {card: milliseconds for card, (milliseconds, _) in CARDS.items()}
PROCESSORS = 0.8  # of two, that the devices of a cluster use together: more, and those that compute at once slow each other
AMPLE = 2 * 2**30


class Mix(NamedTuple):
    """A cluster: its nodes as {card: how many}. `tight`: the whole model does not fit the smallest card, as it would not if the
    model were as large as people want it. `only`: the models that are trained there; without any, all."""

    name: str
    nodes: Sequence[dict[str, int]]
    tight: bool = False
    only: tuple[str, ...] = ()

    @property
    def cards(self) -> list[str]:
        return [card for node in self.nodes for card, count in node.items() for _ in range(count)]


MIXES = (
    Mix("A6000 + L4", ({"a6000": 1, "l4": 1},)),
    Mix("L4 + 2×T4", ({"l4": 1, "t4": 2},)),
    Mix("L40S + 2×P40", ({"l40s": 1, "p40": 2},)),
    Mix("A6000 + 2×L4 + P40", ({"a6000": 1, "l4": 2, "p40": 1},)),
    Mix("2×V100 | 2×T4", ({"v100": 2}, {"t4": 2})),
    Mix("L40S | 4×T4", ({"l40s": 1}, {"t4": 4})),
    Mix("2×A10G | 2×L4 | 2×P100", ({"a10g": 2}, {"l4": 2}, {"p100": 2})),
    Mix("2×L40S | 2×L4 | 4×T4", ({"l40s": 2}, {"l4": 2}, {"t4": 4})),
    Mix("L4 + 2×T4, small memory", ({"l4": 1, "t4": 2},), tight=True, only=("gpt", "bert")),
    Mix("2×V100 | 2×T4, small memory", ({"v100": 2}, {"t4": 2}), tight=True, only=("gpt", "bert")),
)
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"name": "gpt", "args": {"layers": 8, "width": 128, "heads": 4, "context": 64}},
        "data": {"name": "text", "args": {"context": 64, "limit_bytes": 400000}},
    },
    "vgg19": {
        "model": {"name": "vgg19", "args": {"image_size": 32, "classes": 10, "width_multiplier": 0.5}},
        "data": {"target": "bench.throughput.clusters:images", "args": {"samples": 512, "pixels": 32, "classes": 10}},
    },
    "bert": {
        "model": {
            "name": "bert",
            "args": {
                "hidden_size": 128,
                "num_hidden_layers": 8,
                "num_attention_heads": 4,
                "intermediate_size": 512,
                "vocab_size": 2000,
                "max_position_embeddings": 64,
                "num_labels": 8,
            },
        },
        "data": {"name": "source_packages", "args": {"length": 64, "vocabulary": 2000, "samples": 512}},
    },
    "t5": {
        "model": {
            "name": "t5",
            "args": {
                "d_model": 128,
                "d_ff": 512,
                "d_kv": 32,
                "num_layers": 4,
                "num_decoder_layers": 4,
                "num_heads": 4,
                "vocab_size": 1000,
            },
        },
        "data": {"name": "function_docs", "args": {"length": 32, "vocabulary": 1000}},
        "loss": {"name": "cross_entropy", "weight": "tokens"},
    },
}


def cluster_document(mix: Mix, memory: Mapping[str, int] | None = None, times: Mapping[str, float] = TIMES) -> dict[str, Any]:
    """The cluster of emulated devices. Their `times` are to each other as the cards' are, and such that together they use
    `PROCESSORS` of this machine. `memory`: bytes of each card; by default ample."""
    base = sum(1 / times[card] for card in mix.cards) / PROCESSORS
    types = {
        card: {"memory": (memory or {}).get(card, AMPLE), "emulate": {"slowdown": round(base * times[card], 3)}}
        for card in dict.fromkeys(mix.cards)
    }
    nodes = [{"name": f"n{i}", "devices": node} for i, node in enumerate(mix.nodes)]
    return {"format": "hetpipe.cluster/1", "device_types": types, "nodes": nodes}


def tight_memory(mix: Mix, whole_model_bytes: int) -> dict[str, int]:
    """Of each card: the smallest holds two thirds of the model with one sample, the others as much more as they really do."""
    least = min(CARDS[card][1] for card in mix.cards)
    return {card: round(whole_model_bytes * 2 / 3 * CARDS[card][1] / least) for card in mix.cards}


def images(samples: int, pixels: int, classes: int) -> DataSplits:
    """Random images: float32 [3, pixels, pixels], and a class each."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, pixels, pixels, generator=draw)
    return DataSplits(train=Vectors(inputs, torch.randint(classes, (samples,), generator=draw)), test=None)
