"""What the ranks of `test_fused_loss.py` run: chains whose heads compute the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.building.evaluated import counted_by
from hetpipe.checkpoints import checkpoint
from hetpipe.layers.losses.fused import fused_cross_entropy
from hetpipe.layers.model import Loss, cross_entropy
from hetpipe.models import causal_lm
from hetpipe.processes.world import World
from tests.support.jobs import STATE
from tests.support.ranks import make_plan
from tests.support.transparency import AT_ONCE, open_engine
from tests.support.zoo import ZOO, batch, optimizer_of

CHAINS: dict[str, dict[str, Any]] = {
    "tied": ZOO["qwen3"].without_dropout(),
    "untied": {
        "type": "phi",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    },  # its head has a bias
}
PLAIN = Loss(function=cross_entropy, weight="tokens")
FUSED = Loss(function=fused_cross_entropy, weight="tokens")
MANY = 4_000  # words


def build(name: str, *, labels: bool, **changed: Any) -> nn.Sequential:
    """Of float64; the same values with labels and without."""
    torch.manual_seed(3)
    return causal_lm.build(**{**CHAINS[name], **changed}, labels=labels).to(torch.float64)


def samples(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask, targets; of the fourth sample all targets are ignored."""
    inputs, targets, _ = batch("qwen3", step)
    targets[3] = -100
    tokens, mask = inputs
    return tokens, mask, targets


def train(world: World, folder: str) -> dict[str, Any]:
    """Each chain over three stages and two, three steps, an evaluation and a checkpoint; and how many bytes of memory a step
    takes with many words, without the loss in the head and with it."""
    plan = make_plan([{"cuts": (1, 2, 2), "sizes": [2, 1]}, {"cuts": (3, 2), "sizes": [1, 2]}])
    found: dict[str, Any] = {}
    for name in CHAINS:
        layers, (tokens, mask, targets) = build(name, labels=True), samples(0)
        engine = open_engine(world, plan, layers, (tokens, mask, targets), targets, FUSED)
        optimizer, losses = optimizer_of(engine.parameters()), []
        for step in range(3):
            tokens, mask, targets = samples(step)
            losses.append(engine.step(engine.share((tokens, mask, targets)), engine.share(targets)))
            optimizer.step()
        tokens, mask, targets = samples(3)
        seen = engine.evaluate(engine.share((tokens, mask, targets)), engine.share(targets), counted_by(FUSED))
        state = {key: value.clone() for key, value in engine.state_dict().items()}
        saved = checkpoint.save(Path(folder) / name, 3, engine.stage, optimizer, STATE, world, 1)
        found[name] = {"losses": losses, "seen": seen, "state": state, "checkpoint": str(saved)}
        engine.close()
    found["bytes"] = [_bytes(world, labels=labels) for labels in (False, True)]
    return found


def _bytes(world: World, *, labels: bool) -> list[int | None]:
    """The most that each device of this rank holds in a step, by its meter."""
    plan = make_plan([{"cuts": (1, 2, 2), "sizes": [2, 1]}, {"cuts": (3, 2), "sizes": [1, 2]}])
    tokens, mask, targets = samples(0)
    inputs = (tokens, mask, targets) if labels else (tokens, mask)
    layers = build("tied", labels=labels, vocab_size=MANY)
    engine = open_engine(world, plan, layers, inputs, targets, FUSED if labels else PLAIN, emulation=AT_ONCE)
    engine.step(engine.share(inputs), engine.share(targets))
    peaks = [peak for _, peak, _ in engine.usage()]
    engine.close()
    return peaks
