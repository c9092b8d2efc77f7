"""State by layer: torch.distributed.checkpoint over safetensors files, keyed by the whole model's names, so that a run saved
under one plan goes on under any other. A checkpoint is complete or absent: it is written beside its place and then renamed.

All ranks write to the same folder (a shared file system on several machines).
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from hetpipe.formats import InputError, write_text
from hetpipe.training_state import TrainerState
from hetpipe.world import World

STATE_FILE = "trainer.json"


def _names(stage: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def model_state(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the whole model; a tied parameter under each of its names."""
    return {f"model.{name}": tensor.detach() for name, tensor in stage.state_dict().items()}


def optimizer_state(stage: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer tensors as `optimizer.<parameter name>.<key>`."""
    names, found = _names(stage), dict[str, Tensor]()
    for parameter, values in optimizer.state.items():
        assert isinstance(parameter, nn.Parameter)
        for key, value in values.items():
            if value is None:  # SGD without momentum keeps an empty place
                continue
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            found |= {f"optimizer.{name}.{key}": tensor.detach() for name in names.get(parameter, [])}
    return found


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and each with a storage of its own, as safetensors wants it: tied parameters are written under each name."""
    seen: set[int] = set()
    found = {}
    for key, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        found[key] = tensor.clone() if address in seen else tensor.contiguous()
        seen.add(address)
    return found


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(
        p
        for p in Path(folder).glob("step-*")
        if (p / STATE_FILE).exists() and not p.name.endswith(".partial")
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes of torch's about its own deprecated calls
        yield


def save(
    folder: str | Path,
    step: int,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    world: World,
    keep: int,
) -> Path:
    """Save one checkpoint from all ranks; then keep only the newest `keep`. `extra` is plain data (sampler, schedule)."""
    world = world.patiently()
    final = Path(folder) / f"step-{step:08d}"
    partial = final.with_name(final.name + ".partial")
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    tensors = model_state(stage) | optimizer_state(stage, optimizer)
    tensors = _separate(tensors)
    with _quiet():
        state_dict_saver.save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=world.control,
            no_dist=world.control is None,
        )
    world.barrier()
    if world.is_main:
        write_text(
            partial / STATE_FILE,
            json.dumps({"format": "hetpipe.checkpoint/1", "step": step, **extra}, indent=1),
        )
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    world.barrier()
    return final


def read_state(checkpoint: Path) -> TrainerState:
    """The plain part of a checkpoint."""
    return TrainerState.load(checkpoint / STATE_FILE)


def load(checkpoint: Path, stage: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> None:
    """Load this stage's part, whatever the plan under which it was saved. InputError naming the first mismatch. All ranks go on
    together."""
    world = world.patiently()
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        available: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    except Exception as error:  # whatever safetensors says of a damaged file
        raise InputError(
            f"cannot read checkpoint {checkpoint}: {type(error).__name__}: {error}; remove it to go on from the one before"
        ) from error
    wanted: dict[str, Tensor] = model_state(stage)
    for key, tensor in wanted.items():
        if key not in available:
            raise InputError(
                f"checkpoint {checkpoint} has no {key.removeprefix('model.')!r}: it was saved from another model"
            )
        if tuple(available[key].size) != tuple(tensor.shape):
            raise InputError(
                f"checkpoint {checkpoint}: {key.removeprefix('model.')!r} has shape {tuple(available[key].size)}, "
                f"the model {tuple(tensor.shape)}"
            )
    if optimizer is not None:
        wanted |= _empty_optimizer_state(stage, optimizer, available)
    with _quiet():
        state_dict_loader.load(
            wanted, storage_reader=reader, process_group=world.control, no_dist=world.control is None
        )
    if optimizer is not None:
        _install(stage, optimizer, wanted)
    world.barrier()


def _empty_optimizer_state(
    stage: nn.Module, optimizer: torch.optim.Optimizer, available: dict[str, Any]
) -> dict[str, Tensor]:
    groups = optimizer.param_groups
    trained = {p for group in groups for p in group["params"]}
    counted_there = {
        p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]
    }
    wanted = {}
    for parameter, names in _names(stage).items():
        prefix = f"optimizer.{names[0]}."
        for key, meta in available.items():
            if parameter in trained and key.startswith(prefix) and "." not in key[len(prefix) :]:
                wanted[key] = torch.empty(
                    meta.size,
                    dtype=meta.properties.dtype,
                    device=parameter.device if len(meta.size) or parameter in counted_there else "cpu",
                )
    return wanted


def _install(stage: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Tensor]) -> None:
    for parameter, names in _names(stage).items():
        prefix = f"optimizer.{names[0]}."
        values = {key[len(prefix) :]: value for key, value in loaded.items() if key.startswith(prefix)}
        if values:
            optimizer.state[parameter] = dict(values)
