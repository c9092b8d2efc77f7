"""Owners of the same gradients in one process, and what a user may put in a gradient's place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe.runtime.gradients import GradientSync
from hetpipe.runtime.replicas import OwnerGroup

GROUP: Any = object()  # stands for a process group


class Sums:
    """Stands for torch.distributed.all_reduce among two owners, the other of which has the same gradients, and trained all."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, tensor: Tensor, **_: object) -> Sums:
        self.sizes.append(tensor.numel())
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        """Nothing is under way."""


class TwoOwners:
    """torch.distributed.all_reduce between two threads, which stand for ranks: `run(function)` calls it for both at once."""

    def __init__(self) -> None:
        self._meet, self._given, self._own = threading.Barrier(2, timeout=60), dict[int, Tensor](), threading.local()

    def __call__(self, tensor: Tensor, **_: object) -> TwoOwners:
        self._given[self._own.rank] = tensor.clone()
        self._meet.wait()
        total = self._given[0] + self._given[1]
        self._meet.wait()
        tensor.copy_(total)
        return self

    def wait(self) -> None:
        """Nothing is under way."""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self._own.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._meet.abort()
                raise

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(as_rank, range(2)))


def chain_of_layers(count: int, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).double()


def sync_of(layers: nn.Sequential, ranks: tuple[int, ...]) -> GradientSync:
    return GradientSync([OwnerGroup("layers", ranks, tuple(layers.parameters()))], {(0, 1): GROUP}, 0)


def own_rows(rank: int, step: int) -> Tensor:
    """What an owner trains on in a step: other numbers on each, and in each."""
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(layers: nn.Module, rank: int, step: int) -> None:
    layers(own_rows(rank, step)).square().sum().backward()


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Sequence[nn.Parameter]], None]:
    def replace(parameters: Sequence[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = change(p.grad) if p.grad is not None else None

    return replace


def _one(parameters: Sequence[nn.Parameter]) -> None:
    _each(lambda g: g * 3)(parameters[2:3])


def _foreach(parameters: Sequence[nn.Parameter]) -> None:
    for p, g in zip(parameters, torch._foreach_mul([p.grad for p in parameters if p.grad is not None], 3.0), strict=True):
        p.grad = g


def _none(parameters: Sequence[nn.Parameter]) -> None:
    parameters[1].grad = None


def _all_none(parameters: Sequence[nn.Parameter]) -> None:
    _each(lambda g: g * 2)(parameters)
    for p in parameters[:-1]:
        p.grad = None


def _swapped(parameters: Sequence[nn.Parameter]) -> None:
    first, second = parameters[0], parameters[2]
    first.grad, second.grad = second.grad, first.grad


def _with_decay(parameters: Sequence[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = p.grad + 0.5 * p if p.grad is not None else None  # which has a graph
    parameters[0].grad = parameters[0].detach().clone().requires_grad_()  # which is a leaf


REPLACED: dict[str, Callable[[Sequence[nn.Parameter]], None]] = {
    "nothing": lambda _: None,
    "times a number": _each(lambda g: g * 3),
    "one of them": _one,
    "by views": _each(lambda g: torch.stack([g, 3 * g])[1]),
    "by views of their own": _each(lambda g: g.view(-1).view(g.shape)),
    "by none": _none,
    "by none, but for one": _all_none,
    "by foreach": _foreach,
    "by each other": _swapped,
    "by what has a graph": _with_decay,
}


def beside(layers: nn.Module) -> list[nn.Parameter]:
    """Such parameters, with such gradients, that no engine knows."""
    found = [nn.Parameter(p.detach().clone()) for p in layers.parameters()]
    for p, own in zip(found, layers.parameters(), strict=True):
        p.grad = own.grad.detach().clone() if own.grad is not None else None
    return found


def same_gradients(parameters: Iterator[nn.Parameter], wanted: Sequence[Tensor | None]) -> bool:
    pairs = list(zip([p.grad for p in parameters], wanted, strict=True))
    assert all((own is None) == (other is None) for own, other in pairs)
    return all(torch.allclose(own, other, rtol=1e-12, atol=0) for own, other in pairs if own is not None and other is not None)
