"""Rules by which a layer would be split into something else, most of them without a word."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ruled(nn.Module):
    """A layer with every kind of rule, which is right."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three = nn.LayerNorm(8), nn.Linear(8, 36)
        self.inner, self.gate, self.down = nn.LayerNorm(2), nn.Linear(8, 12), nn.Linear(12, 8)
        self.tensor_parallel = {
            "three": "colwise:3/6",
            "gate": "colwise",
            "inner": "replicated_with_grad_allreduce",
            "down": "rowwise",
        }

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        a, b, c = self.three(given).unflatten(-1, (3, -1)).unbind(-2)
        heads = self.inner((a * torch.sigmoid(b)).unflatten(-1, (-1, 2))).flatten(-2)
        return x + self.down((heads + c) * torch.tanh(self.gate(given)))  # type: ignore[no-any-return]


class _BiasTwice(Ruled):
    """Adds the bias of the row-wise layer in each device's part."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.5 * self.three.weight.shape[0] / 36


class _ByWidth(Ruled):
    """Scales by how many features this device has."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) * (self.gate(self.norm(x)).shape[-1] / 12)
        return found


class _Silent(Ruled):
    """Gives nothing at first, so that nothing behind it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


class _Faint(Ruled):
    """What it adds is scaled to almost nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (super().forward(x) - x)


WRONG: dict[str, tuple[type[Ruled], dict[str, str | None]]] = {
    "queries, keys and values cut as one": (Ruled, {"three": "colwise"}),
    "cut in other parts than they are": (Ruled, {"three": "colwise:9"}),
    "the gradient of an inner norm is not summed": (Ruled, {"inner": None}),
    "a gradient that is whole is summed": (Ruled, {"norm": "replicated_with_grad_allreduce"}),
    "outputs are not added up": (Ruled, {"down": None}),
    "the way back is cut by outputs": (Ruled, {"down": "colwise_gather_output"}),
    "inputs that are parts are cut again": (Ruled, {"down": "rowwise_split_input"}),
    "one of two column-wise layers is whole": (Ruled, {"gate": None}),
    "all of it is gathered and cut by rows": (Ruled, {"gate": "colwise_gather_output"}),
    "a gradient that is zero at first is not summed": (_Silent, {"inner": None}),
    "a gradient that is tiny at first is not summed": (_Faint, {"inner": None}),
    "something is added in each part": (_BiasTwice, {}),
    "something is scaled by the part": (_ByWidth, {}),
}
