"""A step of the engine on one rank beside the same forwards and backwards in a plain loop, and what a simulation takes, for so
many layers and micro-batches.

    python -m bench.scale.stepping LAYERS MICROBATCHES,… ROUNDS      (started by run.py)
"""

from __future__ import annotations

import json
import sys
from statistics import median

import torch
from torch import nn

import hetpipe
from bench.overhead.contenders import mean_loss, scaled_sum
from bench.simulator.run import seconds_of, whole_plan
from hetpipe.predict.simulator import simulate

WIDTH, ROWS, DEVICE = 8, 2, "n0/0"  # of a layer; samples of a micro-batch
SHORT_SECONDS, MOST_ROUNDS = 0.3, 41  # what is short is repeated for so long, or so often


def chain(layers: int) -> nn.Sequential:
    """Layers that compute next to nothing."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def stepped(layers: int, microbatches: int, rounds: int) -> dict[str, float]:
    """Medians over at least so many rounds, of which each steps both once: processor seconds of a step of the plain loop, of the
    engine, and what the engine takes more. And of a simulation of a stage a layer."""
    batch = ROWS * microbatches
    document = {
        "format": "hetpipe.plan/1",
        "model": "chain",
        "global_batch": batch,
        "replicas": [{"microbatch_sizes": [ROWS] * microbatches, "stages": [{"layers": [0, layers], "devices": [DEVICE]}]}],
    }
    torch.set_num_threads(1)
    inputs, targets, plain = torch.randn(batch, WIDTH), torch.randint(WIDTH, (batch,)), chain(layers)
    engine = hetpipe.wrap(chain(layers), hetpipe.Plan.parse(document, "bench/scale"), inputs[:ROWS], mean_loss)
    parts = list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))

    def loop() -> float:
        plain.zero_grad()
        losses = []
        for x, y in parts:
            loss = scaled_sum(plain(x), y, denominator=batch)
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def step() -> float:
        return engine.step(inputs, targets)

    loop(), step(), step()
    rounds = max(rounds, min(MOST_ROUNDS, int(SHORT_SECONDS / seconds_of(loop, 1)[1])))
    pairs = [(seconds_of(loop, 1)[1], seconds_of(step, 1)[1]) for _ in range(rounds)]
    engine.close()
    given = whole_plan(layers, microbatches)
    simulate(*given)
    return {
        "layers": layers,
        "microbatches": microbatches,
        "loop": median(loop for loop, _ in pairs),
        "engine": median(engine for _, engine in pairs),
        "extra": median(engine - loop for loop, engine in pairs),
        "simulate": seconds_of(lambda: simulate(*given), 5)[1],
    }


if __name__ == "__main__":
    print(json.dumps([stepped(int(sys.argv[1]), int(count), int(sys.argv[3])) for count in sys.argv[2].split(",")]))
