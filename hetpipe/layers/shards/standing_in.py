"""A device of a group that has no memory left still takes part in the messages of the others, which would wait for it. Which
these are is found without arithmetic: all devices of a group run the same layers, and send the same messages in one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hetpipe.layers.model import as_tuple
from hetpipe.layers.shards.sums import Group, Message
from hetpipe.layers.split import TensorSpec
from hetpipe.layers.stage import Stage
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.untouched.fakes import looked_at
from hetpipe.layers.weights import eagerly


class Messages(NamedTuple):
    """Of a group, in the forward of a micro-batch, and in its backward."""

    forward: tuple[Message, ...]
    backward: tuple[Message, ...]


def messages_of(
    stage: Stage, group: Group, given: Sequence[TensorSpec], left: Sequence[TensorSpec], device: torch.device
) -> Messages:
    """What the devices of a group send each other for a micro-batch of which `given` enters the stage, and `left` leaves it."""
    with looked_at(stage), eagerly(), _noting(stage, group) as noted:
        fakes = {id(t): _fake(t, device) for t in tensors_of(stage).values()}
        instead = {f"stage.{name}": fakes[id(t)] for name, t in tensors_of(stage).items()}
        inputs = [spec.empty(device) for spec in given]
        functional_call(both := _Both(stage, [spec.requires_grad for spec in left], noted), instead, tuple(inputs))
        found = Messages(tuple(noted[: both.forwards]), tuple(noted[both.forwards :]))
        del fakes, instead, inputs, both
    return found


class _Both(nn.Module):
    """A forward and a backward, in which all tensors are the same."""

    def __init__(self, stage: Stage, needed: Sequence[bool], noted: Sequence[Message]) -> None:
        super().__init__()
        self.stage, self.needed, self.noted, self.forwards = stage, needed, noted, 0

    def forward(self, *tensors: Tensor) -> None:
        """One micro-batch."""
        output = as_tuple(self.stage(*tensors))
        self.forwards = len(self.noted)
        ends = [t for t, needed in zip(output, self.needed, strict=True) if needed and t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])


@contextmanager
def _noting(stage: Stage, group: Group) -> Iterator[list[Message]]:
    """In here the stage sends nothing, and keeps nothing on the host."""
    offload, looks = stage.offload, stage.looks
    found = list[Message]()
    group.noted, stage.offload, stage.looks = found, None, False
    try:
        yield found
    finally:
        group.noted, stage.offload, stage.looks = None, offload, looks


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    """What stands for a tensor of the stage, while fake tensors are in use."""
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
