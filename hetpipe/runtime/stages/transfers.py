"""What crosses a boundary of a pipeline: the micro-batches of one way, in their order, by torch.distributed's isend and irecv.

Each way of each boundary has a lane of its own, in which both ends name the same messages in the same order, so that no message
waits for one of another way. gloo tells ways apart by sender and receiver; NCCL gives each pair of a group one communicator and
one stream, in which what was started first ends first: there each way has a group of its own (`replicas.Lanes`). On both, a
message moves once its receive is posted, and neither call waits for it.

The other end is one rank; where a stage is split over several devices, it may be several. All devices of a split stage have the
whole of what leaves it, so each sends pieces only (`documents.seats`), and what enters such a stage in pieces is put together
within its group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.layers.device import MemoryMeter
from hetpipe.layers.numbers import as_bytes
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.split import TensorSpec
from hetpipe.processes.whereabouts import waiting

Message = Sequence[TensorSpec]  # the tensors of one micro-batch


class Side(NamedTuple):
    """The ranks with which this one exchanges what crosses one boundary: one for each of its pieces, of which the first is piece
    `first` of so many `pieces`. `group`: with which it shares its stage, if that is split."""

    peers: Sequence[int]
    first: int = 0
    pieces: int = 1
    group: Group | None = None

    def parts(self, flat: Tensor, numel: int) -> list[tuple[int, Tensor]]:
        """(peer, part) of what the peers have of a tensor of so many numbers: as much as each other, but for the last."""
        if self.pieces == 1:
            return [(self.peers[0], flat[:numel])] if numel else []
        size = self.size(numel)
        ends = [min(at * size, numel) for at in range(self.first, self.first + len(self.peers) + 1)]
        return [(peer, flat[a:b]) for peer, (a, b) in zip(self.peers, pairwise(ends), strict=True) if a < b]

    def size(self, numel: int) -> int:
        """Numbers of a piece."""
        return -(-numel // self.pieces)

    def put_together(self, buffer: Tensor, numel: int) -> None:
        """What each device of the group has received of such a tensor, all have. Collective over the group."""
        if self.group is None or not numel:
            return
        own, size = len(self.peers), self.size(numel)
        pieces = self.group.gather(buffer[self.first * size : (self.first + own) * size])
        torch.cat([as_bytes(piece) for piece in pieces], out=as_bytes(buffer[: self.pieces * size]))


class Room:
    """Receive buffers for what comes one way into a stage. Its runs, of which one is at work at a time, take them in turn."""

    def __init__(self, device: torch.device, meter: MemoryMeter | None, pieces: int = 1) -> None:
        self._device, self._meter, self._pieces = device, meter, pieces
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
        sizes = [(max(s.numel for s in c), c[0].dtype) for c in columns]
        rounded = ((-(-numel // self._pieces) * self._pieces, dtype) for numel, dtype in sizes)
        buffers = [torch.empty(numel, dtype=dtype, device=self._device) for numel, dtype in rounded]
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
    """Messages from the neighbours of a side. A buffer is in use from `post` to `release`, and then used again, in later steps,
    too, where it has the room: there are as many as were ever in use at once."""

    def __init__(self, side: Side, group: dist.ProcessGroup, room: Room) -> None:
        self._side, self._group, self._room = side, group, room
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
        parts = (own for b, s in zip(buffers, message, strict=True) for own in self._side.parts(b, s.numel))
        works = [_started(dist.irecv(part, peer, group=self._group)) for peer, part in parts]
        self._waiting.append((works, tensors, buffers))
        self.posted += 1

    def take(self) -> tuple[Tensor, ...]:
        """The oldest message that was posted and not yet taken, when it is there."""
        works, tensors, buffers = self._waiting.popleft()
        for work in works:
            work.wait()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            self._side.put_together(buffer, tensor.numel())
        self._used.append(buffers)
        return tensors

    def release(self) -> None:
        """The oldest message that was taken is no longer needed."""
        self._room.give(self._used.popleft())


class Outgoing:
    """Messages to the neighbours of a side. Each is kept until `settle`."""

    def __init__(self, side: Side, group: dist.ProcessGroup) -> None:
        self._side, self._group = side, group
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()
        self._settled = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Let the next message go."""
        parts = (own for t in tensors for own in self._side.parts(t.contiguous().view(-1), t.numel()))
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


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank that is no part of the group"
    return work
