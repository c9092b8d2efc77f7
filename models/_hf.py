"""Models of transformers as chains of layers: what `gpt2`, `bert`, `llama` and `t5` share. Not a model itself.

A layer holds modules of transformers' own, built on the meta device, and takes and returns a tensor or a tuple of tensors. It
knows where its values come from: a folder of `save_pretrained`, or transformers' own initialisation, drawn for each module
from a seed of its own, so that a layer's values do not depend on which other layers its process holds.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetpipe.exchange.hf import WeightFolder
from hetpipe.files.limits import MOST_LABELS, MOST_LAYERS, MOST_WIDTH
from hetpipe.files.messages import InputError, cut, nearest, shown
from hetpipe.layers.model import Tensors, as_value
from hetpipe.layers.transforms import tensors_of, uncompiled_name
from hetpipe.models._parts import require_choice

try:
    from transformers import PreTrainedConfig, PreTrainedModel
except ImportError as missing:
    raise ImportError(
        "the models gpt2, bert, llama and t5 need transformers: pip install 'hetpipe[hf]'"
    ) from missing

M = TypeVar("M", bound=PreTrainedModel)


class HFLayer(nn.Module):
    """A layer made of modules of transformers. `label`: its name in the chain; `hf_names`: own tensor name → its name in the
    model of transformers; `stored_names`: the part of it that `save_pretrained` stores."""

    origin: Origin
    label: str
    hf_names: dict[str, str]
    stored_names: dict[str, str]

    def values(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors, read from the folder, or drawn. InputError for those that the model of transformers does not have."""
        wanted = {own: self.hf_names.get(_without_wrappers(own), "") for own in names}
        strange = [own for own, hf in wanted.items() if not hf]
        if strange:
            raise InputError(
                f"layer {self.label!r}: {strange[0]!r} is on the meta device, and {type(self.origin.model).__name__} has no "
                f"tensor of that name ({len(strange)} such) whose values could be read or drawn. What a wrapper adds needs "
                "values from the start (peft puts it where the base is: call to_empty(device='cpu') and reset_lora_parameters "
                "on it), and the module in it must be its 'base_layer'. Or wrap after hetpipe.layers.weights.materialise(layers)"
            )
        return self.origin.values(wanted)


def _without_wrappers(name: str) -> str:
    """A tensor's name before peft wrapped its module, or copied it, and torch.compile the module's."""
    parts = uncompiled_name(name).split(".")
    if "modules_to_save" in parts[:-1]:  # of which each adapter has a copy
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


