"""VGG-19: Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition".

Configuration E of table 1: sixteen 3 × 3 convolutions in five groups, each group ended by 2 × 2 pooling, then
three dense layers with dropout 0.5 between them. Departures: the initialisation of He et al., and batch
normalisation on request.
"""

from collections import OrderedDict

from torch import nn

from hetpipe.models._parts import dense, initialise_relu_network, require_choice, require_dropout, require_positive, scaled

GROUPS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions: configuration E


def convolution(inputs: int, outputs: int, *, batch_norm: bool, pool: bool) -> nn.Sequential:
    """One layer: 3 × 3 convolution, optional normalisation, ReLU, and pooling at the end of a group."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(inputs, outputs, 3, padding=1))
    if batch_norm:
        parts["norm"] = nn.BatchNorm2d(outputs)
    parts["relu"] = nn.ReLU()
    if pool:
        parts["pool"] = nn.MaxPool2d(2)
    return nn.Sequential(parts)


def build(
    image_size: int = 224, classes: int = 1000, width_multiplier: float = 1.0, dropout: float = 0.5, batch_norm: bool = False
) -> nn.Sequential:
    """VGG-19 in 20 layers: float [b, 3, image_size, image_size] to logits [b, classes].

    Args:
        image_size: pixels, 224 (ImageNet) or 32 (CIFAR); the five poolings leave 7 × 7 or 1 × 1 positions.
        classes: number of classes.
        width_multiplier: scales every channel count and the dense layers.
        dropout: probability after the first two dense layers.
        batch_norm: normalise after every convolution.
    """
    require_choice("vgg19", "image_size", image_size, (32, 224))
    require_positive("vgg19", dict(classes=classes))
    require_dropout("vgg19", dropout)
    children: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for group, (width, convolutions) in enumerate(GROUPS, start=1):
        outputs = scaled("vgg19", width, width_multiplier)
        for position in range(1, convolutions + 1):
            layer = convolution(channels, outputs, batch_norm=batch_norm, pool=position == convolutions)
            children[f"conv{group}_{position}"] = layer
            channels = outputs
    hidden = scaled("vgg19", 4096, width_multiplier)
    children["flatten"] = nn.Flatten()
    children["fc6"] = dense(channels * (image_size // 2 ** len(GROUPS)) ** 2, hidden, dropout)
    children["fc7"] = dense(hidden, hidden, dropout)
    children["fc8"] = nn.Linear(hidden, classes)
    return initialise_relu_network(nn.Sequential(children))
