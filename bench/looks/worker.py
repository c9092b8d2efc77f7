"""One process of this bench: it builds a chain of so many layers, trains it for some steps, and looks at its layers.

    python bench/looks/worker.py LAYERS plain|lora STAGES

It runs on earlier commits, too, so it uses what they have.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import hetpipe
from hetpipe.hf.replay.build import build
from hetpipe.layers.model import Loss, Model, named_layers, row_shapes
from hetpipe.layers.trials.layer_check import try_layers
from hetpipe.layers.weights import materialise
from hetpipe.runtime.precision.boundaries import Boundaries
from hetpipe.spec.number_types import NumberTypes
from hetpipe.spec.plan import ReplicaPlan, StagePlan

try:
    from hetpipe.layers.trials.rows import cut_to_try
except ImportError:
    from hetpipe.layers.trials.layer_check import cut_to_try  # type: ignore[attr-defined, no-redef]
try:
    from hetpipe.layers.trials.layer_check import few_of_each_kind
    from hetpipe.layers.untouched.boundaries import trace
except ImportError:
    trace = None  # type: ignore[assignment]

SIZES: dict[str, Any] = dict(
    type="qwen3",
    hidden_size=128,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=1024,
    max_position_embeddings=256,
)
SAMPLES, MICROBATCH, TOKENS, STEPS = 16, 4, 64, 3


def main(layers: int, adapters: str, stages: int) -> dict[str, float]:
    """Seconds of the processor, and bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build(**SIZES, num_hidden_layers=2)  # what a process imports and compares once
    began = time.process_time()
    chain = build(**SIZES, num_hidden_layers=layers)
    found = {"build": time.process_time() - began}
    if adapters == "lora":
        chain = hetpipe.adapt(chain, r=8, alpha=16)
    began = time.process_time()
    materialise(chain)
    found["loading"] = time.process_time() - began
    found["boundaries"] = boundary_seconds(chain)
    tokens = torch.randint(0, SIZES["vocab_size"], (SAMPLES, TOKENS))
    optimizer = torch.optim.SGD([p for p in chain.parameters() if p.requires_grad], lr=1e-3)
    found["step"] = step_seconds(chain, tokens, optimizer)
    before = peak()
    found["look"] = look_seconds(chain, tokens, stages)
    raised = peak() - before
    found["later look"] = look_seconds(chain, tokens, stages, later=True)
    return found | {"steps a look": found["look"] / found["step"], "bytes of a look": raised}


def boundary_seconds(chain: nn.Sequential) -> float:
    """What crosses the boundaries, when it was found already for samples of another length: the mean of three lengths."""
    model = Model(name="chain", layers=chain, inputs=rows(TOKENS), targets=rows(TOKENS), loss=Loss(function=nothing))
    stage = StagePlan(layers=(0, len(chain)), devices=("a",))
    found = Boundaries(model, chain, ReplicaPlan(microbatch_sizes=(MICROBATCH,), stages=(stage,)), [NumberTypes()])
    found.of(MICROBATCH, training=True)
    began = time.process_time()
    for tokens in (16, 33, 50):
        found.of(MICROBATCH, training=True, shapes=row_shapes(rows(tokens)))
    return (time.process_time() - began) / 3


def rows(tokens: int) -> Tensor:
    """A sample of so many tokens."""
    return torch.zeros(1, tokens, dtype=torch.int64)


def nothing(output: Tensor, _: Tensor) -> Tensor:
    """A loss that is not computed here."""
    return output.sum()


def step_seconds(chain: nn.Sequential, tokens: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """A plain loop's: micro-batch by micro-batch."""
    for timed in range(1 + STEPS):
        if timed == 1:
            began = time.process_time()
        optimizer.zero_grad()
        for part in tokens.split(MICROBATCH):
            (chain(part).float().square().mean() * len(part) / SAMPLES).backward()
        optimizer.step()
    return (time.process_time() - began) / STEPS


def look_seconds(chain: nn.Sequential, tokens: Tensor, stages: int, *, later: bool = False) -> float:
    """All stages' together, each of which looks at its own layers, as the first step does; `later` at a few of each kind."""
    every, given = named_layers(chain), cut_to_try(tokens)
    kinds = trace(chain, tokens).kinds if trace is not None and later else None
    try_layers(every[:1], given)
    began = time.process_time()
    for stage in range(stages):
        lo, hi = len(every) * stage // stages, len(every) * (stage + 1) // stages
        outcome = try_layers(every[lo:hi] if kinds is None else few_of_each_kind(every[lo:hi], kinds, lo, 1), given)
        assert outcome.found is not None, outcome
        given = outcome.found
    return time.process_time() - began


def peak() -> float:
    """Bytes of resident memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
