"""A small convolutional CIFAR-10 classifier: four convolutions, dropout, a head of three dense layers."""

from collections import OrderedDict

from torch import nn

from hetpipe.models._parts import dense, initialise_relu_network, require_dropout, require_positive

IMAGE_SIZE = 32  # pixels


def convolution(inputs: int, outputs: int, *, dropout: float | None = None) -> nn.Sequential:
    """One layer: 3 × 3 convolution and ReLU; with `dropout`, 2 × 2 pooling and dropout of channels too."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(inputs, outputs, 3, padding=1), relu=nn.ReLU())
    if dropout is not None:
        parts["pool"] = nn.MaxPool2d(2)
        parts["dropout"] = nn.Dropout2d(dropout)
    return nn.Sequential(parts)


def build(classes: int = 10, width: int = 32, hidden: int = 256, dropout: float = 0.2) -> nn.Sequential:
    """8 layers: float [b, 3, 32, 32] to logits [b, classes].

    Args:
        classes: number of classes.
        width: channels of the first convolution; later ones have two and four times as many.
        hidden: features of the head's first dense layer; the second has half as many.
        dropout: probability after each pooling and after the head's first two dense layers.
    """
    require_positive("cifar_cnn", dict(classes=classes, width=width, hidden=hidden))
    require_dropout("cifar_cnn", dropout)
    half = max(1, hidden // 2)
    positions = (IMAGE_SIZE // 2 // 2 // 2) ** 2
    children: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=convolution(3, width),
        conv2=convolution(width, 2 * width, dropout=dropout),
        conv3=convolution(2 * width, 4 * width, dropout=dropout),
        conv4=convolution(4 * width, 4 * width, dropout=dropout),
        flatten=nn.Flatten(),
        fc1=dense(4 * width * positions, hidden, dropout),
        fc2=dense(hidden, half, dropout),
        fc3=nn.Linear(half, classes),
    )
    return initialise_relu_network(nn.Sequential(children))
