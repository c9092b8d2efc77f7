"""Named tensors in safetensors files, which all ranks write and read together, by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hetpipe.checkpoints.stores.store import RankError
from hetpipe.processes.whereabouts import during
from hetpipe.processes.world import World


def write_tensors(tensors: dict[str, Tensor], folder: Path, world: World) -> list[str]:
    """Write this rank's tensors into a file of its own; returns its name, or none where others write them all. RankError on every
    rank if one cannot."""
    writer = _Writer(folder)
    with _failures_told(world), _quiet():
        state_dict_saver.save(tensors, storage_writer=writer, process_group=world.control, no_dist=world.control is None)
    return writer.written


def read_tensors(wanted: dict[str, Tensor], folder: Path, world: World) -> None:
    """Fill these tensors with what the files hold under their names. RankError on every rank if one cannot."""
    reader = HuggingFaceStorageReader(str(folder))
    with _failures_told(world), _quiet():
        state_dict_loader.load(wanted, storage_reader=reader, process_group=world.control, no_dist=world.control is None)


def folder_tensors(folder: Path) -> dict[str, Any]:
    """What the files say of each tensor, by its key."""
    return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes of torch's about its own deprecated calls
        yield


class _Writer(HuggingFaceStorageWriter):
    """Every rank writes a file of its own, and knows which (one whose tensors others write, too, may have none)."""

    def __init__(self, folder: Path) -> None:
        known = signature(HuggingFaceStorageWriter).parameters  # torch 2.8 has another name for that
        each: dict[str, Any] = {name: True for name in ("save_distributed", "save_sharded") if name in known}
        super().__init__(str(folder), **each)
        self.written: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with during("writing its part of the checkpoint"):
            future = super().write_data(plan, planner)
            results = future.wait()
        self.written = list(dict.fromkeys(result.storage_data.relative_path for result in results))
        return future


@contextmanager
def _failures_told(world: World) -> Iterator[None]:
    """torch's CheckpointException, which is no Exception, is told as the OSError of the first rank that failed. A rank that was
    interrupted (KeyboardInterrupt, SystemExit, RunStopped) interrupts all."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: found for rank, (found, _) in sorted(error.failures.items())}
        for found in failures.values():
            if not isinstance(found, Exception):
                raise found from error
        rank, first = next(iter(failures.items()))
        number = world.ranks[rank]
        host = f" on host {world.hosts[number]}" if world.hosts else ""
        where = f"rank {number}{host}: " if len(world.ranks) > 1 else ""
        raise RankError(f"{where}{type(first).__name__}: {first}") from first
