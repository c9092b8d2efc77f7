"""The smallest transform: whatever a Linear gives is doubled. The weights keep the names that they had."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hetpipe.layers.transforms import Transform, transformed
from tests.support.user_parts import tied


class Doubled(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.base(x)
        return out


class Doubling:
    identity = "what a Linear gives, doubled"

    def apply(self, layer: nn.Module) -> tuple[nn.Module, Mapping[str, str]]:
        if isinstance(layer, nn.Linear):
            return Doubled(layer), {name: f"base.{name}" for name, _ in layer.named_parameters()}
        found = [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        names = {f"{name}.{own}": f"{name}.base.{own}" for name, module in found for own, _ in module.named_parameters()}
        for name, module in found:
            layer.set_submodule(name, Doubled(module))
        return layer, names


def doubled(layers: nn.Sequential) -> nn.Sequential:
    doubling: Transform = Doubling()
    return transformed(layers, [doubling])


def doubled_tied() -> nn.Sequential:
    return doubled(tied())
