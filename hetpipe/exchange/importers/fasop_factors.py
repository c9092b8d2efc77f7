"""How FASOP's estimator (`get_cost_e` in FASOP/estimate.py, github.com/AvatarHwang/FASOP) lets a layer's time grow with the
micro-batch: for each of its models, on an A100 and on any other device, a factor of each kind of layer at some sizes. Sizes
beyond the last take proportionally longer; a product is written as FASOP has it. `bert`'s blocks on an A100 have 1.236 at 8 and
1.235 in the products after it, as there. FASOP has factors of its own for T5's second embedding that its code never reaches; it
counts with those of the first."""

from __future__ import annotations

from typing import Literal

LayerKind = Literal["embedding", "block", "encoder", "decoder", "head"]
Points = dict[int, float]  # micro-batch size → times the seconds of one sample

SIZES = (1, 2, 4, 8, 16, 32)
PROPORTIONAL: Points = {1: 1.0}
CONSTANT: Points = dict.fromkeys(SIZES, 1.0)

A100: dict[str, dict[LayerKind, Points]] = {
    "gpt2XL": {"embedding": CONSTANT, "block": PROPORTIONAL, "head": CONSTANT},
    "bert": {
        "embedding": {1: 1.0, 8: 1.385, 16: 1.385 * 1.589, 32: 1.385 * 1.589 * 1.565},
        "block": {1: 1.0, 8: 1.236, 16: 1.235 * 1.658},
        "head": PROPORTIONAL,
    },
    "T5": {
        "embedding": {
            1: 1.0,
            2: 1.386,
            4: 1.386 * 1.244,
            8: 1.386 * 1.244 * 1.356,
            16: 1.386 * 1.244 * 1.356 * 1.055,
            32: 1.386 * 1.244 * 1.356 * 1.055 * 1.368,
        },
        "encoder": {1: 1.0, 4: 1.173, 8: 1.173 * 1.489},
        "decoder": {1: 1.0, 4: 1.142, 8: 1.142 * 1.683},
    },
}
OTHER: dict[str, dict[LayerKind, Points]] = {
    "gpt2XL": {"embedding": PROPORTIONAL, "block": PROPORTIONAL, "head": PROPORTIONAL},
    "bert": {"embedding": {1: 1.0, 4: 1.0}, "block": {1: 1.0, 8: 2.0}, "head": PROPORTIONAL},
    "T5": {
        "embedding": {1: 1.0, 2: 1.2, 4: 1.2 * 1.2, 8: 1.2 * 1.2 * 1.4, 16: 1.2 * 1.2 * 1.4 * 1.6},
        "encoder": {1: 1.0, 2: 1.140},
        "decoder": {1: 1.0, 2: 1.094},
    },
}


def layer_kinds(model: str, count: int) -> list[LayerKind]:
    """The kinds of a model's layers in FASOP's order (`get_layer_type`): T5 is two halves, each with an embedding."""
    if model == "T5":
        half = count // 2 - 1
        return ["embedding", *["encoder"] * half, "embedding", *["decoder"] * (count - 2 - half)]  # type: ignore[list-item]
    return ["embedding", *["block"] * (count - 2), "head"]  # type: ignore[list-item]


def factor(model: str, device_type: str, kind: LayerKind, size: int) -> float:
    """Seconds of a layer for `size` samples over those for one. Models that FASOP does not know grow in proportion."""
    points = (A100 if device_type == "A100" else OTHER).get(model, {}).get(kind, PROPORTIONAL)
    below = max(known for known in points if known <= size)
    return points[below] * (size / below if below == max(points) else 1.0)
