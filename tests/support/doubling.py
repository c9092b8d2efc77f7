"""The smallest transform: whatever a Linear gives is doubled. The weights keep the names that they had."""

from __future__ import annotations

from torch import Tensor, nn

from hetpipe.layers.transforms import Changed, Transform, transformed
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

    def apply(self, name: str, layer: nn.Module) -> Changed:
        if isinstance(layer, nn.Linear):
            return Changed(Doubled(layer), {own: f"base.{own}" for own, _ in layer.named_parameters()})
        found = [(path, module) for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
        names = {f"{path}.{own}": f"{path}.base.{own}" for path, module in found for own, _ in module.named_parameters()}
        for path, module in found:
            layer.set_submodule(path, Doubled(module))
        return Changed(layer, names)


def doubled(layers: nn.Sequential) -> nn.Sequential:
    doubling: Transform = Doubling()
    return transformed(layers, [doubling])


def doubled_tied() -> nn.Sequential:
    return doubled(tied())
