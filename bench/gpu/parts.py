"""The parts of the page, in their order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from bench.gpu.environment import environment
from bench.gpu.half import half
from bench.gpu.layer_bytes import layer_bytes
from bench.gpu.one_process import one_process
from bench.gpu.one_stage import autocast, one_stage
from bench.gpu.page import Rows
from bench.gpu.prediction import prediction
from bench.gpu.suite import suite
from bench.gpu.two_processes import two_processes


class Part(NamedTuple):
    """`call(subject, say)` returns its rows. `number` names it in `--only`, and `about` says on the page what the rows are."""

    number: str
    title: str
    about: str
    call: Callable[..., Rows]


_ONE_PROCESS = (
    "One process drives both stages, which lie on the one device. Gradients are compared with those of the whole batch at once; "
    "the plain loop runs the same micro-batches without an engine. A step is forward, backward and AdamW."
)

_HALF = (
    "A GPT of 12 layers and width 768 (on a CPU a little one) by a one-stage plan that says in what it computes, beside a plain "
    "loop of the same micro-batches under autocast, which in fp16 has a GradScaler; and what is predicted of it from a profile "
    "at that precision. A positive error is a prediction that is too high."
)

PARTS = (
    Part("1", "Environment", "What is here, and what the parts below run.", environment),
    Part(
        "2",
        "Layers: predicted and allocated bytes",
        "Times are medians of the profile, bytes those of a micro-batch. `parameter` and `saved` are predicted. The others are "
        "what torch's allocator says: what giving the layer its parameters took, what only the graph of a forward keeps, and the "
        "most that the forward, with a copy of the input, and the backward, with the gradients, took beside the parameters. On a "
        "CPU there is no allocator that could be asked, and these are left out.",
        layer_bytes,
    ),
    Part("3a", "fairscale, two stages on one device", _ONE_PROCESS, partial(one_process, "fairscale")),
    Part("3b", "torchgpipe, two stages on one device", _ONE_PROCESS, partial(one_process, "torchgpipe")),
    Part(
        "4a",
        "The back end torch, one stage",
        "Gradients are compared with those of the whole batch at once; the plain loop runs the same micro-batches without an "
        "engine. A step is forward, backward and AdamW.",
        one_stage,
    ),
    Part(
        "4b",
        "The back end torch under autocast",
        "Autocast in bfloat16 around the engine's step and around a plain loop of the same micro-batches.",
        autocast,
    ),
    Part("5", "Two stages in two processes", "What one card does not allow.", two_processes),
    Part(
        "6",
        "Predicted and measured",
        "The one-stage plan, simulated with the profile of part 2, and run. A positive error is a prediction that is too high. "
        "Measured bytes are the most that torch's allocator gave out, with the workspaces of libraries; a CPU has none.",
        prediction,
    ),
    Part("6b", "In bf16", _HALF, partial(half, "bf16")),
    Part("6c", "In fp16", _HALF, partial(half, "fp16")),
    Part("7", "The tests", "pytest over the whole test suite, with the card visible.", suite),
)
