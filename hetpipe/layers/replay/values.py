"""Where the values of a chain's layers are read from, if its model has none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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


class Values(Fixed):
    """Reads them for layers whose model is of this `kind`."""

    def __init__(self, files: TensorFiles, kind: str) -> None:
        self.files, self.kind = files, kind
        self.digest = files.digest()

    def read(self, label: str, wanted: Mapping[str, str | None]) -> dict[str, Tensor]:
        """Own name → tensor, for own name → name in the model. InputError for one that the model does not have."""
        strange = next((own for own, name in wanted.items() if name is None), None)
        if strange is not None:
            raise InputError(
                f"layer {label}: {strange!r} is on the meta device, and {self.kind} has no tensor of that name, whose values "
                "could be read. Add adapters with hetpipe.adapt"
            )
        return {own: self.files.read(name) for own, name in wanted.items() if name is not None}