class Origin:
    """The model of transformers whose modules the layers hold (its tensors on the meta device), and where values come from. Once
    the layers are assembled it is a copy, which stays as it was when they are changed.
    `new`: beginnings of names that may be missing in the folder, because fine-tuning adds them."""

    def __init__(
        self, model: PreTrainedModel, folder: WeightFolder | None, new: tuple[str, ...] = ()
    ) -> None:
        self.model, self.folder, self.new = model, folder, new
        self.seed = int(torch.randint(1 << 31, (), device="cpu"))  # torch.manual_seed decides

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self  # a copy of a layer comes from the same model

    def assemble(self, children: OrderedDict[str, HFLayer]) -> nn.Sequential:
        """The chain of these layers, once each tensor has found its name in the model of transformers."""
        names: dict[int, list[str]] = {}
        for name, tensor in tensors_of(self.model).items():
            names.setdefault(id(tensor), []).append(name)
        stored, ties = set(self.model.state_dict()), set(self.model.all_tied_weights_keys)
        for label, layer in children.items():
            layer.origin, layer.label = self, label
            layer.hf_names = {
                own: next((name for name in names[id(tensor)] if name not in ties), names[id(tensor)][0])
                for own, tensor in tensors_of(layer).items()
            }
            layer.stored_names = {own: name for own, name in layer.hf_names.items() if name in stored}
        layers = nn.Sequential(OrderedDict(children))
        assert {id(p) for p in self.model.parameters()} <= {id(p) for p in layers.parameters()}
        self.model = copy.deepcopy(self.model)  # as it is, whatever is put into the layers' modules (adapters)
        return layers

    def values(self, wanted: Mapping[str, str]) -> dict[str, Tensor]:
        """Own name → tensor, for own name → name in the model of transformers."""
        found, drawn = dict[str, Tensor](), dict[str, str]()
        buffers = {name for name, _ in self.model.named_buffers()} - set(self.model.state_dict())
        for own, name in wanted.items():
            stored = self._stored(name) if self.folder is not None and name not in buffers else None
            if stored is not None:
                found[own] = self.folder.read(stored)  # type: ignore[union-attr]
            else:
                drawn[own] = name
        if self.folder is not None:
            self._check_new([name for name in drawn.values() if name not in buffers])
        return found | self._draw(drawn)

    def _stored(self, name: str) -> str | None:
        """The name under which the folder has a tensor: with or without the base model's prefix; LayerNorm's older names."""
        assert self.folder is not None
        prefix = f"{self.model.base_model_prefix}."
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for candidate in (name, name.removeprefix(prefix), old, old.removeprefix(prefix)):
            if candidate in self.folder:
                return candidate
        return None

    def _check_new(self, names: list[str]) -> None:
        assert self.folder is not None
        kind = type(self.model).__name__
        missing = [name for name in names if not name.startswith(self.new)]
        if missing:
            raise InputError(f"{self.folder.path} has no {missing[0]!r}: it does not hold the weights of a {kind} with "
                             "this configuration")  # fmt: skip
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

    def _initialised(self, unit: str) -> dict[str, Tensor]:
        module = self.model.get_submodule(unit)
        keep: dict[int, Any] = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        for tensor in tensors_of(module).values():
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            real = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
            keep[id(tensor)] = nn.Parameter(real) if isinstance(tensor, nn.Parameter) else real
        module = copy.deepcopy(module, keep)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed ^ zlib.crc32(unit.encode()))
            _initialise(module, self.model)
        return {name: tensor.detach() for name, tensor in tensors_of(module).items()}

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """config.json, as `save_pretrained` writes it."""
        config = copy.deepcopy(self.model.config)
        config.architectures, config.dtype = [type(self.model).__name__], dtype
        config.save_pretrained(folder)


def _initialise(module: nn.Module, model: PreTrainedModel) -> None:
    """Children before their parent, which may draw some of them again."""
    for child in module.children():
        _initialise(child, model)
    model._init_weights(module)


def configure(
    name: str,
    kind: type[PreTrainedConfig],
    sizes: Mapping[str, Mapping[str, Any]],
    size: str | None,
    weights: str | None,
    attention: str,
    changes: Mapping[str, Any],
) -> tuple[PreTrainedConfig, WeightFolder | None]:
    """The configuration: of the folder `weights`, or of a preset; each of `changes` in its place."""
    require_choice(name, "attention", attention, ("sdpa", "eager"))
    known = [key for key in vars(kind()) if not key.startswith("_")] + ["num_labels"]
    for key in changes:
        if key not in known:
            raise ValueError(f"{name}: {kind.__name__} has no {key!r}{nearest(key, known)}")
    options = {**changes, "attn_implementation": attention}
    if weights is None:
        size = next(iter(sizes)) if size is None else size
        require_choice(name, "size", size, tuple(sizes))
        preset = {**_without_special_tokens(kind, changes), **sizes[size], **options}
        return _settings(preset, lambda: kind(**preset), f"{name}: {shown(dict(changes))}"), None
    if size is not None:
        raise ValueError(
            f"{name}: give size {size!r} or weights {weights!r}, whose config.json says the size, and not both"
        )
    folder = WeightFolder(weights)
    if folder.config.get("model_type") != kind.model_type:
        raise InputError(f"{name}: {folder.path} holds a model of type {shown(folder.config.get('model_type'))}, expected "
                         f"{kind.model_type!r}")  # fmt: skip
    # what begins with _ is transformers' own, and may name code to be fetched
    config = {key: value for key, value in folder.config.items() if not key.startswith("_")}
    source = str(folder.path / "config.json")
    return _settings({**config, **options}, lambda: kind.from_dict(config, **options), source), folder


