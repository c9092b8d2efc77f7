"""Sizes of a transformer of layers that are alike, from its config.json. No torch, and no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from hetpipe.files.formats import read_mapping
from hetpipe.files.limits import MOST_LAYERS, MOST_WIDTH
from hetpipe.files.messages import InputError, shown

Kind = Literal["llama", "gpt", "bert"]  # of a layer: with a gate and no positions of its own; without; and seeing all tokens


class TransformerSizes(NamedTuple):
    """The width of a transformer, how many layers it has, and the parameters of one, of the embedding and of the head."""

    hidden: int
    layers: int
    layer_parameters: int
    embedding_parameters: int
    head_parameters: int


class Config(NamedTuple):
    """What a config.json says."""

    path: Path
    model_type: str
    values: dict[str, Any]


def read_config(path: Path) -> Config:
    """Read a config.json. InputError if it is none of Hugging Face."""
    config = read_mapping(path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path}: no 'model_type' in it, so it is no config.json of Hugging Face")
    return Config(path, config["model_type"], config)


def cached_config(name: str) -> Path | None:
    """A repository's config.json in the local cache of huggingface_hub, which comes with transformers. Nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no name that a repository could have
        return None
    return Path(found) if isinstance(found, str) else None


def config_sizes(config: Config, kind: Kind) -> tuple[TransformerSizes, int]:
    """Its sizes, and its vocabulary. InputError where it says none."""
    hidden = _count(config, MOST_WIDTH, "hidden_size", "n_embd", "d_model")
    layers = _count(config, MOST_LAYERS - 2, "num_hidden_layers", "n_layer", "num_layers")
    heads = _count(config, MOST_WIDTH, "num_attention_heads", "n_head", "num_heads")
    inner = _count(config, MOST_WIDTH, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    pairs = _count(config, MOST_WIDTH, "num_key_value_heads", default=heads)
    width = _count(config, MOST_WIDTH, "head_dim", default=max(hidden // heads, 1))
    words = _count(config, MOST_WIDTH, "vocab_size")
    layer = 2 * hidden * width * (heads + pairs) + (3 if kind == "llama" else 2) * hidden * inner + 2 * hidden
    learned = 0 if kind == "llama" else _count(
        config, MOST_WIDTH, "max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=1
    )  # fmt: skip
    return TransformerSizes(hidden, layers, layer, (words + learned + 1) * hidden, words * hidden), words


def _count(config: Config, most: int, *names: str, default: int | None = None) -> int:
    """The first of these keys that has a value."""
    key = next((name for name in names if config.values.get(name) is not None), None)
    if key is None and default is not None:
        return default
    value = config.values.get(key) if key is not None else None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{config.path}: expected {' or '.join(names)}, a whole number from 1 to {most}, found {shown(value)}")
    return value
