"""python -m bench.stage_memory.run [--size gpt2-xl] [--cuts 8,18,16,8] [--weights FOLDER]

One rank for each stage builds the whole model on the meta device and gives its own layers their values, drawn or read from a
folder of `save_pretrained`. Printed: the peak resident memory of each rank, beside the bytes of its own parameters.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.weights import materialise
from hetpipe.processes.ranks.launch import start_ranks
from hetpipe.spec.cluster import Cluster


def resident_bytes(key: str) -> int:
    """Resident memory of this process: `VmRSS`, the present one, or `VmHWM`, its peak."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))


def fill_stage(layers: nn.Sequential, lo: int, hi: int) -> dict[str, int]:
    """Give layers [lo, hi) their values: the bytes of their parameters and buffers (a shared one once), of the whole model, the
    resident memory before, and its peak."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
        peak.write("5")  # the peak counts from here
    before = resident_bytes("VmRSS")
    materialise(layers, lo, hi)

    def size(part: nn.Module) -> int:
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors_of(part).values()}.values())

    return {"own": size(layers[lo:hi]), "whole": size(layers), "before": before, "peak": resident_bytes("VmHWM")}


def rank_program(model: dict[str, Any], cuts: list[int]) -> dict[str, int]:
    """What one rank does."""
    import os

    from hetpipe.models import gpt2

    torch.manual_seed(0)
    lo, hi = list(itertools.pairwise([0, *itertools.accumulate(cuts)]))[int(os.environ["RANK"])]
    return fill_stage(gpt2.build(**model), lo, hi)


def measure(model: dict[str, Any], cuts: list[int]) -> list[dict[str, int]]:
    """One rank for each stage, all at the same time."""
    cluster = Cluster.parse(
        {
            "format": "hetpipe.cluster/1",
            "device_types": {"cpu": {"memory": 0}},
            "nodes": [{"name": "n0", "devices": {"cpu": len(cuts)}}],
        },
        "this machine",
    )
    found: list[dict[str, int]] = start_ranks(rank_program, (model, cuts), cluster.devices, ["hetpipe.models.gpt2"])
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    options.add_argument("--size", default="gpt2-xl")
    options.add_argument("--cuts", default="8,18,16,8", help="layers of each stage")
    options.add_argument("--weights", help="a folder of save_pretrained, in the place of --size")
    given = options.parse_args()
    cuts = [int(count) for count in given.cuts.split(",")]
    rows = measure({"weights": given.weights} if given.weights else {"size": given.size}, cuts)
    table = Table(box=box.SIMPLE)
    for name in ("rank", "layers", "own parameters", "resident before", "peak resident", "growth", "growth / own"):
        table.add_column(name, justify="right")
    for rank, (count, row) in enumerate(zip(cuts, rows, strict=True)):
        growth = row["peak"] - row["before"]
        cells = [f"{row[key] / 2**20:,.0f} MiB" for key in ("own", "before", "peak")]
        table.add_row(str(rank), str(count), *cells, f"{growth / 2**20:,.0f} MiB", f"{growth / row['own']:.3f}")
    Console().print(table)
    whole = rows[0]["whole"] / 2**20
    print(f"the whole model has {whole:,.0f} MiB; the largest peak is {max(r['peak'] for r in rows) / 2**20 / whole:.0%} of it")


if __name__ == "__main__":
    main()