_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), MOST_LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "d_kv", "head_dim",
                     "num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "vocab_size", "type_vocab_size",
                     "max_position_embeddings", "n_positions", "relative_attention_num_buckets"), MOST_WIDTH),
    "num_labels": MOST_LABELS,
}  # fmt: skip


def _settings(values: Mapping[str, Any], make: Callable[[], PreTrainedConfig], source: str) -> PreTrainedConfig:
    """The configuration of these values; an InputError names `source` and the key that transformers refuses, or that no model can
    have."""
    for key, most in _MOST.items():
        value = values.get(key)
        if isinstance(value, int) and not 1 <= value <= most:
            raise InputError(f"{source}: {key} is {shown(value)}; it must be from 1 to {most}")
    return _tried(make, f"{source}: transformers refuses it")


T = TypeVar("T")


def _tried(make: Callable[[], T], failure: str) -> T:
    try:
        return make()
    except Exception as error:  # whatever transformers and torch say of a value
        raise InputError(cut(f"{failure}: {' '.join(str(error).split()) or type(error).__name__}", 600)) from error


def _without_special_tokens(kind: type[PreTrainedConfig], changes: Mapping[str, Any]) -> dict[str, None]:
    """The special tokens of the default vocabulary that a smaller one does not have."""
    defaults, size = kind(), changes.get("vocab_size")
    keys = [
        key
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if isinstance(getattr(defaults, key, None), int)
    ]
    return {key: None for key in keys if isinstance(size, int) and getattr(defaults, key) >= size}


def empty_model(model: type[M], config: PreTrainedConfig, folder: WeightFolder | None) -> M:
    """The model of transformers on the meta device. What it ties but the folder has as two different tensors is untied."""
    source = str(folder.path / "config.json") if folder is not None else f"these arguments of {model.__name__}"
    with torch.device("meta"):
        built = _tried(lambda: model(config), f"{source}: no model can be built")
    for target, source in list(built.all_tied_weights_keys.items()):
        both = folder is not None and target in folder and source in folder
        if folder is not None and both and not torch.equal(folder.read(target), folder.read(source)):
            owner, _, name = target.rpartition(".")
            untied = nn.Parameter(torch.empty_like(built.get_parameter(source)))
            setattr(built.get_submodule(owner), name, untied)
            del built.all_tied_weights_keys[target]
    return built


_EXPANDED = "_hetpipe_expanded"


def expand(
    mask: Tensor | None, kind: str, make: Callable[[Tensor | None], Any]
) -> tuple[Tensor | None, Tensor | None]:
    """(the mask as attention wants it, the mask to hand on), `make`ing the first from the [b, t] mask once for consecutive
    layers of a stage: it is kept on a view of the mask, so that what arrives from another stage is always expanded anew."""
    if mask is None:
        return make(None), None
    kept: dict[str, Tensor | None] | None = getattr(mask, _EXPANDED, None)
    if kept is None:
        mask, kept = mask.view_as(mask), {}
        setattr(mask, _EXPANDED, kept)
    if kind not in kept:
        kept[kind] = make(mask)
    return kept[kind], mask


def hand_on(*items: Tensor | None) -> Tensors:
    """What a layer returns: without the tensors that are not there."""
    return as_value([item for item in items if item is not None])


def as_mask(mask: Tensor | None) -> Tensor | None:
    """A mask of 0 and 1 as booleans, which are what crosses between devices."""
    return mask.bool() if mask is not None else None
