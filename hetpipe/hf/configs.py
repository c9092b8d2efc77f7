"""The configuration of a model of transformers, from a folder or from a preset, and the model on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetpipe.files.limits import MOST_LABELS, MOST_LAYERS, MOST_WIDTH
from hetpipe.files.messages import InputError, nearest, one_line, shown
from hetpipe.hf.folder import WeightFolder
from hetpipe.layers.weights import replace_tensors

try:
    from transformers import PreTrainedConfig, PreTrainedModel
except ImportError as missing:
    raise ImportError("the models causal_lm, gpt2, bert, llama and t5 need transformers: pip install 'hetpipe[hf]'") from missing

CHOICES = ("attn_implementation", "experts_implementation", "auto_map")
M = TypeVar("M", bound=PreTrainedModel)
T = TypeVar("T")


def configure(
    name: str,
    kind: type[PreTrainedConfig],
    sizes: Mapping[str, Mapping[str, Any]],
    size: str | None,
    weights: str | WeightFolder | None,
    attention: str | None,
    changes: Mapping[str, Any],
) -> tuple[PreTrainedConfig, WeightFolder | None]:
    """The configuration: of the folder `weights`, or of a preset; each of `changes` in its place."""
    if attention is not None:
        _check_known(name, "attention", attention, ("sdpa", "eager"))
    known = [key for key in vars(kind()) if not key.startswith("_")] + ["num_labels"]
    for key in changes:
        if key not in known:
            raise ValueError(f"{name}: {kind.__name__} has no {key!r}{nearest(key, known)}")
    options = {**changes, **({} if attention is None else {"attn_implementation": attention})}
    if weights is None:
        size = next(iter(sizes)) if size is None else size
        _check_known(name, "size", size, tuple(sizes))
        preset = {**_without_special_tokens(kind, changes), **sizes[size], **options}
        return _settings(preset, lambda: kind(**preset), f"{name}: {shown(dict(changes))}"), None
    if size is not None:
        raise ValueError(f"{name}: give size {size!r} or weights {str(weights)!r}, whose config.json says the size, and not both")
    folder = weights if isinstance(weights, WeightFolder) else WeightFolder(weights)
    if folder.config.get("model_type") != kind.model_type:
        raise InputError(
            f"{name}: {folder.path} holds a model of type {shown(folder.config.get('model_type'))}, expected {kind.model_type!r}"
        )
    if folder.config.get("quantization_config") is not None:
        method = folder.config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise InputError(
            f"{folder.path}: its weights are quantised ({shown(method)}), which are no numbers to train from: load "
            "it with transformers, dequantize it, and save it again"
        )
    config = _without_choices(folder.config)
    source = str(folder.path / "config.json")
    return _settings({**config, **options}, lambda: kind.from_dict(config, **options), source), folder


def _without_choices(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what says how, and by whose code, a model is computed: what begins with _ is transformers' own, and
    this, too, may name code to be fetched."""
    kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in CHOICES}
    return {key: _without_choices(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _check_known(name: str, what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: unknown {what} {value!r}; known: {', '.join(known)}")


_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), MOST_LAYERS),
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "intermediate_size",
            "n_inner",
            "d_ff",
            "d_kv",
            "head_dim",
            "num_attention_heads",
            "n_head",
            "num_heads",
            "num_key_value_heads",
            "vocab_size",
            "type_vocab_size",
            "max_position_embeddings",
            "n_positions",
            "relative_attention_num_buckets",
        ),
        MOST_WIDTH,
    ),
    "num_labels": MOST_LABELS,
}


def _settings(values: Mapping[str, Any], make: Callable[[], PreTrainedConfig], source: str) -> PreTrainedConfig:
    """The configuration of these values; an InputError names `source` and the key that transformers refuses, or that no model can
    have."""
    for key, most in _MOST.items():
        value = values.get(key)
        if isinstance(value, int) and not 1 <= value <= most:
            raise InputError(f"{source}: {key} is {shown(value)}; it must be from 1 to {most}")
    return _tried(make, f"{source}: transformers refuses it")


def _tried(make: Callable[[], T], failure: str) -> T:
    try:
        return make()
    except Exception as error:  # whatever transformers and torch say of a value
        raise InputError(f"{failure}: {one_line(error)}") from error


def _without_special_tokens(kind: type[PreTrainedConfig], changes: Mapping[str, Any]) -> dict[str, None]:
    """The special tokens of the default vocabulary that a smaller one does not have."""
    defaults, size = kind(), changes.get("vocab_size")
    keys = [key for key in ("bos_token_id", "eos_token_id", "pad_token_id") if isinstance(getattr(defaults, key, None), int)]
    return {key: None for key in keys if isinstance(size, int) and getattr(defaults, key) >= size}


def _emptied(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def empty_model(model: type[M], config: PreTrainedConfig, folder: WeightFolder | None) -> M:
    """The model of transformers on the meta device. What it ties but the folder has as two different tensors is untied."""
    source = str(folder.path / "config.json") if folder is not None else f"these arguments of {model.__name__}"
    with torch.device("meta"):
        built = _tried(lambda: model(config), f"{source}: no model can be built")
    stored = built.state_dict(keep_vars=True)
    real = [t for t in stored.values() if not t.is_meta and (folder is not None or isinstance(t, nn.Parameter))]
    replace_tensors(built, {id(t): _emptied(t) for t in real})  # torch.normal heeds no torch.device
    for target, source in list(built.all_tied_weights_keys.items()):
        both = folder is not None and target in folder and source in folder
        if folder is not None and both and not torch.equal(folder.read(target), folder.read(source)):
            owner, _, name = target.rpartition(".")
            untied = nn.Parameter(torch.empty_like(built.get_parameter(source)))
            setattr(built.get_submodule(owner), name, untied)
            del built.all_tied_weights_keys[target]
    return built
