"""The weights of a checkpoint as safetensors files, a few layers at a time: a model of transformers as a folder for
`from_pretrained`, any other under its own names."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hetpipe.checkpoints.base import check_adapted, check_numbers, numbers_of_base
from hetpipe.checkpoints.checkpoint import read_whole, tensors_in
from hetpipe.checkpoints.state_tensors import MODEL, model_faults, model_state
from hetpipe.checkpoints.stores.folder import stored_at
from hetpipe.checkpoints.stores.store import Stored
from hetpipe.checkpoints.training_state import read_saved
from hetpipe.files.messages import InputError, listed, natural_key
from hetpipe.files.writing import check_folder, make_folder, write_text
from hetpipe.hf.adapters.merged import check_mergeable, merged_layers
from hetpipe.hf.adapters.peft_folder import write_adapters
from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.folder import INDEX, WEIGHTS, WeightFolder
from hetpipe.hf.hub import COMPANIONS
from hetpipe.hf.stored import as_stored
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import adapter_of, lineage_of, tensors_of, uncompiled, written_names
from hetpipe.processes.world import alone
from hetpipe.spec.sections.adapter import AdapterSection

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
SHARD_BYTES = 1 << 30  # a process that writes holds so much, and one layer


def check_new_folder(folder: str | Path) -> None:
    """InputError if `export_weights` could not write into this folder, or would write beside what is there."""
    check_folder(folder)
    occupied = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    if occupied:
        raise InputError(f"the folder {folder} is not empty (it holds {occupied[0]!r}); name a new one")


def export_weights(
    layers: nn.Sequential | None, checkpoint: Path | Stored, folder: str | Path, *, merge: bool = False
) -> Path:
    """Write a checkpoint's weights into a new folder: safetensors files of about 1 GiB, and, where all `layers` are of
    transformers, what `from_pretrained` wants beside them; else tensors have the names that they have in the model. `layers` says
    what belongs where, and may be on the meta device (None: all that the checkpoint has of the model). No more than one file's
    tensors are in memory at a time. Of a model of transformers with adapters these alone are written, as peft does; with `merge`
    the whole model, to whose matrices they are added, each in the number type that it was read in. InputError if the checkpoint
    is damaged, or of another model."""
    check_new_folder(folder)
    saved = stored_at(checkpoint)
    available = tensors_in(saved, read_whole(saved).tensors)
    section = adapter_of(layers) if layers is not None else None
    if merge and section is None:
        raise InputError("there are no adapters to merge: name the job with its section 'adapter', or leave --merge out")
    adapted = layers is not None and section is not None and isinstance(_written(layers[0]), HFLayer)
    if merge and not adapted:
        raise InputError("only the adapters of models of transformers are merged: load the checkpoint (hetpipe.load_weights), "
                         "and add them in a program of your own")  # fmt: skip
    if layers is not None and section is not None and adapted:
        return _export_adapted(layers, section, saved, available, folder, merge=merge)
    if layers is not None and all(isinstance(uncompiled(layer), HFLayer) for layer in layers):
        return _export_folder(layers, saved, available, folder)
    if layers is not None and (faults := model_faults(available, model_state(layers), surplus=True)):
        raise InputError(f"checkpoint {checkpoint} is not of the job's model:\n{listed(faults)}")
    target = make_folder(folder)
    _write_shards(list(_plain_shards(available)), saved, target)
    return target


def _written(layer: nn.Module) -> nn.Module:
    found = lineage_of(layer)
    return uncompiled(layer) if found is None else found.written


def _export_adapted(
    layers: nn.Sequential, section: AdapterSection, saved: Stored, available: Mapping[str, Any], folder: str | Path, *,
    merge: bool,
) -> Path:  # fmt: skip
    """Adapters, or the whole model with them."""
    if faults := model_faults(available, model_state(layers), surplus=True):
        raise InputError(f"checkpoint {saved} is not of the job's model:\n{listed(faults)}")
    check_adapted(read_saved(saved), list(layers), saved)
    source = _written(layers[0])
    assert isinstance(source, HFLayer)
    origin = source.origin

    def read(name: str) -> Tensor:
        return saved.read_one(f"{MODEL}{name}")

    if not merge:
        return write_adapters(layers, section, origin, read, folder)
    check_mergeable(layers)
    target = make_folder(folder)
    parts = _of_its_base(merged_layers(layers, read), layers, saved)
    try:
        dtype = _write_files(_filled(parts), target, lambda tensors: as_stored(origin.model, tensors))
    except InputError:
        shutil.rmtree(target)
        raise
    origin.write_config(target, dtype)
    _copy_beside(origin, target)
    return target


def _of_its_base(parts: Iterable[dict[str, Tensor]], layers: nn.Sequential, saved: Stored) -> Iterator[dict[str, Tensor]]:
    """These parts of a model whose layers are read meanwhile. InputError at the end if it is another than it was in training."""
    yield from parts
    check_numbers(read_saved(saved).base_numbers, numbers_of_base(layers, alone()), saved)


def _filled(parts: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Layers' tensors, a file's at a time."""
    shard = dict[str, Tensor]()
    for part in parts:
        shard |= part
        if sum(t.numel() * t.element_size() for t in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _export_folder(layers: nn.Sequential, saved: Stored, available: Mapping[str, Any], folder: str | Path) -> Path:
    """As a folder that transformers loads."""
    shards = list(_shards(layers))
    missing = [key for shard in shards for key in shard.values() if key not in available]
    if missing:
        raise InputError(f"checkpoint {saved} has no {missing[0].removeprefix(MODEL)!r} ({len(missing)} tensors of the "
                         "model are not in it): it was saved from another model")  # fmt: skip
    origin, target = _own(layers[0]).origin, make_folder(folder)
    origin.write_config(target, _write_shards(shards, saved, target, lambda tensors: as_stored(origin.model, tensors)))
    _copy_beside(origin, target)
    return target


def _copy_beside(origin: Origin, target: Path) -> None:
    if origin.folder is not None:
        code = ("*.py",) if getattr(origin.model.config, "auto_map", None) else ()
        copy_companions(origin.folder, target, (*COMPANIONS, *code))


def copy_companions(source: WeightFolder, target: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """What lies beside the weights and is not changed by training: the tokenizer, above all."""
    for path in sorted({p for pattern in patterns for p in source.path.glob(pattern)}):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)


def _write_shards(shards: Iterable[Mapping[str, str]], saved: Stored, target: Path, stored: Convert = dict) -> torch.dtype:
    """Files of tensors of a checkpoint, by their keys there (see `_write_files`)."""
    return _write_files(({name: saved.read_one(key) for name, key in shard.items()} for shard in shards), target, stored)


def _write_files(parts: Iterator[dict[str, Tensor]], target: Path, stored: Convert = dict) -> torch.dtype:
    """The files and, for more than one, their index; returns the type of most of their numbers. `stored`: from what a
    file's tensors are called and look like in the model to how they are stored."""
    files, total, dtypes = list[list[str]](), 0, Counter[torch.dtype]()
    while (part := next(parts, None)) is not None:
        tensors = stored(part)
        save_file(tensors, target / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(tensors))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        for tensor in filter(torch.is_floating_point, tensors.values()):
            dtypes[tensor.dtype] += tensor.numel()
        part = tensors = {}  # before the next is read
    weight_map = dict[str, str]()
    for number, names in enumerate(files):
        file = WEIGHTS if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (target / f"part-{number}").rename(target / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(target / INDEX, json.dumps(index, indent=2) + "\n")
    return max(dtypes, key=lambda dtype: dtypes[dtype], default=torch.float32)


def _own(layer: nn.Module) -> HFLayer:
    found = uncompiled(layer)
    assert isinstance(found, HFLayer)
    return found


def _stored_tensors(name: str, layer: HFLayer) -> dict[str, Tensor]:
    """The layer's tensors; InputError where one of those that belong in a folder has another name, or others have joined them."""
    written = written_names(layer)
    found = {written(own): tensor for own, tensor in tensors_of(layer).items()}
    strange = [own for own in found if own not in layer.hf_names]
    if strange:
        raise InputError(f"layer {name!r} has {strange[0]!r} ({len(strange)} such), for which a folder of transformers has no "
                         "place: add adapters with a job's section 'adapter', or merge them and save with save_pretrained; "
                         "the checkpoint's own safetensors files hold both")  # fmt: skip
    return found


def _shards(layers: nn.Sequential) -> Iterator[dict[str, str]]:
    """Name in the model of transformers → key in the checkpoint, one mapping a file; a tied parameter once."""
    shard, size, seen = dict[str, str](), 0, set[str]()
    for name, layer in [(name, _own(layer)) for name, layer in named_layers(layers)]:
        tensors = _stored_tensors(name, layer)
        for own, stored in layer.stored_names.items():
            if stored not in seen:
                seen.add(stored)
                shard[stored] = f"{MODEL}{name}.{own}"
                size += tensors[own].numel() * tensors[own].element_size()
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _plain_shards(available: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Name in the model → key in the checkpoint, one mapping a file; a tied parameter under each of its names."""
    shard, size = dict[str, str](), 0
    for key in sorted((key for key in available if key.startswith(MODEL)), key=natural_key):
        shard[key.removeprefix(MODEL)] = key
        size += available[key].size.numel() * available[key].properties.dtype.itemsize
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
