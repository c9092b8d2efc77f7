"""Resident memory of this process while it gives layers their values."""

from __future__ import annotations

from torch import nn

from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.weights import materialise


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
