"""Part 6: a step of the one-stage plan as it is predicted from the profile, and as it is."""

from __future__ import annotations

import torch

import hetpipe
from bench.gpu.engines import cluster_of, free, opened, step_seconds, world
from bench.gpu.layer_bytes import profile_of
from bench.gpu.page import Row, Rows, Say
from bench.gpu.subject import Subject


def prediction(subject: Subject, say: Say) -> Rows:
    """Seconds of a step with its optimizer, and peak bytes; the error is relative to what is measured."""
    profile, device = profile_of(subject, say), subject.device
    on_card = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_card else 0
    predicted = hetpipe.simulate(subject.plan(), profile, cluster_of(profile.measurements[0].device_type, memory))
    say("measured steps")
    world(subject.device_type)
    free(device)
    before, peak = torch.cuda.memory_allocated(device) if on_card else 0, None
    with opened(subject) as engine:
        seconds = step_seconds(subject, engine.step, engine.stage)
        if on_card:
            peak = torch.cuda.max_memory_allocated(device) - before
    rows: Rows = [
        {"what": "a step", "predicted_seconds": predicted.step_seconds, "measured_seconds": seconds,
         "error": predicted.step_seconds / seconds - 1},
        _memory(predicted.peak_bytes["n0/0"], peak),
        {"what": "spread of the layers' times", "relative_spread": profile.provenance.get("relative_spread")},
    ]  # fmt: skip
    return rows


def _memory(predicted: int, peak: int | None) -> Row:
    row: Row = {"what": "peak bytes", "predicted_bytes": predicted}
    return row | {"measured_bytes": peak, "error": predicted / peak - 1} if peak else row
