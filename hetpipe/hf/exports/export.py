"""The weights of a checkpoint as safetensors files, a few layers at a time: a model of transformers as a folder for
`from_pretrained`, any other under its own names."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.checkpoint import read_whole, tensors_in
from hetpipe.checkpoints.origin.base import adapter_said, check_adapted
from hetpipe.checkpoints.origin.base_numbers import check_numbers, numbers_of_base
from hetpipe.checkpoints.origin.configured import check_config
from hetpipe.checkpoints.state_tensors import MODEL, model_faults
from hetpipe.checkpoints.stores.layout import Described
from hetpipe.checkpoints.stores.store import Store, Stored
from hetpipe.checkpoints.stores.tensor_files import PartTensors, save_tensors
from hetpipe.checkpoints.trained import find_checkpoint
from hetpipe.checkpoints.training_state import LoopState, TrainerState, read_saved
from hetpipe.documents.sections.adapter import AdapterSection
from hetpipe.files.formats import validated
from hetpipe.files.messages import InputError, listed, natural_key
from hetpipe.files.writing import check_folder, make_folder, write_text
from hetpipe.hf.adapters.merged import check_mergeable, merged_layers
from hetpipe.hf.adapters.peft_folder import Base, write_adapters, write_named
from hetpipe.hf.chain import HFLayer, Origin
from hetpipe.hf.exports import diffusion
from hetpipe.hf.exports.beside import write_beside
from hetpipe.hf.exports.diffusion import stored_names, transformer_of, write_lora
from hetpipe.hf.folder import WEIGHTS
from hetpipe.hf.stored import as_stored
from hetpipe.layers.adapters.adapt import adapter_of
from hetpipe.layers.adapters.names import Trained, split_kind, trained_in
from hetpipe.layers.model import named_layers
from hetpipe.layers.transforms import lineage_of, tensors_of, uncompiled, written_names
from hetpipe.processes.world import alone

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
INDEX_OF = "{}.index.json"
SHARD_BYTES = 1 << 30  # a process that writes holds so much, and one layer


def check_new_folder(folder: str | Path) -> None:
    """InputError if `export_weights` could not write into this folder, or would write beside what is there."""
    check_folder(folder)
    occupied = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    if occupied:
        raise InputError(f"the folder {folder} is not empty (it holds {occupied[0]!r}); name a new one")


def export_weights(
    model: nn.Sequential | None, checkpoint: str | os.PathLike[str] | Store | Stored, folder: str | Path, *, merge: bool = False
) -> Path:
    """Write a checkpoint's weights into a new folder, in safetensors files of about 1 GiB; no more than one file's tensors are in
    memory at a time.

    Args:
        model: says what belongs where, and may be on the meta device: the chain as it was built for training. None: all that the
            checkpoint has of it.
        checkpoint: one, or a folder of them, or another store, of which the newest is taken.
        folder: of a model of transformers, for `from_pretrained`; of others under the names that tensors have in the model. Of a
            model with adapters these alone, for peft: for the library's model, where layers say its names (`library_names`), else
            for the nn.Sequential itself.
        merge: of a model of transformers with adapters, write the whole, with these added to its matrices, each in the number
            type that it was read in.

    Raises:
        InputError: the checkpoint is damaged, or of another model, or peft would not load what is written.
    """
    check_new_folder(folder)
    saved = checkpoint if isinstance(checkpoint, Stored) else find_checkpoint(checkpoint)
    state = read_whole(saved)
    available = tensors_in(saved, state.tensors)
    section = adapter_of(model) if model is not None else None
    if model is not None:
        check_config(getattr(state, "job", None) or getattr(state, "loop", None), model, saved)
    if merge and section is None:
        raise _unmerged(said=model is None and bool(adapter_said(state)))
    if model is None and adapter_said(state):
        target = _export_named(state, saved, available, folder)
    elif model is not None and section is not None:
        target = _export_adapted(model, section, saved, available, folder, merge=merge)
    elif model is not None and all(isinstance(uncompiled(layer), HFLayer) for layer in model):
        target = _export_folder(model, saved, available, folder)
    elif model is not None and (transformer := transformer_of(model)) is not None:
        target = _export_plain(model, saved, available, folder, stored_names(model), diffusion.WEIGHTS)
        transformer.save_config(str(target))
    else:
        names = {key.removeprefix(MODEL): key for key in sorted(available, key=natural_key) if key.startswith(MODEL)}
        target = _export_plain(model, saved, available, folder, names)
    write_beside(target, _origin_of(model), state, whole=section is None or merge)
    return target


def _unmerged(*, said: bool) -> InputError:
    """`said`: by a checkpoint that is all that there is."""
    what = "a checkpoint alone does not say to which model its adapters are added" if said else "there are no adapters to merge"
    return InputError(
        f"{what}: name the job with its section 'adapter' (hetpipe export-weights JOB.yaml --merge), or leave --merge out"
    )


def _origin_of(layers: nn.Sequential | None) -> Origin | None:
    """Return what a model of transformers was built from; None for other layers."""
    first = layers[0] if layers is not None else None
    written = lineage.written if first is not None and (lineage := lineage_of(first)) is not None else first
    found = uncompiled(written) if written is not None else None
    return found.origin if isinstance(found, HFLayer) else None


def _export_plain(
    layers: nn.Sequential | None,
    saved: Stored,
    available: PartTensors,
    folder: str | Path,
    names: Mapping[str, str],
    called: str = WEIGHTS,
) -> Path:
    """Write tensors of a checkpoint by these names, each with its key there."""
    if layers is not None and (faults := model_faults(available, layers, surplus=True)):
        raise InputError(f"checkpoint {saved} is not of the job's model:\n{listed(faults)}")
    target = make_folder(folder)
    _write_shards(_cut(names, available), available, target, called=called)
    return target


def _export_adapted(
    layers: nn.Sequential, section: AdapterSection, saved: Stored, available: PartTensors, folder: str | Path, *, merge: bool
) -> Path:
    """Adapters, or the whole model with them."""
    if faults := model_faults(available, layers, surplus=True):
        raise InputError(f"checkpoint {saved} is not of the job's model:\n{listed(faults)}")
    check_adapted(read_saved(saved), list(layers), saved)

    def read(name: str) -> Tensor:
        return available.read(f"{MODEL}{name}")

    if not merge:
        written = write_adapters(layers, section, read, folder)
        if transformer_of(layers) is not None:
            write_lora(trained_in(layers), section, read, written)
        return written
    origin = _origin_of(layers)
    if origin is None:
        raise InputError(
            "only the adapters of models of transformers are merged: load the checkpoint (hetpipe.load_weights), "
            "and add them in a program of your own"
        )
    check_mergeable(layers)
    target = make_folder(folder)
    parts = _of_its_base(merged_layers(layers, read), layers, saved)
    try:
        dtype = _write_files(_filled(parts), target, lambda tensors: as_stored(origin.model, tensors))
    except InputError:
        shutil.rmtree(target)
        raise
    origin.write_config(target, dtype)
    return target


def _of_its_base(parts: Iterable[dict[str, Tensor]], layers: nn.Sequential, saved: Stored) -> Iterator[dict[str, Tensor]]:
    """These parts of a model whose layers are read meanwhile. InputError at the end if it is another than it was in training."""
    yield from parts
    check_numbers(read_saved(saved).base_numbers, numbers_of_base(layers, alone()), saved)


def _export_named(state: TrainerState | LoopState, saved: Stored, available: PartTensors, folder: str | Path) -> Path:
    """Adapters, by what a checkpoint says of them."""
    names = state.adapter_names if isinstance(state, LoopState) else None
    if names is None:
        raise InputError(
            f"checkpoint {saved} does not say what its adapters are called outside of the model that was trained: "
            "name the job (hetpipe export-weights JOB.yaml), or give the model to hetpipe.export_weights"
        )
    section = validated(AdapterSection, adapter_said(state), str(saved), "description of adapters")
    parts = {name: split_kind(outside) for name, outside in names.items()}
    trained = Trained(
        {name: part for name, part in parts.items() if part[1]},
        {name: names[name] for name, part in parts.items() if not part[1]},
    )
    return write_named(trained, section, lambda name: available.read(f"{MODEL}{name}"), folder, Base())


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


def _export_folder(layers: nn.Sequential, saved: Stored, available: PartTensors, folder: str | Path) -> Path:
    """Write a folder that transformers loads."""
    shards = list(_shards(layers))
    missing = [key for shard in shards for key in shard.values() if key not in available]
    if missing:
        raise InputError(
            f"checkpoint {saved} has no {missing[0].removeprefix(MODEL)!r} ({len(missing)} tensors of the "
            "model are not in it): it was saved from another model"
        )
    origin, target = _own(layers[0]).origin, make_folder(folder)
    origin.write_config(target, _write_shards(shards, available, target, lambda tensors: as_stored(origin.model, tensors)))
    return target


def _write_shards(
    shards: Iterable[Mapping[str, str]], available: PartTensors, target: Path, stored: Convert = dict, called: str = WEIGHTS
) -> torch.dtype:
    """Files of tensors of a checkpoint, by their keys there (see `_write_files`)."""
    parts = ({name: available.read(key) for name, key in shard.items()} for shard in shards)
    return _write_files(parts, target, stored, called)


def _write_files(parts: Iterator[dict[str, Tensor]], target: Path, stored: Convert = dict, called: str = WEIGHTS) -> torch.dtype:
    """The files and, for more than one, their index; returns the type of most of their numbers. `stored`: from what a
    file's tensors are called and look like in the model to how they are stored. `called`: the file, if there is one."""
    files, total, dtypes = list[list[str]](), 0, Counter[torch.dtype]()
    while (part := next(parts, None)) is not None:
        tensors = stored(part)
        save_tensors(tensors, target / f"part-{len(files)}")
        files.append(list(tensors))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        for tensor in filter(torch.is_floating_point, tensors.values()):
            dtypes[tensor.dtype] += tensor.numel()
        part = tensors = {}  # before the next is read
    weight_map = dict[str, str]()
    for number, names in enumerate(files):
        stem, ending = Path(called).stem, Path(called).suffix
        file = called if len(files) == 1 else f"{stem}-{number + 1:05d}-of-{len(files):05d}{ending}"
        (target / f"part-{number}").rename(target / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(target / INDEX_OF.format(called), json.dumps(index, indent=2) + "\n")
    return max(dtypes, key=lambda dtype: dtypes[dtype], default=torch.float32)


def _own(layer: nn.Module) -> HFLayer:
    found = uncompiled(layer)
    assert isinstance(found, HFLayer)
    return found


def _stored_tensors(name: str, layer: HFLayer) -> dict[str, Tensor]:
    """The layer's tensors; InputError where one of those that belong in a folder has another name, or others have joined them."""
    written = written_names(layer)
    found = {written(own): tensor for own, tensor in tensors_of(layer).items()}
    strange = [own for own in found if own not in layer.library_names]
    if strange:
        raise InputError(
            f"layer {name!r} has {strange[0]!r} ({len(strange)} such), for which a folder of transformers has no "
            "place: add adapters with a job's section 'adapter', or merge them and save with save_pretrained; "
            "the checkpoint's own safetensors files hold both"
        )
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


def _cut(names: Mapping[str, str], available: Mapping[str, Described]) -> Iterator[dict[str, str]]:
    """These names in mappings of one file each; a tied parameter under each of its names."""
    shard, size = dict[str, str](), 0
    for name, key in names.items():
        shard[name] = key
        size += available[key].size_bytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
