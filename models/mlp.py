"""A residual multilayer perceptron with pre-normalisation: small, exact to test, and of any depth."""

from collections import OrderedDict
from typing import ClassVar

from torch import Tensor, nn

from hetpipe.models._parts import require_positive


class ResidualBlock(nn.Module):
    """x + down(gelu(up(norm(x)))): [b, width] to [b, width]."""

    tensor_parallel: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))  # [b, expansion * width]
        return x + self.down(hidden)  # type: ignore[no-any-return]


def build(layers: int = 4, width: int = 64, inputs: int = 32, outputs: int = 10, expansion: int = 2) -> nn.Sequential:
    """`layers` residual blocks between an embedding and a head: [b, inputs] to [b, outputs].

    Args:
        layers: number of residual blocks; the model has two children more.
        width: features between the blocks.
        inputs: features of a sample.
        outputs: classes, or regressed values.
        expansion: hidden features of a block over its width.
    """
    require_positive("mlp", dict(layers=layers, width=width, inputs=inputs, outputs=outputs, expansion=expansion))
    children: OrderedDict[str, nn.Module] = OrderedDict(embed=nn.Linear(inputs, width))
    for layer in range(layers):
        children[f"block{layer}"] = ResidualBlock(width, expansion)
    children["head"] = nn.Sequential(OrderedDict(norm=nn.LayerNorm(width), linear=nn.Linear(width, outputs)))
    return nn.Sequential(children)
