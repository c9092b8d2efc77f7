"""Folders of `save_pretrained`, here or on Hugging Face: their config.json, and single tensors out of their safetensors files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hetpipe.files.formats import read_mapping
from hetpipe.files.messages import InputError, cut, shown
from hetpipe.files.tensors import TensorFiles, names_in
from hetpipe.hf.hub import folder_of, refuse_adapters

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def plain_mapping(file: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping."""
    found = read_mapping(file)
    if not isinstance(found, dict):
        raise InputError(f"{file}: expected a mapping, found a {type(found).__name__}")
    return found


class WeightFolder(TensorFiles):
    """A folder that `save_pretrained` wrote, or a model by its name on Hugging Face (see `folder_of`); `config` is what its
    config.json holds, `revision` the hash of its commit there, `named` what was asked for. InputError where it holds adapters."""

    def __init__(self, folder: str | Path, *, code: bool = False) -> None:
        self.named = str(folder).partition("@")[0]
        self.path, self.revision = folder_of(folder, code=code)
        refuse_adapters(self.path, str(folder))
        file = self.path / "config.json"
        if not os.path.isfile(file):
            more = "" if self.revision or os.path.isdir(self.path) else ", and no name of a model on Hugging Face (owner/name)"
            raise InputError(f"{cut(str(self.path), 200)} is no folder of save_pretrained: it has no config.json{more}")
        self.config = plain_mapping(file)
        super().__init__(self._find())

    def _find(self) -> dict[str, Path]:
        """Tensor name → file."""
        if os.path.isfile(self.path / WEIGHTS):
            return names_in(self.path / WEIGHTS)
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
                raise InputError(
                    f"{self.path / INDEX}: weight_map says that {shown(name)} is in {shown(file)}; only files in "
                    "this folder itself are read"
                )
        missing = sorted({file for file in names.values() if not os.path.isfile(self.path / file)})
        if missing:
            raise InputError(f"{self.path} lacks {shown(missing)}, which its {INDEX} names")
        return {name: self.path / file for name, file in names.items()}
