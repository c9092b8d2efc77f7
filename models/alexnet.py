"""AlexNet, for ImageNet's 224 × 224 or CIFAR's 32 × 32 images.

Krizhevsky, Sutskever, Hinton 2012, "ImageNet Classification with Deep Convolutional Neural Networks": the
five convolutions and three dense layers of section 3.5, overlapping 3 × 3 pooling of stride 2 (3.4), dropout
0.5 after the first two dense layers (4.2). Departures: one tower (the paper cut it in two for two GPUs), no
local response normalisation unless asked for, and the initialisation of He et al. For 32 × 32 images the
first convolution is 5 × 5 of stride 2 and pooling pads by 1, which keeps 2 × 2 positions at the end.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from hetpipe.models._parts import dense, initialise_relu_network, require_choice, require_dropout, require_positive, scaled


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What depends on the image's size in pixels."""

    kernel: int
    stride: int
    padding: int
    pool_padding: int
    final_positions: int  # height times width of what the last pooling leaves


GEOMETRIES = {
    32: Geometry(kernel=5, stride=2, padding=2, pool_padding=1, final_positions=2 * 2),
    224: Geometry(kernel=11, stride=4, padding=2, pool_padding=0, final_positions=6 * 6),
}


def convolution(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    padding: int | None = None,
    *,
    pool: int | None = None,
    norm: bool = False,
) -> nn.Sequential:
    """One layer: convolution, ReLU, and where asked for local response normalisation and pooling.

    `padding` keeps the size unless given; `pool` is the pooling's padding, None for no pooling.
    """
    padding = kernel // 2 if padding is None else padding
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding), relu=nn.ReLU()
    )
    if norm:
        parts["norm"] = nn.LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0)  # torch divides alpha by 5
    if pool is not None:
        parts["pool"] = nn.MaxPool2d(3, stride=2, padding=pool)
    return nn.Sequential(parts)


def build(
    image_size: int = 224,
    classes: int = 1000,
    width_multiplier: float = 1.0,
    dropout: float = 0.5,
    local_response_norm: bool = False,
) -> nn.Sequential:
    """AlexNet in 9 layers: float [b, 3, image_size, image_size] to logits [b, classes].

    Args:
        image_size: pixels, 224 (ImageNet) or 32 (CIFAR).
        classes: number of classes.
        width_multiplier: scales every channel count and the dense layers.
        dropout: probability after the first two dense layers.
        local_response_norm: normalise after the first two convolutions (section 3.3 of the paper).
    """
    require_choice("alexnet", "image_size", image_size, tuple(GEOMETRIES))
    require_positive("alexnet", dict(classes=classes))
    require_dropout("alexnet", dropout)
    geometry = GEOMETRIES[image_size]
    pool, norm = geometry.pool_padding, local_response_norm
    w96, w256, w384, hidden = (scaled("alexnet", width, width_multiplier) for width in (96, 256, 384, 4096))
    children: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=convolution(3, w96, geometry.kernel, geometry.stride, geometry.padding, pool=pool, norm=norm),
        conv2=convolution(w96, w256, 5, pool=pool, norm=norm),
        conv3=convolution(w256, w384),
        conv4=convolution(w384, w384),
        conv5=convolution(w384, w256, pool=pool),
        flatten=nn.Flatten(),
        fc6=dense(w256 * geometry.final_positions, hidden, dropout),
        fc7=dense(hidden, hidden, dropout),
        fc8=nn.Linear(hidden, classes),
    )
    return initialise_relu_network(nn.Sequential(children))
