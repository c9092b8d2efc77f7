"""State by layer: torch.distributed.checkpoint over safetensors files, keyed by the whole model's names, so that a run saved
under one plan goes on under any other. A checkpoint is complete or absent: it is written beside its place and then renamed.

All ranks write to the same folder (a shared file system on several machines).
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from hetpipe.checkpoints.training_state import TrainerState
from hetpipe.files.folders import check_room
from hetpipe.files.messages import InputError, listed
from hetpipe.files.units import human_bytes
from hetpipe.files.writing import write_text
from hetpipe.layers.weights import plain_name, state_of
from hetpipe.processes.stopping import RunError
from hetpipe.processes.world import World

STATE_FILE = "trainer.json"
SMALL = 2  # in each dimension of a parameter that shows what an optimizer keeps


def _names(stage: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(plain_name(name))
    return names


def model_state(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the whole model; a tied parameter under each of its names."""
    return {f"model.{name}": tensor.detach() for name, tensor in state_of(stage).items()}


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


class CheckpointError(RunError):
    """A checkpoint could not be written; those that were are as they were."""


def save(
    folder: str | Path,
    step: int,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    world: World,
    keep: int,
) -> Path:
    """Save one checkpoint from all ranks; then keep only the newest `keep`. `extra` is plain data (sampler, schedule). On every
    rank InputError if there is no room for it, CheckpointError if it cannot be written: nothing of it is left then."""
    world = world.patiently()
    final = Path(folder) / f"step-{step:08d}"
    partial = final.with_name(final.name + ".partial")
    tensors = model_state(stage) | optimizer_state(stage, optimizer)
    sizes = {key: size for part in world.gather({k: t.numel() * t.element_size() for k, t in tensors.items()})
             for key, size in part.items()}  # fmt: skip
    needed = sum(sizes.values())
    world.on_main(lambda: _prepare(partial, needed, step))
    try:
        tensors = _separate(tensors)
        with _quiet():
            state_dict_saver.save(
                tensors,
                storage_writer=_writer(partial),
                process_group=world.control,
                no_dist=world.control is None,
            )
    except Exception as error:  # raised on every rank, whichever could not write
        world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise CheckpointError(_not_saved(final, needed, error)) from error
    state = {"format": "hetpipe.checkpoint/1", "step": step, "tensors": len(sizes), **extra}
    world.on_main(lambda: _complete(partial, final, state, needed, keep))
    return final


def _writer(folder: Path) -> HuggingFaceStorageWriter:
    """Every rank writes a file of its own; torch 2.8 has another name for that."""
    known = signature(HuggingFaceStorageWriter).parameters
    each: dict[str, Any] = {name: True for name in ("save_distributed", "save_sharded") if name in known}
    return HuggingFaceStorageWriter(str(folder), **each)


def _prepare(partial: Path, needed: int, step: int) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    check_room(partial.parent, needed, f"the checkpoint of step {step}")
    partial.mkdir(parents=True)


