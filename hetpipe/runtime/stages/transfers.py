"""What crosses a boundary of a pipeline: the micro-batches of one way, in their order, by torch.distributed's isend and irecv.

Each way of each boundary has a lane of its own, in which both ends name the same messages in the same order, so that no message
waits for one of another way. gloo tells ways apart by sender and receiver; NCCL gives each pair of a group one communicator and
one stream, in which what was started first ends first: there each way has a group of its own (`replicas.Lanes`). On both, a
message moves once its receive is posted, and neither call waits for it.

The other end is one rank; where a stage beside is tensor-parallel, it may be several, which have a part of each message (`peers`
of `spec.seats`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.layers.device import MemoryMeter
from hetpipe.layers.split import TensorSpec
from hetpipe.processes.whereabouts import waiting

Message = Sequence[TensorSpec]  # the tensors of one micro-batch


class Incoming:
    """Messages from the neighbours `peers`. A buffer is in use from `post` to `release`, and then used again: there are as many
    as were ever in use at once."""

    def __init__(
        self, messages: Sequence[Message], peers: Sequence[int], group: dist.ProcessGroup, device: torch.device,
        meter: MemoryMeter | None,
    ) -> None:  # fmt: skip
        self._messages, self._peers, self._group = messages, peers, group
        self._device, self._meter = device, meter
        self._free: list[list[Tensor]] = []
        self._most = [max(m[t].numel for m in messages) for t in range(len(messages[0]))]
        self._all: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self.posted = 0
        self._waiting: deque[tuple[list[dist.Work], tuple[Tensor, ...], list[Tensor]]] = deque()
        self._used: deque[list[Tensor]] = deque()

    def post(self) -> None:
        """Let the next message come."""
        message = self._messages[self.posted]
        buffers = self._free.pop() if self._free else self._new()
        tensors = tuple(b[: s.numel].view(s.shape) for b, s in zip(buffers, message, strict=True))
        works = [_started(dist.irecv(part, peer, group=self._group)) for peer, part in _parts(tensors, self._peers)]
        self._waiting.append((works, tensors, buffers))
        self.posted += 1

    def take(self) -> tuple[Tensor, ...]:
        """The oldest message that was posted and not yet taken, when it is there."""
        works, tensors, buffers = self._waiting.popleft()
        for work in works:
            work.wait()
        self._used.append(buffers)
        return tensors

    def release(self) -> None:
        """The oldest message that was taken is no longer needed."""
        self._free.append(self._used.popleft())

    def _new(self) -> list[Tensor]:
        buffers = [torch.empty(n, dtype=s.dtype, device=self._device) for n, s in zip(self._most, self._messages[0], strict=True)]
        for buffer in buffers:
            if self._meter is not None and buffer.numel():
                self._meter.own(buffer, "a receive buffer")
        self._all += buffers
        return buffers

    def close(self) -> None:
        """The buffers are no longer counted."""
        for buffer in self._all:
            if self._meter is not None and buffer.numel():
                self._meter.disown(buffer)


class Outgoing:
    """Messages to the neighbours `peers`. Each is kept until `settle`."""

    def __init__(self, peers: Sequence[int], group: dist.ProcessGroup) -> None:
        self._peers, self._group = peers, group
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()
        self._settled = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Let the next message go."""
        parts = _parts([t.contiguous() for t in tensors], self._peers)
        self._sent.append([(_started(dist.isend(part, peer, group=self._group)), part) for peer, part in parts])

    def settle(self, count: int) -> None:
        """The first `count` messages of the step have arrived, or are waited for."""
        while self._settled < count and self._sent:
            with waiting():
                for work, _ in self._sent.popleft():
                    work.wait()
            self._settled += 1


def _parts(tensors: Sequence[Tensor], peers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What each peer has of a message, of which it has as much as the others, to one element; of nothing, nothing."""
    for tensor in tensors:
        parts = tensor.view(-1).tensor_split(len(peers)) if len(peers) > 1 else [tensor]
        yield from ((peer, part) for peer, part in zip(peers, parts, strict=True) if part.numel())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank that is no part of the group"
    return work
