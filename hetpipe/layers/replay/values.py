"""Where the values of a chain's layers come from, if its model has none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from hetpipe.files.messages import InputError, shown
from hetpipe.files.tensors import TensorFiles, names_in
from hetpipe.layers.untouched.kept import Fixed


def files_of(model: nn.Module, folder: Path) -> TensorFiles:
    """Find the model's parameters in the safetensors files of a folder, and give its buffers the values that are there.
    InputError unless each parameter is there, once, with its shape, and nothing else is."""
    found = dict[str, Path]()
    for file in sorted(folder.glob("*.safetensors")):
        for name in names_in(file):
            if name in found:
                raise InputError(f"{folder}: {shown(name)} is in {found[name].name} and in {file.name}: leave one of them there")
            found[name] = file
    files = TensorFiles(found)
    shapes = files.shapes()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if (strange := next((name for name in found if name not in state), None)) is not None:
        raise InputError(f"{folder} has {shown(strange)}, for which {type(model).__name__} with this configuration has no place")
    for name, buffer in model.named_buffers():
        if name in found:
            buffer.copy_(files.read(name))
    for name, parameter in model.named_parameters():
        if name not in shapes:
            raise InputError(f"{folder} has no {shown(name)}, which {type(model).__name__} with this configuration has")
        if shapes[name] != tuple(parameter.shape):
            raise InputError(
                f"{folder}: {shown(name)} has the shape {list(shapes[name])}, and in {type(model).__name__} with this "
                f"configuration {list(parameter.shape)}"
            )
    return files


class Values(Protocol):
    """Where the values of layers come from. `digest`: of all of them."""

    @property
    def digest(self) -> str: ...

    def read(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Own name → tensor, for own name → name in the model."""


class Stored(Fixed):
    """Values in files."""

    def __init__(self, files: TensorFiles) -> None:
        self.files = files

    @cached_property
    def digest(self) -> str:
        """Of all names, types and shapes, and a few numbers of each tensor."""
        return self.files.digest()

    def read(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Own name → tensor, for own name → name in the model."""
        return {own: self.files.read(name) for own, name in names.items()}


class Drawn(Fixed):
    """Values that are drawn by a seed, as the model itself draws them when it is made. Whoever asks for some has drawn all of
    them, and keeps them: it is for models that fit into the memory of a process."""

    def __init__(self, make: Callable[[], nn.Module], said: str, seed: int) -> None:
        """`make` the model, of which this is `said`."""
        self.make, self.said, self.seed = make, said, seed

    @cached_property
    def digest(self) -> str:
        """Of what is said of the model, and of the seed."""
        return hashlib.sha256(f"{self.said} {self.seed}".encode()).hexdigest()

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            made = self.make()
        return {name: tensor.detach() for name, tensor in (*made.named_parameters(), *made.named_buffers())}

    def read(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Own name → tensor, for own name → name in the model."""
        return {own: self._values[name].clone() for own, name in names.items()}
