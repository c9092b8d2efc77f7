"""What ranks compare of the arguments of `wrap` and `auto`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe import InputError
from hetpipe.layers.model import cross_entropy
from hetpipe.runtime.checks.arguments import arguments, called, content
from hetpipe.runtime.checks.trained import modes


def test_functions_and_objects_are_called_by_where_they_are_defined() -> None:
    assert called(F.mse_loss) == "torch.nn.functional.mse_loss"
    assert called(nn.CrossEntropyLoss(label_smoothing=0.1)) == "torch.nn.modules.loss.CrossEntropyLoss"
    assert called(partial(cross_entropy, ignore_index=3)) == "a partial of hetpipe.layers.model.cross_entropy"


def test_what_is_in_a_loss_is_what_decides_of_it() -> None:
    def loss(factor: float) -> Callable[..., Tensor]:
        return lambda output, targets: F.mse_loss(output, targets) * factor

    def twice(output: Tensor, targets: Tensor) -> Tensor:
        return 2.5 * F.mse_loss(output, targets)

    assert content(twice) == "2.5, F, mse_loss"
    assert content(loss(1.0)) == content(loss(2.0)) == "F, mse_loss", "what it closes over may be a rank's own"
    assert "ignore_index=3" in content(partial(cross_entropy, ignore_index=3))
    assert "label_smoothing=0.1" in content(nn.CrossEntropyLoss(label_smoothing=0.1))
    given = arguments(nn.Sequential(), F.mse_loss, len, None, seed=3)
    assert given["loss_weight"] == "builtins.len"
    assert given["seed"] == 3


def test_a_loss_that_a_scaler_of_torchs_scales_is_refused() -> None:
    """Each rank would look for overflows in its own gradients only."""
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)

    class Scaling:
        def __init__(self, scaler: torch.amp.GradScaler) -> None:
            self.scaler = scaler

        def loss(self, output: Tensor, targets: Tensor) -> Tensor:
            return self.scaler.scale(F.mse_loss(output, targets))

        __call__ = loss

    def made(scaler: torch.amp.GradScaler) -> list[Callable[..., Tensor]]:
        return [
            lambda output, targets: scaler.scale(F.mse_loss(output, targets)),
            Scaling(scaler),
            Scaling(scaler).loss,
            partial(lambda scaler, output, targets: scaler.scale(output), scaler),
        ]

    for loss in made(scaler):
        with pytest.raises(InputError, match="loss_fn uses a torch.amp.GradScaler, .*: give the plain loss. .* and no scaler"):
            arguments(nn.Sequential(), loss, len, None)
    for loss in made(off):
        assert arguments(nn.Sequential(), loss, len, None)


@pytest.mark.parametrize(
    ("still", "told"), [((), "train"), (("",), "eval"), (("1",), "train, but for 1 eval"), (("0.1",), "train, but for 0.1 eval")]
)
def test_modes_say_where_they_change(still: tuple[str, ...], told: str) -> None:
    net = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Dropout()), nn.Sequential(nn.Dropout()))
    for name in still:
        net.get_submodule(name).eval()
    assert modes(net) == told
