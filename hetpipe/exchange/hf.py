"""Hugging Face folders: single tensors out of their safetensors files, and a checkpoint of hetpipe back into such a folder,
a few layers at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hetpipe.checkpoints.checkpoint import read_state
from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError, cut, shown
from hetpipe.files.writing import check_folder, make_folder, write_text
from hetpipe.layers.model import named_layers
from hetpipe.layers.weights import plain_name, tensors_of, uncompiled

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE_BYTES = 1 << 25
SHARD_BYTES = 1 << 30  # a process that writes holds so much, and one layer
# What a folder may hold beside config and weights, and what its trained successor needs too.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
              "generation_config.json")  # fmt: skip


class TensorFiles:
    """Tensors in safetensors files. Only those that are read are ever in memory."""

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        self._file_of = dict(file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        """One tensor, copied a piece at a time, since the pages of a file that is open count as this process's memory."""
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as content:
                whole = content.get_slice(name)
                shape = whole.get_shape()
                first: Tensor = (whole[:1] if shape else whole[...]).clone()
            if not shape:
                return first
            result = torch.empty(shape, dtype=first.dtype)
            rows = max(1, PIECE_BYTES // max(1, first.numel() * first.element_size()))
            for at in range(0, shape[0], rows):
                with safe_open(file, framework="pt") as content:
                    result[at : at + rows] = content.get_slice(name)[at : at + rows]
        except (SafetensorError, OSError) as error:
            raise InputError(cut(f"cannot read {shown(name)} from {file}: {error}")) from error
        return result


def _names_in(file: Path) -> dict[str, Path]:
    try:
        with safe_open(file, framework="pt") as content:
            return dict.fromkeys(content.keys(), file)
    except (SafetensorError, OSError) as error:
        raise InputError(cut(f"cannot read {file}: {error}")) from error


def plain_mapping(file: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping."""
    found = read_mapping(file)
    if not isinstance(found, dict):
        raise InputError(f"{file}: expected a mapping, found a {type(found).__name__}")
    return found


class WeightFolder(TensorFiles):
    """A folder that `save_pretrained` wrote; `config` is what its config.json holds."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(os.path.expanduser(folder))
        file = self.path / "config.json"
        if not os.path.isfile(file):
            raise InputError(f"{cut(str(self.path), 200)} is no folder of save_pretrained: it has no config.json")
        self.config = plain_mapping(file)
        super().__init__(self._find())

    def _find(self) -> dict[str, Path]:
        """Tensor name → file."""
        if os.path.isfile(self.path / WEIGHTS):
            return _names_in(self.path / WEIGHTS)
        if not os.path.isfile(self.path / INDEX):
            raise InputError(
                f"{self.path} has neither {WEIGHTS} nor {INDEX}; load it with transformers and save it again with "
                "save_pretrained, which writes safetensors"
            )
        names = plain_mapping(self.path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise InputError(f"{self.path / INDEX} has no weight_map of tensor names to files")
        for name, file in names.items():
            if file in (".", "..") or os.path.basename(file) != file:
                raise InputError(f"{self.path / INDEX}: weight_map says that {shown(name)} is in {shown(file)}; only files in "
                                 "this folder itself are read")  # fmt: skip
        missing = sorted({file for file in names.values() if not os.path.isfile(self.path / file)})
        if missing:
            raise InputError(f"{self.path} lacks {shown(missing)}, which its {INDEX} names")
        return {name: self.path / file for name, file in names.items()}


class Transformers(Protocol):
    """Where the layers of a model of transformers come from."""

    folder: WeightFolder | None

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json for weights of this type."""
        ...


@runtime_checkable
class TransformersLayer(Protocol):
    """A layer that is part of a model of transformers."""

    origin: Transformers
    hf_names: dict[str, str]  # own name → the name in the model of transformers
    stored_names: dict[str, str]  # the part of it that save_pretrained stores


def check_new_folder(folder: str | Path) -> None:
    """InputError if `export_weights` could not write into this folder, or would write beside what is there."""
    check_folder(folder)
    occupied = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    if occupied:
        raise InputError(f"the folder {folder} is not empty (it holds {occupied[0]!r}); name a new one")


def export_weights(layers: nn.Sequential, checkpoint: Path, folder: str | Path) -> Path:
    """Write a checkpoint's weights as a folder that transformers loads: config.json, and safetensors files of about 1 GiB.
    `layers` says what belongs where; it may be on the meta device. No more than one file's tensors are in memory at a time."""
    check_new_folder(folder)
    origin = _origin(layers)
    read_state(checkpoint)
    saved = TensorFiles(
        {n: f for file in sorted(checkpoint.glob("*.safetensors")) for n, f in _names_in(file).items()}
    )
    shards = list(_shards(layers))
    missing = [key for shard in shards for key in shard.values() if key not in saved]
    if missing:
        raise InputError(f"checkpoint {checkpoint} has no {missing[0].removeprefix('model.')!r} ({len(missing)} tensors of the "
                         "model are not in it): it was saved from another model")  # fmt: skip
    target = make_folder(folder)
    origin.write_config(target, _write_shards(shards, saved, target))
    if origin.folder is not None:
        for path in sorted({p for pattern in COMPANIONS for p in origin.folder.path.glob(pattern)}):
            shutil.copy2(path, target / path.name)
    return target


def _write_shards(shards: Sequence[Mapping[str, str]], saved: TensorFiles, target: Path) -> torch.dtype:
    """The files and, for more than one, their index; returns the type of the largest numbers in them."""
    weight_map, total, dtypes = dict[str, str](), 0, set[torch.dtype]()
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {stored: saved.read(key) for stored, key in shard.items()}
        save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        dtypes |= {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(target / INDEX, json.dumps(index, indent=2) + "\n")
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _origin(layers: nn.Sequential) -> Transformers:
    for name, layer in named_layers(layers):
        if not isinstance(layer, TransformersLayer):
            raise InputError(
                f"layer {name!r} ({type(layer).__name__}) is not of transformers, so there is no Hugging Face folder for this "
                "model; its checkpoints are safetensors files as they are"
            )
    first = layers[0]
    assert isinstance(first, TransformersLayer)
    return first.origin


def _stored_tensors(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """The layer's tensors; InputError where one of those that belong in a folder has another name, or others have joined them."""
    assert isinstance(layer, TransformersLayer)
    found = {plain_name(own): tensor for own, tensor in tensors_of(uncompiled(layer)).items()}
    strange = [own for own in found if own not in layer.hf_names]
    if strange:
        raise InputError(f"layer {name!r} has {strange[0]!r} ({len(strange)} such), for which a folder of transformers has no "
                         "place: load the checkpoint, merge the adapters into the weights and save these with save_pretrained; "
                         "the checkpoint's own safetensors files hold both")  # fmt: skip
    return found


def _shards(layers: nn.Sequential) -> Iterator[dict[str, str]]:
    """Name in the folder → key in the checkpoint, one mapping a file; a tied parameter once."""
    shard, size, seen = dict[str, str](), 0, set[str]()
    for name, layer in named_layers(layers):
        assert isinstance(layer, TransformersLayer)
        tensors = _stored_tensors(name, layer)
        for own, stored in layer.stored_names.items():
            if stored not in seen:
                seen.add(stored)
                shard[stored] = f"model.{name}.{own}"
                size += tensors[own].numel() * tensors[own].element_size()
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard
