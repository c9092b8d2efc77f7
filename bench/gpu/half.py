"""Part 6, in half precision: the one-stage plan that computes in bf16 or fp16 beside a plain loop under autocast, and as it is
predicted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.engines import PlainLoop, free, gradients, opened, relative_difference, step_seconds, world
from bench.gpu.one_stage import LOSSES, ROUNDED_GRADIENTS
from bench.gpu.page import Row, Rows, Say
from bench.gpu.prediction import beside
from bench.gpu.subject import Subject
from hetpipe.documents.number_types import NumberTypes, Precision
from hetpipe.measuring.precision.choice import able
from hetpipe.measuring.profiler import assemble, default_type_name, measure_device

ERRORS = {"a step": 0.08, "peak bytes": 0.05}  # of predictions, on a card
SCALE = 2.0**10  # of the loss in fp16: no step of these overflows
LITTLE = {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}  # on a CPU, where fp16 may be slow


def half(precision: Precision, subject: Subject, say: Say) -> Rows:
    """GPT of 12 layers and width 768 (on a CPU a little one): the first step beside a plain loop's under autocast, the seconds of
    both, and those and the peak bytes that are predicted from a profile at the precision."""
    subject = replace(subject, arguments={"size": "gpt2"} if subject.device_type == "cuda" else LITTLE)
    able_to = able(subject.device)
    if precision not in able_to.can:
        return [{"what": "skipped", "note": f"{able_to.what} cannot compute in {precision}: it has {', '.join(able_to.can)}"}]
    world(subject.device_type)
    return [*_beside_autocast(precision, subject, say), *_predicted(precision, subject, say)]


def _beside_autocast(precision: Precision, subject: Subject, say: Say) -> Rows:
    """The engine, of which a plan says what it computes in, and torch's autocast (in fp16 with a GradScaler) by hand."""
    types, batch = NumberTypes.at(precision), subject.batch()
    scaler = torch.amp.GradScaler(subject.device_type, SCALE) if types.loss_is_scaled else None
    loop = PlainLoop(subject, scaler=scaler)

    def plain(inputs: Tensor, targets: Tensor) -> float:
        with torch.autocast(subject.device_type, torch.bfloat16 if precision == "bf16" else torch.float16):
            return loop.step(inputs, targets)

    say(f"a step of a plain loop in {precision}, and one of the engine")
    loss, factor = plain(*batch), SCALE if scaler is not None else 1.0
    truth = {name: gradient / factor for name, gradient in gradients(loop.layers).items()}
    with opened(subject, types=types) as engine:
        engine.loss_scale.scale = SCALE
        apart = abs(engine.step(*batch) - loss) / abs(loss)
        off = relative_difference(gradients(engine.stage), truth)
        finite = engine.finite
        del truth
        free(subject.device)
        say(f"steps in {precision}")
        seconds = step_seconds(subject, engine.step, engine.stage)
    alone = step_seconds(subject, plain, loop.layers, loop.update)
    return [
        _compared("loss", apart, LOSSES, finite),
        _compared("gradients", off, ROUNDED_GRADIENTS, finite),
        {"what": f"a step in {precision}", "step_seconds": seconds, "plain_loop_seconds": alone, "ratio": seconds / alone},
    ]


def _compared(what: str, apart: float, allowed: float, finite: bool) -> Row:
    return {
        "what": f"{what}, beside a plain loop's under autocast",
        "relative_difference": apart,
        "allowed": allowed,
        "ok": finite and apart <= allowed,
    }


def _predicted(precision: Precision, subject: Subject, say: Say) -> Rows:
    name, sizes = default_type_name(subject.device), sorted({1, max(1, subject.microbatch // 2), subject.microbatch})
    found = measure_device(
        subject.model(),
        name,
        subject.device,
        sizes,
        torch.optim.AdamW,
        repeats=subject.repeats,
        advance=lambda text: say(f"measuring {text}"),
        precision=precision,
    )
    profile = assemble(subject.model(), [found.measurement], found.state_bytes_per_parameter_byte, device=subject.device)
    say("measured steps")
    rows = beside(subject, profile, {name: precision}, NumberTypes.at(precision))
    for row in rows if subject.device_type == "cuda" else ():  # seconds of a CPU are those of all that runs on it
        row |= {"allowed": ERRORS[row["what"]], "ok": abs(row["error"]) <= ERRORS[row["what"]]}
    return rows
