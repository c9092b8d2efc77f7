"""A net of which the user has frozen some layers by `.eval()`, and what becomes of that in an engine."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.documents.plan import Backend
from hetpipe.layers.model import Loss, as_tuple, mse
from hetpipe.processes.world import World
from tests.support.blocks import WIDTH, Block
from tests.support.nets import batch
from tests.support.ranks import make_plan
from tests.support.transparency import open_engine


class Merging(nn.Module):
    """Adds its update to its weight while it is evaluated, as implementations of LoRA do by overriding `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.update = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged == mode:
            self.merged = not mode
            with torch.no_grad():
                self.weight.add_(self.update if self.merged else -self.update)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.merged else self.weight + self.update)


def frozen_net() -> nn.Sequential:
    """Seven layers: a frozen BatchNorm (1), a frozen dropout (2), a layer that merges (3), and one with a frozen part (5). The
    last two share a frozen norm."""
    torch.manual_seed(0)
    norm, shared = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
    for each in (norm, shared):
        nn.init.uniform_(each.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(each.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    layers = nn.Sequential(
        Block(), norm, nn.Dropout(0.5), Merging(), Block(), nn.Sequential(part, shared), nn.Sequential(Block(), shared)
    ).double()
    for frozen in (norm, layers[2], part[1], shared):
        frozen.eval()
    return layers


def linear_net() -> nn.Sequential:
    """Seven layers whose outputs are of autocast's type."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(7)])


def modes(module: nn.Module) -> dict[str, bool]:
    """The training flag of every module but the container."""
    return {name: m.training for name, m in module.named_modules(remove_duplicate=False) if name}


def _fails(_output: object, _targets: object) -> tuple[float, int]:
    raise ArithmeticError("no metric today")


def keep_modes(world: World, backend: Backend, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Two steps around an evaluation, and an evaluation that fails; each rank gives the whole batch of one replica."""
    layers = frozen_net()
    inputs, targets = batch("blocks", 7, 0)
    plan = make_plan(rows, schedule="gpipe")
    sample = as_tuple(inputs)[0][:2], as_tuple(targets)[0][:2]
    engine = open_engine(world, plan, layers, *sample, Loss(function=mse), backend=backend, batch_norm="per_microbatch")
    heard = [modes(engine.stage)]
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        found["losses"].append(engine.step(inputs, targets))
        heard.append(modes(engine.stage))
        found["evaluation"] = engine.evaluate(inputs, targets).loss
        heard.append(modes(engine.stage))
    if world.size == 1:
        with suppress(ArithmeticError):
            engine.evaluate(inputs, targets, _fails)
        heard.append(modes(engine.stage))
    found["gradients"] = {n: p.grad.clone() for n, p in engine.stage.named_parameters() if p.grad is not None}
    found["state"] = {n: v.clone() for n, v in engine.stage.state_dict().items()}
    engine.stage.train()
    engine.step(inputs, targets)
    found["thawed"] = modes(engine.stage)
    found["modes"] = heard
    engine.close()
    found["under autocast"] = _change_types(world, backend, rows)
    return found


def _change_types(world: World, backend: Backend, rows: list[dict[str, Any]]) -> list[float]:
    """Losses of steps and evaluations with autocast, and without."""
    layers, (inputs, targets) = linear_net(), batch("blocks", 7, 0, torch.float32)
    engine = open_engine(world, make_plan(rows, schedule="gpipe"), layers, inputs, targets, Loss(function=mse), backend=backend)
    losses = []
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses += [engine.step(inputs, targets), engine.evaluate(inputs, targets).loss]
    engine.close()
    return losses
