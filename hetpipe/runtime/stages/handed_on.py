"""What the first device of a split stage was given, handed on to the others, so that all compute with the same numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hetpipe.files.messages import InputError
from hetpipe.layers.model import Tensors, as_tuple, as_value, move
from hetpipe.layers.numbers import as_bytes, type_name
from hetpipe.layers.shards.sums import Group
from hetpipe.processes.whereabouts import waiting

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MOST = 64  # numbers that say what tensors there are: their types, and the lengths of their dimensions


def handed_on(tensors: Tensors | None, group: Group, device: torch.device) -> Tensors | None:
    """What the first device of the group gives, which others give nothing for, on each. InputError on each where it cannot be
    handed on. Collective over the group."""
    given = (
        tuple(t.detach().contiguous() for t in as_tuple(move(tensors, device)))
        if tensors is not None and not group.number
        else ()
    )
    told = [n for t in given if t.dtype in TYPES for n in (TYPES.index(t.dtype), t.ndim, *t.shape)]
    length = len(told) if all(t.dtype in TYPES for t in given) else MOST
    head = torch.tensor([length, *told[: MOST - 1], *[0] * (MOST - 1 - len(told))])
    with waiting():
        length, *known = _broadcast(head.to(device), group).tolist()
        if length >= MOST:
            raise InputError(
                f"what a stage is given that is split over {group.degree} devices cannot be handed on to all of them: it is more "
                f"than a few tensors, or of other types than {', '.join(map(type_name, TYPES))}"
            )
        found = [_broadcast(t, group) for t in (given or _empty(known[:length], device))]
    return as_value(found) if found else None


def _empty(told: list[int], device: torch.device) -> list[Tensor]:
    found, at = list[Tensor](), 0
    while at < len(told):
        end = at + 2 + told[at + 1]
        found.append(torch.empty(told[at + 2 : end], dtype=TYPES[told[at]], device=device))
        at = end
    return found


def _broadcast(tensor: Tensor, group: Group) -> Tensor:
    if tensor.numel():
        dist.broadcast(as_bytes(tensor.detach()), group.ranks[0], group=group.processes)
    return tensor
