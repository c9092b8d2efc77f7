"""Mixed clusters drawn at random from the devices that Zorse's and Cephalo's authors measured."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from bench.partitioners.clusters import BETWEEN, Case
from bench.partitioners.zorse_profiles import PREFIX
from hetpipe.documents.number_types import Precision

NVLINK = {"a100x40": "nvlink3", "a100x80": "nvlink3", "h100-nvl": "nvlink3", "v100x16": "nvlink2", "v100x32": "nvlink2"}
DTYPES: dict[str, Precision] = {"float32": "fp32", "float16": "fp16"}


def fields(folder: Path) -> dict[str, list[str]]:
    """`zorse:MODEL:PRECISION:TOKENS` → the devices it was measured on, of models whose sizes are known, where there are two or
    more."""
    cells = json.loads((folder / "model_latencies.json").read_text())
    stats = json.loads((folder / "model_stats.json").read_text())
    found = {
        f"{PREFIX}{model}:{precision}:{tokens}": sorted(gpu for gpu in gpus if dtype in gpus[gpu].get(tokens, {}))
        for model, gpus in cells.items()
        if model in stats or f"deepspeed{model}" in stats
        for tokens in sorted({tokens for lengths in gpus.values() for tokens in lengths}, key=int)
        for dtype, precision in DTYPES.items()
    }
    return {name: gpus for name, gpus in found.items() if len(gpus) > 1}


def drawn(seed: int, folder: Path) -> Iterator[Case]:
    """Clusters without end: of each in turn one device type (all that were measured beside another, in an order drawn once), a
    model measured on it, one or two other types, nodes of one to four devices of a type, at most eight in all (or, half of the
    time where two are enough, one box of two types), the wire between nodes, and the batch."""
    dice, known = random.Random(seed), fields(folder)
    labels = sorted({gpu for gpus in known.values() for gpu in gpus})
    dice.shuffle(labels)
    turn = 0
    while True:
        first = labels[turn % len(labels)]
        turn += 1
        model = dice.choice(sorted(name for name, gpus in known.items() if first in gpus))
        others = [gpu for gpu in known[model] if gpu != first]
        types = [first, *dice.sample(others, min(len(others), dice.choice([1, 1, 2])))]
        counts = [dice.randint(1, 4) for _ in types]
        while sum(counts) > 8:
            counts[counts.index(max(counts))] -= 1
        gbit, batch = dice.choice(sorted(BETWEEN)), dice.choice([32, 48, 64, 96, 100, 128])
        if len(types) == 2 and sum(counts) <= 4 and dice.random() < 0.5:
            nodes = [(dict(zip(types, counts, strict=True)), "pcie3")]
        else:
            nodes = [({kind: count}, NVLINK.get(kind, "pcie3")) for kind, count in zip(types, counts, strict=True)]
        parts = [" + ".join(f"{count}×{kind}" for kind, count in devices.items()) for devices, _ in nodes]
        wire = f", {gbit} Gbit" if len(nodes) > 1 else ""
        yield Case(" | ".join(parts) + wire, model, batch, nodes, gbit)
