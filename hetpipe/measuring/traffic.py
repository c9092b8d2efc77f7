"""Messages from rank to rank, with the time that each takes: there and back, and by several flows at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hetpipe.processes.world import World

SMALL_BYTES = 16
WINDOW_SECONDS, LEAST_MESSAGES = 0.3, 3  # of the counted messages of one flow; of several, which take turns, three times as long


class Pair(NamedTuple):
    """Two nodes (or one twice), and a rank on each."""

    a: str
    b: str
    left: int
    right: int


class Flow(NamedTuple):
    """Messages from one rank to another."""

    source: int
    target: int


def at_once(world: World, flows: Sequence[Flow], size: int) -> list[list[float]]:
    """Seconds of each message, of `size` bytes and then an answer of a few, of each flow, all at the same time for a while. No
    rank is in two flows. The first and the last message of a flow are not counted: with the one connections are made, while
    the other is on its way the others' counted ones end. Collective."""
    world.barrier()
    times: list[float] | None = None
    for flow in flows:
        if world.rank == flow.source:
            times = _send_messages(flow.target, size, WINDOW_SECONDS * (3 if len(flows) > 1 else 1))
        elif world.rank == flow.target:
            _answer_messages(flow.source, size)
    gathered = dict(zip(world.ranks, world.gather(times), strict=True))
    return [gathered[flow.source] for flow in flows]


def _send_messages(target: int, size: int, seconds: float) -> list[float]:
    device = message_device()
    message, answer = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (size, SMALL_BYTES))
    times = list[float]()

    def exchange() -> None:
        dist.send(message, target)
        dist.recv(answer, target)

    _timed(exchange, device)
    end = time.perf_counter() + seconds
    while len(times) < LEAST_MESSAGES or time.perf_counter() < end:
        times.append(_timed(exchange, device))
    message[0] = 1
    _timed(exchange, device)
    return times


def _answer_messages(source: int, size: int) -> None:
    device = message_device()
    message, answer = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (size, SMALL_BYTES))
    while not message[0].item():
        dist.recv(message, source)
        dist.send(answer, source)


def _timed(action: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def message_device() -> torch.device:
    """Where messages lie: on the card with NCCL, else on the CPU."""
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def ping_pong(world: World, pair: Pair, sizes: Sequence[int], repeats: int) -> list[list[float]]:
    """Seconds one way of each repeat (half of there and back), for each size, on every rank. Collective."""
    times = _as_one_of_both(world.rank, pair, sizes, repeats) if world.rank in (pair.left, pair.right) else None
    return next(found for rank, found in zip(world.ranks, world.gather(times), strict=True) if rank == pair.left)


def _as_one_of_both(rank: int, pair: Pair, sizes: Sequence[int], repeats: int) -> list[list[float]]:
    device, found = message_device(), []
    for size in sizes:
        message, times = torch.zeros(size, dtype=torch.uint8, device=device), []

        def there_and_back(message: torch.Tensor = message) -> None:
            if rank == pair.left:
                dist.send(message, pair.right)
                dist.recv(message, pair.right)
            else:
                dist.recv(message, pair.left)
                dist.send(message, pair.left)

        for _ in range(repeats + 3):
            time.sleep(0.001)
            times.append(_timed(there_and_back, device) / 2)
        found.append(times[3:])
    return found
