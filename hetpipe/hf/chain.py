"""Models of transformers as chains of layers, and where the values of these come from.

A layer holds modules of transformers' own, built on the meta device, and takes and returns a tensor or a tuple of tensors. It
knows where its values come from: a folder of `save_pretrained`, or transformers' own initialisation, drawn for each module
from a seed of its own, so that a layer's values do not depend on which other layers its process holds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hetpipe.files.formats import flat
from hetpipe.files.messages import InputError
from hetpipe.hf.folder import WeightFolder
from hetpipe.hf.stored import StoredTensors
from hetpipe.layers.adapters.names import names_in
from hetpipe.layers.transforms import tensors_of, without_wrappers
from hetpipe.layers.untouched.kept import Fixed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FREE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")  # of no weight
_LABELS = ("id2label", "label2id")
SCORE = "score"  # what transformers calls the linear layer of a classifier of texts


class HFLayer(nn.Module):
    """A layer made of modules of transformers. `label`: its name in the chain; `library_names`: see `InLibrary`; `stored_names`:
    own tensor name → the name under which `save_pretrained` stores it, if it does."""

    only_names = ("label", "library_names", "stored_names", "number")  # see `layers/untouched/kinds.py`
    origin: Origin
    label: str
    library_names: dict[str, str]
    stored_names: dict[str, str]

    @property
    def revision(self) -> str | None:
        """The hash of the commit on Hugging Face that its configuration and values are of; None where they are of a folder."""
        return self.origin.folder.revision if self.origin.folder is not None else None

    @property
    def base_digest(self) -> str:
        """Of what its model's values are read or drawn from (see `Origin.digest`)."""
        return self.origin.digest

    @property
    def configuration(self) -> dict[str, Any]:
        """What its model is configured as (see `Origin.configuration`)."""
        return self.origin.configuration

    def buffer_type(self, name: str, held: torch.dtype) -> torch.dtype:
        """As `from_pretrained(dtype=held)` has it: rotary frequencies, say, in float32 whatever the parameters are."""
        return self.origin.buffer_types(held).get(self.library_names.get(without_wrappers(name), ""), held)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HFLayer:
        """What `to`, `float`, `half`, … do: where they change the parameters' type, buffers are of what it says above."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers():
            dtype = self.buffer_type(name, buffer.dtype) if buffer.dtype != before[name].dtype else buffer.dtype
            if dtype != buffer.dtype:
                path, _, last = name.rpartition(".")
                self.get_submodule(path)._buffers[last] = before[name].to(buffer.device, dtype)
        return self

    def values(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors, read from the folder, or drawn. InputError for those that the model of transformers does not have."""
        wanted = {own: self.library_names.get(without_wrappers(own), "") for own in names}
        strange = [own for own, hf in wanted.items() if not hf]
        if strange:
            raise InputError(
                f"layer {self.label!r}: {strange[0]!r} is on the meta device, and {type(self.origin.model).__name__} has no "
                f"tensor of that name ({len(strange)} such) whose values could be read or drawn. Add adapters with "
                "hetpipe.adapt, or a job's section 'adapter'. What another wrapper adds needs values from the start, and the "
                "module in it must be its 'base_layer'. Or wrap after hetpipe.layers.weights.materialise(layers)"
            )
        return self.origin.values(wanted)


