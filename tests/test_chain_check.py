"""A model that is more than a chain of its layers is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.trials.chain_check import check_chain


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class Called(nn.Sequential):
    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


class Plain(nn.Sequential):
    """A subclass that adds nothing of its own."""

    def helper(self) -> int:
        return 1


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Sequential:
    net = pair()
    change(net)
    return net


def instance_forward(net: nn.Sequential) -> None:
    vars(net)["forward"] = lambda x: x


def tied_by_memory(net: nn.Sequential) -> None:
    net[1].weight = nn.Parameter(net.get_parameter("0.weight").data)


def tied_by_a_view(net: nn.Sequential) -> None:
    net[1].weight = nn.Parameter(net.get_parameter("0.weight").data.t())


def buffer_of_a_parameter(net: nn.Sequential) -> None:
    net[1].register_buffer("copy", net.get_parameter("0.weight").data[1:3])


def hooked(kind: str) -> Callable[[], nn.Sequential]:
    return lambda: changed(lambda net: getattr(net, f"register_{kind}_hook")(lambda *_: None))


def parameter(net: nn.Sequential) -> None:
    net.scale = nn.Parameter(torch.ones(1))


OWN_FORWARD, HOOKS = "has a forward of its own, which would not run", "on the whole, which would not run"
MEMORY = "in the same memory"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "forward": (lambda: Residual(nn.Linear(4, 4)), f"model 'm' (Residual) {OWN_FORWARD}"),
    "call": (lambda: Called(nn.Linear(4, 4)), f"model 'm' (Called) {OWN_FORWARD}"),
    "forward of an instance": (lambda: changed(instance_forward), f"model 'm' (Sequential) {OWN_FORWARD}"),
    "hook": (hooked("forward"), f"has forward hooks {HOOKS}"),
    "hook before": (hooked("forward_pre"), f"has forward pre hooks {HOOKS}"),
    "hook of backward": (hooked("full_backward"), f"has backward hooks {HOOKS}"),
    "parameter": (lambda: changed(parameter), "holds 'scale' itself, beside its layers"),
    "buffer": (lambda: changed(lambda net: net.register_buffer("mean", torch.ones(1))), "holds 'mean' itself, beside its layers"),
    "tied by memory": (lambda: changed(tied_by_memory), f"'0.weight' and '1.weight' are two tensors {MEMORY}"),
    "tied by a view": (lambda: changed(tied_by_a_view), f"'0.weight' and '1.weight' are two tensors {MEMORY}"),
    "a buffer that is a parameter": (lambda: changed(buffer_of_a_parameter), f"'0.weight' and '1.copy' are two tensors {MEMORY}"),
    "no nn.Sequential": (lambda: nn.Linear(4, 4), "expected an nn.Sequential whose children are the layers, found Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused(case: str) -> None:
    """A forward of its own, and hooks on the whole, were dropped without a word; weights tied by memory parted."""
    make, words = REFUSED[case]
    with pytest.raises(InputError) as caught:
        check_chain("m", make())
    assert words in str(caught.value)


def tied(net: nn.Sequential) -> None:
    net[1].weight = net[0].weight


def of_one_piece(net: nn.Sequential) -> None:
    """As weights that are read from a file may lie."""
    whole = torch.randn(2, 4, 4)
    net[0].weight, net[1].weight = (nn.Parameter(part) for part in whole)


def shared_table(net: nn.Sequential) -> None:
    """A constant that layers share, in the same memory."""
    table = torch.arange(8.0)
    net[0].register_buffer("table", table)
    net[1].register_buffer("table", table[:4])


ACCEPTED: dict[str, Callable[[], nn.Sequential]] = {
    "subclass": lambda: Plain(nn.Linear(4, 4)),
    "hooks of layers": lambda: changed(lambda net: net[0].register_forward_hook(lambda *_: None)),
    "tied": lambda: changed(tied),
    "of one piece": lambda: changed(of_one_piece),
    "a table": lambda: changed(shared_table),
    "one module twice": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
    "weights of an RNN": lambda: nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4)),
    "the meta device": lambda: pair().to("meta"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_a_chain_is_one(case: str) -> None:
    check_chain("m", ACCEPTED[case]())
