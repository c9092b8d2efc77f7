"""The buffers of layers that several replicas hold, where forwards may change them (BatchNorm that trains, layers that keep state
and that the user has accepted). Each replica's see its own samples. So that replicas stay one model, after each step all take
over those of the replica that had most samples in it; of several, the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.files.messages import InputError
from hetpipe.layers.batch_norm import may_normalise_batches
from hetpipe.layers.weights import fingerprint
from hetpipe.processes.world import World
from hetpipe.runtime.replicas import OwnerGroup

Name = str  # of a buffer, in the whole model


class SharedBuffers:
    """The buffers of one rank's layers (`stage`), group by group. `device`: on which a process of several devices sends."""

    def __init__(
        self,
        stage: nn.Sequential,
        groups: Sequence[OwnerGroup],
        world: World,
        process_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        device: torch.device | None = None,
    ) -> None:
        self._stage, self._world, self._device = stage, world, device
        found = ((group, process_groups.get(tuple(sorted(set(group.ranks))))) for group in groups)
        self._groups = [(group, process_group) for group, process_group in found if process_group is not None]
        self._statistics = {f"{m}.{b}" for m, module in may_normalise_batches(stage) for b in module._buffers}
        self._seen = self._now()
        self._changing: set[Name] = set()

    def _buffers(self, layers: Iterable[str]) -> dict[Name, Tensor]:
        return {
            f"{layer}.{name}" if name else layer: buffer
            for layer in layers
            for name, buffer in self._stage.get_submodule(layer).named_buffers(remove_duplicate=False)
        }

    def _now(self) -> dict[Name, tuple[Tensor, int]]:
        every = (name for group, _ in self._groups for name in group.layers)
        return {name: (buffer, buffer._version) for name, buffer in self._buffers(every).items()}

    def difference(self) -> str | None:
        """What is said where the owners of a group hold different buffers, by a hash of them. Collective over each group."""
        different = None
        for group, process_group in self._groups:
            held = [buffer for buffer in self._buffers(group.layers).values() if buffer.numel()]
            if not held:
                continue
            own = fingerprint([buffer.detach() for buffer in held])
            extremes = torch.stack([own, -own]).to(self._device or own.device)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=process_group)
            if different is None and int(extremes[0]) != -int(extremes[1]):
                different = group
        if different is None:
            return None
        return f"the replicas of {different.name} (ranks {list(different.ranks)}) hold different buffers"

    def look(self) -> None:
        """Which buffers have forwards changed, on any rank? InputError on every rank if replicas have made them of different
        shapes. Collective over all ranks."""
        now, before = self._now(), self._seen
        self._seen = now
        moved = {
            name
            for name, (buffer, version) in now.items()
            if name not in before or before[name][0] is not buffer or before[name][1] != version
        }
        own = {name: tuple(now[name][0].shape) for name in now if name in moved | self._statistics | self._changing}
        shapes: dict[Name, tuple[int, ...]] = {}
        for part in self._world.gather(own):
            for name, shape in part.items():
                if shapes.setdefault(name, shape) != shape:
                    raise InputError(
                        f"the buffer {name!r} has the shape {shape} in one replica and {shapes[name]} in another: what layers "
                        "keep must not depend on how many samples a replica is given"
                    )
        self._changing = set(shapes)

    def make_equal(self, given: Sequence[float]) -> None:
        """A step is over in which replicas were given so many samples. Collective over each group."""
        source = max(range(len(given)), key=lambda replica: (given[replica], -replica))
        for group, process_group in self._groups:
            held = [buffer for name, buffer in self._buffers(group.layers).items() if name in self._changing and buffer.numel()]
            for dtype in dict.fromkeys(buffer.dtype for buffer in held):
                self._broadcast([b for b in held if b.dtype == dtype], group.lead(source), process_group)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, process_group: dist.ProcessGroup) -> None:
        device = self._device or buffers[0].device
        whole = torch.cat([buffer.detach().to(device).reshape(-1) for buffer in buffers])
        message = whole.view(torch.uint8)  # gloo does not know every type
        dist.broadcast(message, source, group=process_group)
        if self._world.rank != source:
            with torch.no_grad():
                for buffer, part in zip(buffers, torch.split(whole, [b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view(buffer.shape))
