"""Part 3: the back ends fairscale and torchgpipe, with two stages on the one device."""

from __future__ import annotations

import torch

from bench.gpu.engines import (
    TOLERANCE,
    PlainLoop,
    free,
    gradients,
    largest,
    largest_difference,
    opened,
    reference,
    step_seconds,
    world,
)
from bench.gpu.page import Rows, Say
from bench.gpu.subject import Subject
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.runtime.backends import load_library

STAGES = 2


def one_process(backend: Backend, subject: Subject, say: Say) -> Rows:
    """Gradients beside one device's in float64, and the seconds of a step in float32 beside a plain loop's."""
    try:
        load_library(backend)
    except InputError as error:
        return [{"what": "skipped", "note": str(error)}]
    world(subject.device_type)
    say("gradients in float64")
    loss, truth = reference(subject)
    with opened(subject, stages=STAGES, backend=backend, dtype=torch.float64) as engine:
        found_loss = engine.step(*subject.batch())
        found = gradients(engine.stage)
    difference = largest_difference(found, truth)
    compared = {
        "what": "gradients in float64",
        "largest_gradient": largest(truth),
        "largest_difference": difference,
        "loss_difference": abs(found_loss - loss),
        "allowed": TOLERANCE,
        "ok": difference <= TOLERANCE and abs(found_loss - loss) <= TOLERANCE,
    }
    del found, truth
    free(subject.device)
    say("steps in float32")
    with opened(subject, stages=STAGES, backend=backend) as engine:
        seconds = step_seconds(subject, engine.step, engine.stage)
    loop = PlainLoop(subject)
    alone = step_seconds(subject, loop.step, loop.layers)
    return [
        compared,
        {"what": "a step in float32", "step_seconds": seconds, "plain_loop_seconds": alone, "ratio": seconds / alone},
    ]
