"""What ranks run that share a transformer of diffusers: one step of it beside one device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.layers.adapters.adapt import adapt
from hetpipe.layers.model import Loss, mse
from hetpipe.layers.numbers import turn
from hetpipe.layers.replay.chain import chain_of
from hetpipe.processes.world import World
from tests.support.diffusers import made
from tests.support.ranks import make_plan
from tests.support.split_programs import engine_of, gradients_apart, leave, step

SAMPLES = 5


class Apart(NamedTuple):
    """How far a step of several devices is from one device's."""

    loss: float
    gradients: float


def built(kind: str, *, adapted: bool, double: bool) -> tuple[nn.Sequential, tuple[Tensor, ...]]:
    """The chain, with the same values every time, and what it is given."""
    model, inputs = made(kind, SAMPLES)
    layers, given = chain_of(model, inputs)
    found = given.tensors(inputs)
    if adapted:
        layers = adapt(layers, r=2, seed=1)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in layers.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    if double:
        turn(layers, "float64")
        found = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in found)
    return layers, found


def three_beside_one(world: World, kind: str, adapted: bool, double: bool) -> Apart:
    """Three stages beside a whole replica."""
    truth, inputs = built(kind, adapted=adapted, double=double)
    with torch.no_grad():
        output: Tensor = truth(inputs)
    targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=output.dtype)
    third = max(1, len(truth) // 3)
    cuts = [third, third, len(truth) - 2 * third]
    plan = make_plan([{"cuts": cuts, "sizes": [2, 1]}, {"cuts": [len(truth)], "sizes": [2]}])
    loss = mse(truth(inputs), targets)
    loss.backward()
    layers, _ = built(kind, adapted=adapted, double=double)
    engine = engine_of(world, plan, layers, inputs, targets, Loss(function=mse))
    if engine is None:
        return Apart(0.0, 0.0)
    found = Apart(abs(step(engine, plan, inputs, targets) - float(loss.detach())), gradients_apart(engine, truth))
    leave(engine)
    return found
