"""What several models share: checked arguments, dense layers, initialisation. Not a model itself."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from hetpipe.files.limits import MOST_LAYERS, MOST_WIDTH


def require_positive(model: str, values: Mapping[str, object]) -> None:
    """Every value is an integer of at least 1, and none is absurd, else a ValueError that names the first one that is not so."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{model}: {name} must be an integer of at least 1, got {value!r}")
        most = MOST_LAYERS if name == "layers" else MOST_WIDTH
        if value > most:
            raise ValueError(f"{model}: {name} must be at most {most}, got {value}")


def require_dropout(model: str, dropout: object) -> None:
    """A probability below 1, else a ValueError."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"{model}: dropout must be a number from 0 to below 1, got {dropout!r}")


def require_choice(model: str, name: str, value: object, known: tuple[object, ...]) -> None:
    """One of the known values, else a ValueError that lists them."""
    if value not in known:
        raise ValueError(f"{model}: unknown {name} {value!r}; known: {', '.join(map(str, known))}")


def scaled(model: str, channels: int, width_multiplier: object) -> int:
    """The nearest whole number of channels after scaling, at least 1."""
    multiplier = width_multiplier
    if isinstance(multiplier, bool) or not isinstance(multiplier, int | float) or not multiplier > 0:
        raise ValueError(f"{model}: width_multiplier must be a number above 0, got {multiplier!r}")
    return max(1, round(channels * multiplier))


def dense(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    """Linear, ReLU and dropout as one layer: [b, inputs] to [b, outputs]."""
    return nn.Sequential(OrderedDict(linear=nn.Linear(inputs, outputs), relu=nn.ReLU(), dropout=nn.Dropout(dropout)))


def initialise_relu_network(model: nn.Sequential) -> nn.Sequential:
    """Weights for ReLU networks after He et al. 2015 (arXiv:1502.01852, section 2.2); biases zero.

    The variance of a convolution counts the outputs it feeds (`fan_out`), that of a dense layer its inputs.
    The last dense layer, which no ReLU follows, gets a standard deviation of 0.01. Returns the model.
    """
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif module is last:
            nn.init.normal_(module.weight, std=0.01)
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model
