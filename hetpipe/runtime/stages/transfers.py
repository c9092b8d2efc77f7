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
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.layers.device import MemoryMeter
from hetpipe.layers.split import TensorSpec
from hetpipe.processes.whereabouts import waiting

Message = Sequence[TensorSpec]  # the tensors of one micro-batch


class Room:
    """Receive buffers for what comes one way into a stage. Its runs, of which one is at work at a time, take them in turn."""

    def __init__(self, device: torch.device, meter: MemoryMeter | None) -> None:
        self._device, self._meter = device, meter
        self._free: list[list[Tensor]] = []
        self._all: dict[int, Tensor] = {}

    def take(self, message: Message, messages: Sequence[Message]) -> list[Tensor]:
        """Buffers that hold this message, or else new ones that hold any of these."""
        buffers = self._free.pop() if self._free else []
        if not _hold(buffers, message):
            self._drop(buffers)
            buffers = self._new(messages)
        return buffers

    def give(self, buffers: list[Tensor]) -> None:
        """Take back buffers that are free."""
        self._free.append(buffers)

    def empty(self) -> None:
        """There are none, and none is counted, whether it is free or not."""
        self._drop(list(self._all.values()))
        self._free.clear()

    def _new(self, messages: Sequence[Message]) -> list[Tensor]:
        columns = zip(*messages, strict=True)
        buffers = [torch.empty(max(s.numel for s in c), dtype=c[0].dtype, device=self._device) for c in columns]
        for buffer in buffers:
            if self._meter is not None and buffer.numel():
                self._meter.own(buffer, "a receive buffer")
        self._all |= {id(buffer): buffer for buffer in buffers}
        return buffers

    def _drop(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            del self._all[id(buffer)]
            if self._meter is not None and buffer.numel():
                self._meter.disown(buffer)


class Incoming:
    """Messages from the neighbours `peers`. A buffer is in use from `post` to `release`, and then used again, in later steps,
    too, where it has the room: there are as many as were ever in use at once."""

    def __init__(self, peers: Sequence[int], group: dist.ProcessGroup, room: Room) -> None:
        self._peers, self._group, self._room = peers, group, room
        self.begin([])

    def begin(self, messages: Sequence[Message]) -> None:
        """A new step, of these messages."""
        self._messages, self.posted = messages, 0
        self._waiting: deque[tuple[list[dist.Work], tuple[Tensor, ...], list[Tensor]]] = deque()
        self._used: deque[list[Tensor]] = deque()

    def post(self) -> None:
        """Let the next message come."""
        message = self._messages[self.posted]
        buffers = self._room.take(message, self._messages)
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
        self._room.give(self._used.popleft())


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


def _hold(buffers: Sequence[Tensor], message: Message) -> bool:
    """Whether there is room for a message in them."""
    return len(buffers) == len(message) and all(
        b.dtype == s.dtype and b.numel() >= s.numel for b, s in zip(buffers, message, strict=True)
    )


def _parts(tensors: Sequence[Tensor], peers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What each peer has of a message, of which it has as much as the others, to one element; of nothing, nothing."""
    for tensor in tensors:
        parts = tensor.view(-1).tensor_split(len(peers)) if len(peers) > 1 else [tensor]
        yield from ((peer, part) for peer, part in zip(peers, parts, strict=True) if part.numel())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank that is no part of the group"
    return work
