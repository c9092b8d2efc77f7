"""Profiles to plan with: synthetic ones, computed from published numbers, and those of Sailor's measurements where they
are present.

**Synthetic** times are not measured. Forward seconds of a layer for b samples on a device:

    launch + max(FLOPs · b / (EFFICIENCY · peak), moved bytes · b / bandwidth);        backward: launch + twice the rest;
    optimizer: 7 · parameter bytes / bandwidth (Adam reads four arrays and writes three).

`peak` is the maker's dense rate for half-precision matrix products that are summed in float32 (tensor cores where there are
some), as in automatic mixed precision: parameters, gradients and optimizer states of 4 bytes, activations of 2. `EFFICIENCY`
0.45 and `launch` 0.2 ms are round numbers. They scale all types alike, so that comparisons between plans depend on them
little; they decide how much a larger micro-batch gains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.partitioners.zorse_profiles import PREFIX, ZORSE, measured
from hetpipe.building.datasets import find_data
from hetpipe.documents.profile import Profile
from hetpipe.exchange.importers import ImportOptions
from hetpipe.exchange.importers.options import memory_bytes

SAILOR = find_data("sailor")
EFFICIENCY, LAUNCH_SECONDS = 0.45, 2e-4
SIZES = (1, 2, 4, 8)
SAMPLED = {
    "sailor:V100": "V100-16",
    "sailor:A100": "A100-40",
    "sailor:3090": "RTX-3090",
    "sailor:2080": "RTX-2080",
    "sailor:TitanRTX": "Titan-RTX",
}


class Spec(NamedTuple):
    """Published numbers of a device: half-precision FLOP/s, memory bytes/s, memory in GiB that a program gets."""

    peak: float
    bandwidth: float
    gib: float


# Makers' data sheets and architecture white papers. The 1080 Ti computes in float32, P100 in plain half precision.
SPECS = {
    "H100": Spec(989e12, 3350e9, 79),
    "A100": Spec(312e12, 1555e9, 39),
    "A10": Spec(125e12, 600e9, 22),
    "L4": Spec(121e12, 300e9, 22),
    "A6000": Spec(154.8e12, 768e9, 47),
    "4090": Spec(165.2e12, 1008e9, 23.5),
    "3090": Spec(71e12, 936e9, 23.5),
    "3060": Spec(25.5e12, 360e9, 11.7),
    "TitanRTX": Spec(130.5e12, 672e9, 23.5),
    "2080Ti": Spec(53.8e12, 616e9, 10.7),
    "2080": Spec(40.3e12, 448e9, 7.7),
    "1080Ti": Spec(11.3e12, 484e9, 10.9),
    "V100": Spec(125e12, 900e9, 15.7),
    "T4": Spec(65e12, 300e9, 14.7),
    "P100": Spec(21.2e12, 732e9, 15.8),
}


class Layer(NamedTuple):
    """A layer: parameters (4 bytes each), and for one sample forward FLOPs, output and saved values (2 bytes each)."""

    name: str
    parameters: float
    flops: float
    output: float
    saved: float


def transformer(blocks: int, width: int, context: int, vocabulary: int) -> list[Layer]:
    """Embedding, blocks, head. A block has 12·h² parameters, 24·t·h² + 4·t²·h FLOPs and about 17·t·h saved values
    (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4: 34·s·b·h bytes in
    half precision, without the attention matrix, which fused attention does not keep)."""
    t, h, v = float(context), float(width), float(vocabulary)
    block = [Layer(f"block.{i}", 12 * h * h, 24 * t * h * h + 4 * t * t * h, t * h, 17 * t * h) for i in range(blocks)]
    head = Layer("head", v * h, 2 * t * h * v, 1, 3 * t * v + t * h)
    return [Layer("embedding", v * h + t * h, 2 * t * h, t * h, t * h), *block, head]


def convolutions(side: int = 224) -> list[Layer]:
    """VGG-16 (Simonyan and Zisserman 2015, configuration D): early layers hold the activations and half of the work, the
    last ones nine tenths of the parameters."""
    layers, channels = [], 3
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for i in range(count):
            parameters, values = 9.0 * channels * width, float(side * side * width)
            last = i == count - 1
            layers.append(
                Layer(f"conv{stage}.{i}", parameters, 2 * parameters * side * side, values / (4 if last else 1), 2 * values)
            )
            channels = width
        side //= 2
    for i, (a, b) in enumerate(((512 * side * side, 4096), (4096, 4096), (4096, 1000))):
        layers.append(Layer(f"linear.{i}", float(a) * b, 2.0 * a * b, b, 2.0 * b))
    return layers


MODELS = {
    "vgg16": convolutions(),
    "bert-large": transformer(24, 1024, 512, 30522),
    "gpt2-medium": transformer(24, 1024, 1024, 50257),
    "gpt2-xl": transformer(48, 1600, 1024, 50257),
}


def profile(model: str, types: Sequence[str]) -> Profile | None:
    """A profile of these types; None if it is measured and the measurements are not there."""
    if model.startswith(PREFIX):
        return measured(model, types, ZORSE)
    if model.startswith("sailor:"):
        return _measured(model.removeprefix("sailor:"), types, SAILOR) if SAILOR is not None else None
    layers = MODELS[model]
    return _parse(
        model,
        [(x.name, 4 * x.parameters, 2 * x.output, 2 * x.saved) for x in layers],
        [_times(kind, SPECS[kind], layers) for kind in types],
    )


def memory_gib(kind: str) -> float:
    """Memory of a type, synthetic or Sailor's; of Zorse's what its name or data sheet says."""
    known = kind.removeprefix("sailor:")
    return SPECS[known].gib if known in SPECS else memory_bytes(kind, ImportOptions(model="")) / 2**30


def _parse(model: str, layers: Sequence[tuple[str, float, float, float]], measurements: list[dict[str, Any]]) -> Profile:
    keys = ("name", "parameter_bytes", "output_bytes_per_sample", "saved_bytes_per_sample")
    document = {
        "format": "hetpipe.profile/1",
        "model": model,
        "layers": [dict(zip(keys, (name, *map(round, sizes)), strict=True)) for name, *sizes in layers],
        "measurements": measurements,
        "optimizer": {"state_bytes_per_parameter_byte": 2.0},
    }
    return Profile.parse(document, f"the profile of {model}")


def _times(kind: str, spec: Spec, layers: Sequence[Layer]) -> dict[str, Any]:
    def work(layer: Layer, b: int) -> float:
        moved = 2 * b * (layer.output + layer.saved) + 4 * layer.parameters
        return max(layer.flops * b / (EFFICIENCY * spec.peak), moved / spec.bandwidth)

    return {
        "device_type": kind,
        "microbatch_sizes": SIZES,
        "forward_seconds": [[LAUNCH_SECONDS + work(layer, b) for layer in layers] for b in SIZES],
        "backward_seconds": [[LAUNCH_SECONDS + 2 * work(layer, b) for layer in layers] for b in SIZES],
        "optimizer_seconds": [7 * 4 * layer.parameters / spec.bandwidth for layer in layers],
    }


def _measured(model: str, types: Sequence[str], folder: Path) -> Profile:
    """Sailor's measured layer times without tensor parallelism (float32, Adam), at the micro-batch sizes that all types have."""
    sizes = json.loads((folder / "layer_sizes.json").read_text())[model]["1"]
    times = json.loads((folder / "layer_times.json").read_text())[model]
    names = sorted(sizes, key=int)
    of = {kind: {int(b): d["1"] for b, d in times[SAMPLED[kind]].items() if "1" in d} for kind in types}
    common = sorted(set.intersection(*(set(found) for found in of.values())))
    layers = [(f"layer.{n}", sizes[n]["params_bytes"], sizes[n]["act_output_bytes"], sizes[n]["act_mem_bytes"]) for n in names]
    measurements = [
        {
            "device_type": kind,
            "microbatch_sizes": common,
            "forward_seconds": [[of[kind][b][n][0] for n in names] for b in common],
            "backward_seconds": [[of[kind][b][n][1] for n in names] for b in common],
            "optimizer_seconds": [of[kind][common[0]][n][2] for n in names],
        }
        for kind in types
    ]
    return _parse(f"sailor:{model}", layers, measurements)