class Origin(Fixed):
    """The model of transformers whose modules the layers hold (its tensors on the meta device), and where values come from. Once
    the layers are assembled it is a copy, which stays as it was when they are changed.
    `new`: beginnings of names that may be missing in the folder, because fine-tuning adds them. `seed`: of what is drawn; by
    default it is drawn, too (`drawn_seed`). `first_names`: each name of a tensor, of which it may have several → the one by which
    it is stored."""

    first_names: dict[str, str]

    def __init__(
        self, model: PreTrainedModel, folder: WeightFolder | None, new: tuple[str, ...] = (), seed: int | None = None
    ) -> None:
        self.model, self.folder, self.new = model, folder, new
        self.stored = StoredTensors(model, folder) if folder is not None else None
        if self.stored is not None and (unused := self.stored.unused()):
            kind = type(model).__name__
            warnings.warn(
                f"{self.stored.folder.path}: {kind} with this configuration has no place for {unused[0]!r} "
                f"({len(unused)} such): they are left out",
                stacklevel=2,
            )
        self._buffer_types = dict[torch.dtype, dict[str, torch.dtype]]()
        self.seed = drawn_seed() if seed is None else seed

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self  # a copy of a layer comes from the same model

    def assemble(self, children: OrderedDict[str, HFLayer]) -> nn.Sequential:
        """The chain of these layers, once each tensor has found its name in the model of transformers."""
        names: dict[int, list[str]] = {}
        for name, tensor in tensors_of(self.model).items():
            names.setdefault(id(tensor), []).append(name)
        stored, ties = set(self.model.state_dict()), set(self.model.all_tied_weights_keys)
        self.first_names = {
            name: next((other for other in same if other not in ties), same[0]) for same in names.values() for name in same
        }
        names_of_layer = names_in(self.model)
        for label, layer in children.items():
            layer.origin, layer.label, layer.library_names = self, label, names_of_layer(layer)
            assert layer.library_names.keys() == tensors_of(layer).keys()
            first = {own: self.first_names[name] for own, name in layer.library_names.items()}
            layer.stored_names = {own: name for own, name in first.items() if name in stored}
        layers = nn.Sequential(OrderedDict(children))
        assert {id(p) for p in self.model.parameters()} <= {id(p) for p in layers.parameters()}
        self.model = copy.deepcopy(self.model)  # as it is, whatever is put into the layers' modules (adapters)
        return layers

    def buffer_types(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The type of each floating-point buffer that is not of it, in a model of transformers with parameters of this type."""
        if dtype not in self._buffer_types:
            default = torch.get_default_dtype()
            try:
                torch.set_default_dtype(dtype)
                with torch.device("meta"):
                    model = type(self.model)(copy.deepcopy(self.model.config))
            finally:
                torch.set_default_dtype(default)
            kept = [re.compile(pattern) for pattern in model._get_dtype_plan(dtype)]  # those in float32
            types = {
                name: torch.float32 if any(pattern.search(name) for pattern in kept) else buffer.dtype
                for name, buffer in model.named_buffers()
                if buffer.is_floating_point()
            }
            self._buffer_types[dtype] = {name: found for name, found in types.items() if found != dtype}
        return self._buffer_types[dtype]

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """Return the configuration in plain values, by keys such as `rope_parameters.rope_theta`, without those that no
        computation uses."""
        said = {key: value for key, value in self.model.config.to_dict().items() if key not in (*_FREE, *_LABELS)}
        plain: dict[str, Any] = json.loads(json.dumps(said, default=str))
        return dict(flat(plain))

    @cached_property
    def digest(self) -> str:
        """Of its configuration, and of a folder's tensors (see `TensorFiles.digest`), or the seed."""
        said = {key: value for key, value in self.model.config.to_dict().items() if key not in _FREE}
        source = self.folder.digest() if self.folder is not None else self.seed
        text = json.dumps([said, source], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def values(self, wanted: Mapping[str, str]) -> dict[str, Tensor]:
        """Own name → tensor, for own name → name in the model of transformers. One that is tied is that of its first name."""
        found, drawn = dict[str, Tensor](), dict[str, str]()
        wanted = {own: self.first_names[name] for own, name in wanted.items()}
        buffers = {name for name, _ in self.model.named_buffers()} - set(self.model.state_dict())
        for own, name in wanted.items():
            if self.stored is not None and name in self.stored and name not in buffers:
                found[own] = self.stored.read(name)
            else:
                drawn[own] = name
        if self.folder is not None:
            self._check_new([name for name in drawn.values() if name not in buffers])
        return found | self._draw(drawn)

    def _check_new(self, names: list[str]) -> None:
        assert self.folder is not None
        kind = type(self.model).__name__
        missing = [name for name in names if not name.startswith(self.new)]
        if missing:
            raise InputError(
                f"{self.folder.path} has no {missing[0]!r}: it does not hold the weights of a {kind} with this configuration"
            )
        if names:
            warnings.warn(f"{self.folder.path} has no {', '.join(names)}: drawn at random", stacklevel=2)

    def _draw(self, wanted: Mapping[str, str]) -> dict[str, Tensor]:
        """Initial values, from transformers' own `_init_weights`."""
        found, drawn = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for own, name in wanted.items():
            unit = self._unit_of(name)
            if unit not in drawn:
                drawn[unit] = self._initialised(unit)
            value = drawn[unit][name.removeprefix(f"{unit}.")]
            found[own] = value.clone() if any(value is other for other in found.values()) else value
        return found

    def _unit_of(self, name: str) -> str:
        """The part of the model that is initialised at once: a transformer block, else the module that holds the tensor."""
        path = name.split(".")
        for depth in range(1, len(path)):
            if isinstance(self.model.get_submodule(".".join(path[:depth])), nn.ModuleList):
                return ".".join(path[: depth + 1])
        return name.rpartition(".")[0]

    def _holds_units(self, unit: str) -> bool:
        """Whether a list of layers is within it, which are units themselves."""
        path = unit.split(".")
        above = (self.model.get_submodule(".".join(path[:depth])) for depth in range(1, len(path)))
        lists = (isinstance(module, nn.ModuleList) for module in self.model.get_submodule(unit).modules())
        return not any(isinstance(module, nn.ModuleList) for module in above) and any(lists)

    def _initialised(self, unit: str) -> dict[str, Tensor]:
        module = self.model.get_submodule(unit)
        alone = self._holds_units(unit)
        keep: dict[int, Any] = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        keep |= {id(tensor): tensor for tensor in tensors_of(module).values()}
        drawn = [*module.named_parameters(recurse=not alone), *module.named_buffers(recurse=not alone)]
        for name, tensor in drawn:
            dtype = self._drawn_type(f"{unit}.{name}" if unit else name, tensor)
            real = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
            keep[id(tensor)] = nn.Parameter(real) if isinstance(tensor, nn.Parameter) else real
        module = copy.deepcopy(module, keep)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed ^ zlib.crc32(unit.encode()))
            if alone:
                self.model._init_weights(module)
            else:
                _initialise(module, self.model)
        return {name: tensor.detach() for name, tensor in tensors_of(module).items()}

    def _drawn_type(self, name: str, tensor: Tensor) -> torch.dtype:
        """Parameters are drawn in float32, whatever they are held in; buffers that are in float64 where these are, in that."""
        if not tensor.is_floating_point():
            return tensor.dtype
        doubled = self._buffer_types.get(torch.float64)  # known where somebody wanted it
        precise = doubled is not None and not isinstance(tensor, nn.Parameter) and name not in doubled
        return torch.float64 if precise else torch.float32

    def stored_type(self, name: str) -> torch.dtype:
        """In which number type a tensor is in the folder; float32 where it was drawn."""
        if self.stored is None or name not in self.stored:
            return torch.float32
        return self.stored.type_of(name)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """config.json, as `save_pretrained` writes it."""
        config = copy.deepcopy(self.model.config)
        config.architectures, config.dtype = [type(self.model).__name__], dtype
        config.save_pretrained(folder)


def drawn_seed() -> int:
    """A seed for the values of a model; torch.manual_seed decides."""
    return int(torch.randint(1 << 31, (), device="cpu"))


def _initialise(module: nn.Module, model: PreTrainedModel) -> None:
    """Children before their parent, which may draw some of them again."""
    for child in module.children():
        _initialise(child, model)
    model._init_weights(module)
