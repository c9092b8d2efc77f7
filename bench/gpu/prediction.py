"""Part 6: a step of the one-stage plan as it is predicted from the profile, and as it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import hetpipe
from bench.gpu.engines import cluster_of, free, opened, step_seconds, world
from bench.gpu.layer_bytes import profile_of
from bench.gpu.page import Row, Rows, Say
from bench.gpu.subject import Subject
from hetpipe.documents.number_types import AS_BUILT, NumberTypes, Precision
from hetpipe.documents.profile import Profile


def prediction(subject: Subject, say: Say) -> Rows:
    """Seconds of a step with its optimizer, and peak bytes; the error is relative to what is measured."""
    profile = profile_of(subject, say)
    say("measured steps")
    spread: Row = {"what": "spread of the layers' times", "relative_spread": profile.provenance.get("relative_spread")}
    return [*beside(subject, profile), spread]


def beside(
    subject: Subject, profile: Profile, precision: Mapping[str, Precision] | None = None, types: NumberTypes = AS_BUILT
) -> Rows:
    """What is predicted of a step and of its memory from a profile of one device type, and what is measured of the engine."""
    device, plan = subject.device, subject.plan().model_copy(update={"precision": precision})
    on_card = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_card else 0
    predicted = hetpipe.simulate(plan, profile, cluster_of(profile.measurements[0].device_type, memory))
    world(subject.device_type)
    free(device)
    before, peak = torch.cuda.memory_allocated(device) if on_card else 0, None
    with opened(subject, types=types) as engine:
        seconds = step_seconds(subject, engine.step, engine.stage)
        if on_card:
            peak = torch.cuda.max_memory_allocated(device) - before
    return [
        {
            "what": "a step",
            "predicted_seconds": predicted.step_seconds,
            "measured_seconds": seconds,
            "error": predicted.step_seconds / seconds - 1,
        },
        _memory(predicted.peak_bytes["n0/0"], peak),
    ]


def _memory(predicted: int, peak: int | None) -> Row:
    row: Row = {"what": "peak bytes", "predicted_bytes": predicted}
    return row | {"measured_bytes": peak, "error": predicted / peak - 1} if peak else row