def _complete(partial: Path, final: Path, state: dict[str, Any], needed: int, keep: int) -> None:
    try:
        write_text(partial / STATE_FILE, json.dumps(state, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(_not_saved(final, needed, error)) from error
    for old in list_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old)


def _not_saved(final: Path, needed: int, error: Exception) -> str:
    free = shutil.disk_usage(final.parent).free
    return (
        f"cannot write the checkpoint {final}: it needs {human_bytes(needed)}, and {human_bytes(free)} are free there; "
        f"{type(error).__name__}: {error}"
    )


def read_state(checkpoint: Path) -> TrainerState:
    """The plain part of a checkpoint."""
    return TrainerState.load(checkpoint / STATE_FILE)


StateKeys = Callable[[nn.Parameter], dict[str, Tensor]]  # what an optimizer keeps of such a parameter


def load(checkpoint: Path, stage: nn.Module, optimizer: torch.optim.Optimizer | None, world: World, *,
         whole: nn.Module | None = None, tensors: int | None = None, keeps: StateKeys | None = None) -> None:  # fmt: skip
    """Load this stage's part, whatever the plan under which it was saved. All ranks go on together.

    InputError on every rank, before anything is changed, where the checkpoint is of something else: `whole` is the model of which
    `stage` is a part, `tensors` how many the checkpoint had when it was saved, `keeps` what the optimizer keeps of a parameter
    (None: not compared)."""
    world = world.patiently()
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        available: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    except Exception as error:  # whatever safetensors says of a damaged file
        raise InputError(
            f"cannot read checkpoint {checkpoint}: {type(error).__name__}: {error}; remove it to go on from the one before"
        ) from error
    if tensors is not None and len(available) != tensors:
        raise InputError(
            f"checkpoint {checkpoint} holds {len(available)} tensors, and {tensors} were saved: a file is missing, or was "
            "changed; remove it to go on from the one before"
        )
    wanted: dict[str, Tensor] = model_state(stage)
    faults = _model_faults(available, model_state(whole) if whole is not None else wanted, surplus=whole is not None)
    if optimizer is not None:
        wanted |= _empty_optimizer_state(stage, optimizer, available)
        if keeps is not None and not faults:
            faults += _optimizer_faults(stage, optimizer, available, keeps)
    faults = list(dict.fromkeys(fault for part in world.gather(faults) for fault in part))
    if faults:
        raise InputError(
            f"checkpoint {checkpoint} is of something else; name another checkpoint.folder to start anew:\n{listed(faults)}"
        )
    with _quiet():
        state_dict_loader.load(
            wanted, storage_reader=reader, process_group=world.control, no_dist=world.control is None
        )
    if optimizer is not None:
        _install(stage, optimizer, wanted)
    world.barrier()


def _model_faults(available: Mapping[str, Any], own: Mapping[str, Tensor], *, surplus: bool) -> list[str]:
    """Where the model's tensors are others than those that were saved."""
    faults = []
    for key, tensor in own.items():
        name, there = repr(key.removeprefix("model.")), available.get(key)
        if there is None:
            faults.append(f"it has no {name}, which the model has")
        elif tuple(there.size) != tuple(tensor.shape):
            faults.append(f"{name} has shape {tuple(there.size)}, in the model {tuple(tensor.shape)}")
        elif there.properties.dtype != tensor.dtype:
            faults.append(f"{name} is {_kind(there.properties.dtype)}, in the model {_kind(tensor.dtype)} (train.dtype)")
    if surplus:
        more = sorted(key for key in available if key.startswith("model.") and key not in own)
        faults += [f"it has {key.removeprefix('model.')!r}, which the model has not" for key in more]
    return faults


def _optimizer_faults(
    stage: nn.Module, optimizer: torch.optim.Optimizer, available: Mapping[str, Any], keeps: StateKeys
) -> list[str]:
    """Where what was saved of a parameter is not what this optimizer keeps of it."""
    trained, saved, faults = {p for g in optimizer.param_groups for p in g["params"]}, _saved_state(available), []
    for parameter, names in _names(stage).items():
        there = saved.get(names[0], {})
        if parameter not in trained or not there:
            continue
        own = keeps(parameter)
        if there.keys() != own.keys():
            kept = ", ".join(sorted(own)) or "nothing"
            faults.append(f"of {names[0]!r} it has {', '.join(sorted(there))}; the job's optimizer keeps {kept}")
            continue
        for key, like in own.items():
            found, dtype = tuple(there[key].size), there[key].properties.dtype
            whole = like.ndim > 0 and tuple(like.shape) == (SMALL,) * parameter.ndim
            if (whole and found != tuple(parameter.shape)) or len(found) != like.ndim or (whole and dtype != like.dtype):
                faults.append(
                    f"{key} of {names[0]!r} is {_kind(dtype)} {found}, the parameter {_kind(like.dtype)} {tuple(parameter.shape)}"
                )
    return faults


def _saved_state(available: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameter name → key → what is known of the tensor."""
    found: dict[str, dict[str, Any]] = {}
    for key, meta in available.items():
        if key.startswith("optimizer."):
            name, _, kept = key.removeprefix("optimizer.").rpartition(".")
            found.setdefault(name, {})[kept] = meta
    return found


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_keys(factory: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> StateKeys:
    """What the optimizer keeps of a parameter, from a step of a small one of its kind."""
    known: dict[tuple[int, torch.dtype, torch.device], dict[str, Tensor]] = {}

    def keeps(parameter: nn.Parameter) -> dict[str, Tensor]:
        kind = parameter.ndim, parameter.dtype, parameter.device
        if kind not in known:
            small = nn.Parameter(torch.zeros((SMALL,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
            small.grad = torch.zeros_like(small)
            optimizer = factory([small])
            optimizer.step()
            known[kind] = {
                key: value if isinstance(value, Tensor) else torch.tensor(value)
                for key, value in optimizer.state[small].items()
                if value is not None
            }
        return known[kind]

    return keeps


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
