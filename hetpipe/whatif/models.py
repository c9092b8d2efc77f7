"""Sizes of a model by its name: of those that were measured, of the zoo's transformers, and of Hugging Face's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from hetpipe.exchange.importers.transformer import TransformerSizes
from hetpipe.files.formats import read_mapping
from hetpipe.files.limits import MOST_LAYERS, MOST_WIDTH
from hetpipe.files.messages import InputError, nearest, shown
from hetpipe.whatif.shipped import shipped_layers

Family = Literal["llama", "gpt", "bert"]
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "granite", "smollm3", "cohere")
UNGATED = ("gpt2", "starcoder2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "gpt_bigcode")
ENCODERS = ("bert", "roberta", "electra", "camembert", "xlm-roberta")


class NamedModel(NamedTuple):
    """A transformer of layers that are alike, and where its sizes come from. A head that shares its weights with the embedding is
    counted as one of its own, which it is as soon as both are on different devices."""

    name: str
    family: Family
    sizes: TransformerSizes
    vocabulary: int
    source: str


def _zoo() -> dict[str, NamedModel]:
    """Radford et al. 2019, table 2, and Devlin et al. 2019, section 3; 12·h² + 13·h parameters a layer."""
    gpt2 = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
    found = {name: _plain(name, "gpt", *size, 50257, 1024 * size[1] + 2 * size[1]) for name, size in gpt2.items()}
    return {**found, "bert-base": _plain("bert-base", "bert", 12, 768, 30522, (512 + 2 + 2) * 768)}


def _plain(name: str, family: Family, layers: int, hidden: int, vocabulary: int, rest: int) -> NamedModel:
    """`rest`: parameters beside layers and vocabulary."""
    words = vocabulary * hidden
    sizes = TransformerSizes(hidden, layers, 12 * hidden**2 + 13 * hidden, words + rest, words)
    return NamedModel(name, family, sizes, vocabulary, "the zoo of models")


def measured_model(name: str) -> NamedModel:
    """A model that was measured, by its name in the shipped file."""
    known = shipped_layers().models[name]
    return NamedModel(name, family_of(name), known.sizes, known.vocabulary, "measured")


def family_of(name: str) -> Family:
    """The family of a measured model, by its name."""
    return "bert" if name.startswith("bert") else "llama" if name.startswith("llama") else "gpt"


def listed_models() -> list[str]:
    """The names of models that need no file."""
    return [*shipped_layers().models, *(name for name in _zoo() if name not in shipped_layers().models)]


def find_model(name: str) -> NamedModel:
    """A model by its name, by the path of a config.json or its folder, or by its name on Hugging Face, where that is in the local
    cache. InputError with near names and all that are known."""
    if name in shipped_layers().models:
        return measured_model(name)
    if name in (zoo := _zoo()):
        return zoo[name]
    path = Path(name)
    try:
        if path.exists():
            return config_model(path / "config.json" if path.is_dir() else path, name)
    except OSError as error:
        raise InputError(f"cannot read {shown(name)}: {error.strerror}") from None
    if "/" in name and (cached := _cached(name)) is not None:
        return config_model(cached, name)
    more = "or the path of a Hugging Face config.json, or a name on Hugging Face that is in the local cache"
    raise InputError(f"unknown model {shown(name)}{nearest(name, listed_models())}; {more}")


def _cached(name: str) -> Path | None:
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


def config_model(path: Path, name: str) -> NamedModel:
    """The sizes that a config.json says. InputError for architectures that are not chains of layers alike."""
    config = read_mapping(path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path}: no 'model_type' in it, so it is no config.json of Hugging Face")
    kind = config["model_type"]
    if kind not in (*GATED, *UNGATED, *ENCODERS):
        known = ", ".join(sorted((*GATED, *UNGATED, *ENCODERS)))
        raise InputError(f"{path}: models of type {shown(kind)} are not known; known: {known}")
    hidden = _count(config, path, MOST_WIDTH, "hidden_size", "n_embd", "d_model")
    layers = _count(config, path, MOST_LAYERS - 2, "num_hidden_layers", "n_layer", "num_layers")
    heads = _count(config, path, MOST_WIDTH, "num_attention_heads", "n_head", "num_heads")
    inner = _count(config, path, MOST_WIDTH, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    pairs = _count(config, path, MOST_WIDTH, "num_key_value_heads", default=heads)
    width = _count(config, path, MOST_WIDTH, "head_dim", default=max(hidden // heads, 1))
    words = _count(config, path, MOST_WIDTH, "vocab_size")
    layer = 2 * hidden * width * (heads + pairs) + (3 if kind in GATED else 2) * hidden * inner + 2 * hidden
    family: Family = "llama" if kind in GATED else "bert" if kind in ENCODERS else "gpt"
    learned = 0 if family == "llama" else _count(
        config, path, MOST_WIDTH, "max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=1
    )  # fmt: skip
    sizes = TransformerSizes(hidden, layers, layer, (words + learned + 1) * hidden, words * hidden)
    return NamedModel(name, family, sizes, words, f"its config.json, model type {kind}")


def _count(config: dict[str, Any], path: Path, most: int, *names: str, default: int | None = None) -> int:
    """The first of these keys that has a value."""
    key = next((name for name in names if config.get(name) is not None), None)
    if key is None and default is not None:
        return default
    value = config.get(key) if key is not None else None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{path}: expected {' or '.join(names)}, a whole number from 1 to {most}, found {shown(value)}")
    return value
