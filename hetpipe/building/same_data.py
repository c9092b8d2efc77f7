"""Whether all ranks read the same data: how many samples there are, and a few of them, since files may lie in another order on
another host. And whether a sample is the same each time it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetpipe.building.data import MapDataset, fetch
from hetpipe.files.messages import InputError
from hetpipe.layers.model import as_tuple
from hetpipe.processes.progress import warn
from hetpipe.processes.world import World

LOOKED_AT = 4  # samples
ROUNDED = 1e-3  # by which what another processor has computed may differ

Marks = list[list[float]]  # of each sample that was looked at, a number for each of its tensors


def check_same_data(data: MapDataset, seed: int, world: World) -> None:
    """InputError on every rank if they read other data; a note if a sample is another each time it is read, though under one
    seed. Collective."""
    size = len(data)  # type: ignore[arg-type]
    numbers = sorted({round(i * (size - 1) / (LOOKED_AT - 1)) for i in range(LOOKED_AT)})
    marks, again = (_marks(data, numbers, seed) for _ in range(2))
    changing = next((number for number, *both in zip(numbers, marks, again, strict=True) if not _alike(*both)), None)
    if changing is not None and world.is_main:
        warn(
            f"note: sample {changing} of {type(data).__name__} is another each time it is read, though under one seed: it draws "
            "from a generator, a counter or a clock of its own. Another plan, and a run that goes on from a checkpoint, read "
            "other samples than this run; what torch's, NumPy's and Python's own generators give is the same in all of them"
        )
    every = world.gather((size, marks if changing is None else None))
    for rank, (other_size, other) in zip(world.ranks, every, strict=True):
        where = f"rank {rank} on host {world.hosts[rank]}" if world.hosts else f"rank {rank}"
        if other_size != every[0][0]:
            raise InputError(
                f"the ranks read other data: rank {world.ranks[0]} has {every[0][0]} training samples, and {where} has "
                f"{other_size}; give all hosts the same files"
            )
        if None in (other, every[0][1]):
            continue
        for number, *both in zip(numbers, every[0][1], other, strict=True):
            if not _alike(*both):
                raise InputError(
                    f"the ranks read other data: sample {number} of {type(data).__name__} is another on {where} than on rank "
                    f"{world.ranks[0]}; give all hosts the same files, and read them in one order (sorted(os.listdir(…)))"
                )


def _marks(data: MapDataset, numbers: Sequence[int], seed: int) -> Marks:
    columns = [_mark(t) for part in fetch(data, torch.tensor(numbers), seed, 0) for t in as_tuple(part)]
    return [list(row) for row in zip(*columns, strict=True)]


def _mark(rows: Tensor) -> list[float]:
    """A number for each row, in which each of its values counts otherwise."""
    flat: Any = (torch.view_as_real(rows) if rows.is_complex() else rows).unsqueeze(-1).flatten(1).double()
    found: list[float] = (flat * torch.linspace(1, 2, flat.shape[1], dtype=torch.float64)).sum(1).tolist()
    return found


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    both = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=ROUNDED, abs_tol=ROUNDED) or (math.isnan(a) and math.isnan(b)) for a, b in both
    )
