"""ResNet: He et al. 2016, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385).

Table 1's 18, 34 and 50 layers as a chain of residual blocks: the shortcut is inside a block, so nothing but the features
crosses a boundary. In blocks with three convolutions the second has the stride, as published implementations have it; the
table has it in the first. For 32 pixels the stem is that of section 4.2: one 3 × 3 convolution and no pooling.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe.models._parts import initialise_relu_network, require_choice, require_positive, scaled


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Blocks of each of the four groups, and whether a block has three convolutions and four times the channels."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool


DEPTHS = {
    18: Shape(blocks=(2, 2, 2, 2), bottleneck=False),
    34: Shape(blocks=(3, 4, 6, 3), bottleneck=False),
    50: Shape(blocks=(3, 4, 6, 3), bottleneck=True),
}
WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # a bottleneck's outputs over its inner channels


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution without bias, and normalisation."""
    conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs)))


class Block(nn.Module):
    """relu(shortcut(x) + body(x)): [b, inputs, h, w] to [b, outputs, h / stride, w / stride]."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1))
        else:
            sizes = ((inputs, width, 3, stride), (width, outputs, 3, 1))  # type: ignore[assignment]
        self.body = nn.ModuleList([convolution(*row) for row in sizes])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        features = x
        for part in self.body[:-1]:
            features = F.relu(part(features))
        return F.relu(self.body[-1](features) + self.shortcut(x))


def stem(image_size: int, outputs: int) -> nn.Sequential:
    """The first layer: [b, 3, 224, 224] to [b, outputs, 56, 56], or [b, 3, 32, 32] to [b, outputs, 32, 32]."""
    if image_size == 32:
        return nn.Sequential(OrderedDict(conv=convolution(3, outputs, 3), relu=nn.ReLU()))
    return nn.Sequential(OrderedDict(conv=convolution(3, outputs, 7, 2), relu=nn.ReLU(), pool=nn.MaxPool2d(3, 2, padding=1)))


def build(
    depth: int = 18, image_size: int = 224, classes: int = 1000, width_multiplier: float = 1.0, zero_init_residual: bool = False
) -> nn.Sequential:
    """ResNet, one layer for each block: float [b, 3, image_size, image_size] to logits [b, classes].

    Args:
        depth: 18, 34 or 50.
        image_size: pixels, 224 (ImageNet) or 32 (CIFAR); it decides the stem.
        classes: number of classes.
        width_multiplier: scales every channel count.
        zero_init_residual: each block begins as its shortcut (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
    """
    require_choice("resnet", "depth", depth, tuple(DEPTHS))
    require_choice("resnet", "image_size", image_size, (32, 224))
    require_positive("resnet", dict(classes=classes))
    shape = DEPTHS[depth]
    channels = scaled("resnet", WIDTHS[0], width_multiplier)
    children: OrderedDict[str, nn.Module] = OrderedDict(stem=stem(image_size, channels))
    for group, (blocks, width) in enumerate(zip(shape.blocks, WIDTHS, strict=True), start=1):
        inner = scaled("resnet", width, width_multiplier)
        outputs = inner * EXPANSION if shape.bottleneck else inner
        for index in range(blocks):
            stride = 2 if group > 1 and index == 0 else 1
            children[f"block{group}_{index + 1}"] = Block(channels, inner, outputs, stride, bottleneck=shape.bottleneck)
            channels = outputs
    pool = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), project=nn.Linear(channels, classes))
    children["head"] = nn.Sequential(pool)
    model = initialise_relu_network(nn.Sequential(children))
    if zero_init_residual:
        for block in model:
            if isinstance(block, Block):
                nn.init.zeros_(block.body[-1].norm.weight)  # type: ignore[union-attr,arg-type]
    return model
