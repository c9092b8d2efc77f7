"""What the devices of a group send each other where a layer is split: the two functions of Megatron-LM (Shoeybi et al. 2019,
section 3), named f and g there, and one that makes a cut output whole.

All devices of a group run the same layers on the same samples in one order, so they call these in one order, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.files.messages import InputError
from hetpipe.layers.numbers import as_bytes
from hetpipe.layers.untouched.kept import Fixed
from hetpipe.processes.whereabouts import waiting

ANEW = "build the model anew, and load the weights that engine.whole_state_dict() or a checkpoint has"


class Message(NamedTuple):
    """What all devices of a group give at once: of each of them all get it (`gathered`), or its sum."""

    gathered: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Group(Fixed):
    """The devices over which a stage is split, as one of them sees it, which has shard `number`. `ranks`: of all, shard by shard;
    `processes` is their process group. Messages go in `paced()`, which an emulated device enters when it has computed so far.
    `exchanged`: how many there were since somebody set it to 0. While `noted` is a list, messages are noted there, and nobody is
    sent any."""

    def __init__(self, ranks: Sequence[int], number: int, processes: dist.ProcessGroup | None) -> None:
        self.ranks, self.number, self.degree, self.processes = tuple(ranks), number, len(ranks), processes
        self._places = [sorted(ranks).index(rank) for rank in ranks]  # in what torch gathers, which is in the order of the ranks
        self._copied: tuple[Tensor, int, bool, Tensor] | None = None
        self._closed, self.exchanged = False, 0
        self.noted: list[Message] | None = None
        self.forgetting = self._forget  # a hook of layers, the same object for all
        self.paced: Callable[[], AbstractContextManager[None]] = nullcontext

    def __deepcopy__(self, _: object) -> Group:
        return self

    def copied(self, tensor: Tensor) -> Tensor:
        """The tensor, whose gradient is summed over the group. Linear layers that take the same tensor one after the other share
        one copy, and so one sum."""
        last, now = self._copied, (tensor._version, torch.is_grad_enabled())
        if last is None or last[0] is not tensor or (last[1], last[2]) != now:
            last = (tensor, *now, _Copy.apply(tensor, self))  # type: ignore[no-untyped-call]
            self._copied = last
        return last[3]

    def close(self) -> None:
        """The engine is closed: the layers cannot run any more."""
        self._closed = True

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Exchange messages in here. InputError if the others are gone."""
        if self._closed:
            raise InputError(f"this layer is one of {self.degree} shards of itself, whose engine is closed: {ANEW}")
        with self.paced(), waiting():
            yield
        self.exchanged += 1

    def _forget(self, *_: object) -> None:
        """A layer begins, or is over."""
        self._copied = None

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of this tensor over the group, of which each device gets the gradient as it is."""
        result: Tensor = _Sum.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def joined(self, tensor: Tensor) -> Tensor:
        """The shards of a tensor, cut along its last dimension, as one; the gradient is whole on each device."""
        result: Tensor = _Join.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def taken(self, tensor: Tensor, dimension: int = -1) -> Tensor:
        """This device's shard of a whole tensor, along a dimension; the gradient is whole on each device."""
        result: Tensor = _Take.apply(tensor, self, dimension)  # type: ignore[no-untyped-call]
        return result

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the group, in memory of its own."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self._only_noted(total, gathered=False):
            with self._meeting():
                dist.all_reduce(total, group=self.processes)
        return total

    def any(self, here: bool) -> bool:
        """Whether it is so on any device. Collective."""
        device = "cuda" if "nccl" in str(dist.get_backend(self.processes)) else "cpu"
        told = torch.tensor([float(here)], device=device)
        return bool(self.add_up(told).item())

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """This tensor of each device, in the order of their shards."""
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.degree)]
        if not self._only_noted(own, gathered=True):
            with self._meeting():
                dist.all_gather([as_bytes(each) for each in found], as_bytes(own), group=self.processes)
        return [found[place] for place in self._places]

    def _only_noted(self, tensor: Tensor, *, gathered: bool) -> bool:
        if self.noted is not None:
            self.noted.append(Message(gathered, tuple(tensor.shape), tensor.dtype, tensor.device))
        return self.noted is not None

    def answer(self, messages: Sequence[Message]) -> None:
        """Give zeros in these messages, which the others expect."""
        for message in messages:
            zeros = torch.zeros(message.shape, dtype=message.dtype, device=message.device)
            if message.gathered:
                self.gather(zeros)
            else:
                self.add_up(zeros)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.add_up(gradient), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return group.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(group.gather(tensor), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.degree, -1)[ctx.group.number], None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dimension: int) -> Tensor:
        ctx.group, ctx.dimension = group, dimension
        return tensor.chunk(group.degree, dimension)[group.number].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.group.gather(gradient), ctx.dimension), None, None
