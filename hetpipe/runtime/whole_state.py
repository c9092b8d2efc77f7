"""The whole model's parameters and buffers on one rank, from all that hold parts of it, one tensor after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.layers.numbers import as_bytes
from hetpipe.layers.shards.split import pieces_in
from hetpipe.layers.transforms import tensors_of, written_names
from hetpipe.layers.weights import state_of
from hetpipe.processes.world import World


def whole_state(layers: nn.Sequential, stage: nn.Module, world: World) -> dict[str, Tensor] | None:
    """On the main rank, the state of all `layers` in memory of its own on the CPU; None on the others, each of which copies no
    more than one tensor of its `stage` at a time, and puts that together if it has a shard of it. A tensor that several ranks
    hold comes from the first of them; one that has several names is one object under each. Collective."""
    world = world.patiently()
    own, written = state_of(stage), written_names(stage)
    pieces = {written(name): piece for name, piece in pieces_in(stage).items()}
    shapes = {name: pieces[name].whole_shape(t.shape) if name in pieces else tuple(t.shape) for name, t in own.items()}
    held = world.gather({name: (shapes[name], tensor.dtype, name in pieces) for name, tensor in own.items()})
    first_name, found = _first_names(layers), dict[str, Tensor]()
    for name in state_of(layers):
        if first_name.get(name, name) != name:
            continue
        position = next(i for i, part in enumerate(held) if name in part)
        source = world.ranks[position]
        piece = pieces.get(name)
        if held[position][name][2]:
            world.barrier()  # its owners wait for each other no longer than in a step, and one may still send another tensor
        if piece is not None and source in piece.group.ranks:
            own[name] = piece.joined(own[name])
        if world.is_main and source == world.rank:
            found[name] = own[name].detach().to("cpu", copy=True)
        elif world.is_main:
            shape, dtype, _ = held[position][name]
            found[name] = receive_tensor(shape, dtype, source, world)
        elif source == world.rank:
            send_tensor(own[name].detach().cpu(), min(world.ranks), world)
        if piece is not None:
            del own[name]
    if not world.is_main:
        return None
    return {name: found[first_name.get(name, name)] for name in state_of(layers)}


def _first_names(layers: nn.Sequential) -> dict[str, str]:
    """The name of each tensor → the first of all its names."""
    first, written = dict[int, str](), written_names(layers)
    return {written(name): first.setdefault(id(tensor), written(name)) for name, tensor in tensors_of(layers).items()}


def send_tensor(tensor: Tensor, to: int, world: World) -> None:
    """A tensor on the CPU, to a rank that calls `receive_tensor`."""
    if tensor.numel():
        dist.send(as_bytes(tensor.contiguous()), to, group=world.control)


def receive_tensor(shape: Sequence[int], dtype: torch.dtype, source: int, world: World) -> Tensor:
    """What the rank `source` sends, on the CPU."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        dist.recv(as_bytes(tensor), source, group=world.control)
    return tensor
