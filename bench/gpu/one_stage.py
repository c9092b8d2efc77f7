"""Part 4: the back end torch with one stage, in a world of one, also under autocast."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.gpu.engines import (
    TOLERANCE,
    PlainLoop,
    free,
    gradients,
    largest,
    largest_difference,
    opened,
    reference,
    relative_difference,
    step_seconds,
    synchronize,
    world,
)
from bench.gpu.page import Row, Rows, Say
from bench.gpu.subject import Subject
from hetpipe.layers.model import as_tuple, move
from hetpipe.layers.untouched.boundaries import trace_boundaries

LOSSES, ROUNDED_LOSS, ROUNDED_GRADIENTS = 1e-3, 1e-2, 5e-2  # relative: bfloat16 has 8 bits
SUMMED = 2**20


def one_stage(subject: Subject, say: Say) -> Rows:
    """A sum over the process group, gradients in float64, and the seconds of a step in float32 beside a plain loop's."""
    say("a sum over the process group")
    rows = [_sum(subject)]
    say("gradients in float64")
    loss, truth = reference(subject)
    with opened(subject, dtype=torch.float64) as engine:
        found_loss = engine.step(*subject.batch())
        difference = largest_difference(gradients(engine.stage), truth)
    rows.append(
        {
            "what": "gradients in float64",
            "largest_gradient": largest(truth),
            "largest_difference": difference,
            "loss_difference": abs(found_loss - loss),
            "allowed": TOLERANCE,
            "ok": difference <= TOLERANCE and abs(found_loss - loss) <= TOLERANCE,
        }
    )
    del truth
    free(subject.device)
    say("steps in float32")
    with opened(subject) as engine:
        seconds = step_seconds(subject, engine.step, engine.stage)
    loop = PlainLoop(subject)
    alone = step_seconds(subject, loop.step, loop.layers)
    rows.append({"what": "a step in float32", "step_seconds": seconds, "plain_loop_seconds": alone, "ratio": seconds / alone})
    return rows


def _sum(subject: Subject) -> Row:
    """Whether NCCL (gloo on a CPU) sums in a world of one, and how long its second sum takes."""
    world(subject.device_type)
    numbers = torch.arange(SUMMED, dtype=torch.float32, device=subject.device)
    dist.all_reduce(numbers)
    synchronize(subject.device)
    began = time.perf_counter()
    dist.all_reduce(numbers)
    synchronize(subject.device)
    seconds = time.perf_counter() - began
    right = torch.equal(numbers.cpu(), torch.arange(SUMMED, dtype=torch.float32))
    name = "NCCL" if subject.device_type == "cuda" else "gloo"
    return {"what": f"a sum over {name} of 4 MiB in a world of one", "call_seconds": seconds, "ok": right}


def autocast(subject: Subject, say: Say) -> Rows:
    """Loss and gradients under autocast in bfloat16 beside a plain loop's, the types at the boundaries, and the seconds of a
    step."""
    world(subject.device_type)
    batch, loop, bfloat16 = subject.batch(), PlainLoop(subject), torch.bfloat16

    def plain(inputs: Tensor, targets: Tensor) -> float:
        with torch.autocast(subject.device.type, bfloat16):
            return loop.step(inputs, targets)

    say("a step in float32 and one in bfloat16")
    exact, rounded = loop.step(*batch), plain(*batch)
    truth = gradients(loop.layers)
    with opened(subject) as engine:

        def step(inputs: Tensor, targets: Tensor) -> float:
            with torch.autocast(subject.device.type, bfloat16):
                return engine.step(inputs, targets)

        loss = step(*batch)
        apart = relative_difference(gradients(engine.stage), truth)
        say("the types at the boundaries")
        types = _boundaries(subject, engine.stage)
        say("steps in bfloat16")
        seconds = step_seconds(subject, step, engine.stage)
    alone = step_seconds(subject, plain, loop.layers)
    return [
        _beside("loss, beside a plain loop's under autocast", loss, rounded, LOSSES),
        _beside("loss, beside a plain loop's in float32", loss, exact, ROUNDED_LOSS),
        {
            "what": "gradients, beside a plain loop's under autocast",
            "relative_difference": apart,
            "allowed": ROUNDED_GRADIENTS,
            "ok": apart <= ROUNDED_GRADIENTS,
        },
        types,
        {"what": "a step", "step_seconds": seconds, "plain_loop_seconds": alone, "ratio": seconds / alone},
    ]


def _beside(what: str, loss: float, other: float, allowed: float) -> Row:
    apart = abs(loss - other) / abs(other)
    return {"what": what, "loss": loss, "beside": other, "relative_difference": apart, "allowed": allowed, "ok": apart <= allowed}


def _boundaries(subject: Subject, layers: nn.Sequential) -> Row:
    """The types for which a pipeline would make room, by tracing, beside those that the layers give."""
    inputs, found = subject.batch(subject.microbatch)[0], list[tuple[torch.dtype, ...]]()
    with torch.autocast(subject.device.type, torch.bfloat16):
        traced = [tuple(s.dtype for s in row) for row in trace_boundaries(layers, inputs, subject.device)[1:]]
        with torch.no_grad():
            tensors = move(inputs, subject.device)
            for layer in layers:
                tensors = layer(tensors)
                found.append(tuple(t.dtype for t in as_tuple(tensors)))
    text = _counted(found) if found == traced else f"{_counted(found)}; traced: {_counted(traced)}"
    return {"what": "what leaves the layers, traced and found", "types": text, "ok": found == traced}


def _counted(types: Sequence[tuple[torch.dtype, ...]]) -> str:
    """`9 of float32, 1 of bfloat16`."""
    counts = Counter(str(dtype).removeprefix("torch.") for row in types for dtype in row)
    return ", ".join(f"{count} of {name}" for name, count in counts.items())
