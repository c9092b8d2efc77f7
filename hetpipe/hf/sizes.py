"""Sizes of a transformer of layers that are alike, from its config.json. No torch; of types that `known` does not
name, transformers says what their layers are like, where it is installed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from hetpipe.documents.number_types import Frozen
from hetpipe.files.formats import read_mapping
from hetpipe.files.limits import MOST_LAYERS, MOST_WIDTH
from hetpipe.files.messages import InputError, cut, shown

Kind = Literal["llama", "gpt", "bert"]  # of a layer: with a gate and no positions of its own; without; and seeing all tokens


class TransformerSizes(NamedTuple):
    """The width of a transformer, how many layers it has, and the parameters of one, of the embedding and of the head."""

    hidden: int
    layers: int
    layer_parameters: int
    embedding_parameters: int
    head_parameters: int


class Matrix(NamedTuple):
    """A linear matrix of a layer: what it is called, how many numbers it takes and gives, and what it reads, as others may,
    too."""

    name: str
    inputs: int
    outputs: int
    reads: str

    @property
    def parameters(self) -> int:
        """Its numbers, without a bias."""
        return self.inputs * self.outputs


class Widths(NamedTuple):
    """Numbers of a token inside a layer: hidden, queries, keys (as many as values), and inside the MLP; and heads."""

    hidden: int
    queries: int
    keys: int
    inner: int
    heads: int

    @property
    def key_heads(self) -> int:
        """Heads of keys, each of which some heads of queries share."""
        return max(1, self.heads * self.keys // self.queries)


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


def default_config(model_type: str) -> Config | None:
    """The configuration that transformers gives this type of causal language model where nothing is said of it."""
    found = _config_class(model_type)
    if found is None:
        return None
    source = f"the defaults of transformers' {found.__name__}"
    try:
        return Config(Path(source), model_type, found().to_dict())
    except Exception as error:  # whatever transformers says of its own
        raise InputError(cut(f"{source} make no model: {' '.join(str(error).split())}", 300)) from error


def _config_class(model_type: str) -> Any:
    """transformers' own; None where it knows no causal language model of this type, or is not installed."""
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return None
    return CONFIG_MAPPING[model_type] if model_type in list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) else None


def dense_kind(config: Config) -> Kind | None:
    """What the layers of a dense decoder are like, by the projections that transformers says can be cut (`base_model_tp_plan`);
    None where it does not say. InputError, with the key, where not each token passes all of every layer, or layers do something
    else than attention to keys and values of their own."""
    told = _refusal(config)
    if told is not None:
        raise InputError(f"{config.path}: {_UNLIKE.format(shown(config.model_type))}: {told}")
    found = _config_class(config.model_type)
    plan = getattr(found, "base_model_tp_plan", None) or {}
    if not any(name.startswith("layers.") for name in plan):
        return None
    if any("expert" in name for name in plan):
        raise InputError(f"{config.path}: {_UNLIKE.format(shown(config.model_type))}: they have experts")
    return "llama" if any(name.endswith(("gate_proj", "gate_up_proj")) for name in plan) else "gpt"


def _refusal(config: Config) -> str | None:
    """What of a configuration cannot be priced, and why; None where nothing is known against it."""
    for key, value in config.values.items():
        words = key.split("_")
        if isinstance(value, Mapping) and "model_type" in value:
            return f"it holds several models ({key})"
        if value in (None, False, 0, "", []) or not {*words} & _UNPRICED.keys():
            continue
        return f"{key} is {shown(value)}: {next(_UNPRICED[word] for word in words if word in _UNPRICED)}"
    kinds = config.values.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - _ATTENTION) if isinstance(kinds, list) else []
    if others:
        return f"layer_types has {shown(others[0])}, which is priced as nothing that was measured"
    return None


_UNLIKE = "models of type {} are no chains of equal dense layers"
_EXPERTS = "which experts a token passes is not known"
_STATE = "states in the place of attention were not measured"
_UNPRICED = {
    **dict.fromkeys(("expert", "experts", "moe"), _EXPERTS),
    **dict.fromkeys(("mamba", "ssm", "state", "conv", "conv1d", "linear"), _STATE),
    "lora": "projections of low rank in attention were not measured",
    "encoder": "it has an encoder beside the decoder",
}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def cached_config(name: str) -> Path | None:
    """A repository's config.json (of `name@revision` that of the revision) in the local cache of huggingface_hub, which comes
    with transformers. Nothing is downloaded."""
    name, _, revision = name.partition("@")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision or None)
    except HFValidationError:  # no name that a repository could have
        return None
    return Path(found) if isinstance(found, str) else None


def config_sizes(config: Config, kind: Kind) -> tuple[TransformerSizes, int]:
    """Its sizes, and its vocabulary. InputError where it says none."""
    w = layer_widths(config)
    hidden, layers = w.hidden, _count(config, MOST_LAYERS - 2, "num_hidden_layers", "n_layer", "num_layers")
    words = _count(config, MOST_WIDTH, "vocab_size")
    layer = 2 * hidden * (w.queries + w.keys) + (3 if kind == "llama" else 2) * hidden * w.inner + 2 * hidden
    turned = kind == "llama" or any(key.startswith(("rope_", "rotary_")) for key in config.values)  # positions, by angles
    learned = (
        0 if turned else _count(config, MOST_WIDTH, "max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=1)
    )
    return TransformerSizes(hidden, layers, layer, (words + learned + 1) * hidden, words * hidden), words


def layer_widths(config: Config) -> Widths:
    """The widths inside a layer; keys are fewer than queries where several heads share theirs. InputError where it says none."""
    hidden = _count(config, MOST_WIDTH, "hidden_size", "n_embd", "d_model")
    heads = _count(config, MOST_WIDTH, "num_attention_heads", "n_head", "num_heads")
    pairs = _count(config, MOST_WIDTH, "num_key_value_heads", default=heads)
    width = _count(config, MOST_WIDTH, "head_dim", default=max(hidden // heads, 1))
    inner = _count(config, MOST_WIDTH, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    return Widths(hidden, heads * width, pairs * width, inner, heads)


def layer_modules(model_type: str) -> Mapping[str, str]:
    """What transformers calls the modules of a layer, and how it cuts each over several devices (`base_model_tp_plan`); nothing
    where it does not say."""
    plan = getattr(_config_class(model_type), "base_model_tp_plan", None) or {}
    return {name.rpartition(".")[2]: style for name, style in plan.items() if name.startswith("layers.")}


COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
CUT = {**dict.fromkeys(COLUMNS, "colwise"), **dict.fromkeys(ROWS, "rowwise")}  # the style of each


def cut_layer(widths: Widths, matrices: Sequence[Matrix], degree: int) -> tuple[Widths, tuple[Matrix, ...]] | None:
    """What one of so many devices has of a layer whose matrices are cut by `CUT`: those of `COLUMNS` by their outputs, those of
    `ROWS` by their inputs. Heads are not parted; if those of keys and values are fewer than the devices, all are on each, which
    computes one. None where there are no so many equal parts, or other matrices."""
    shared = widths.key_heads < degree and degree % widths.key_heads == 0
    parted = (widths.heads, widths.inner, *(() if shared else (widths.key_heads,)))
    if any(count % degree for count in parted) or not {matrix.name for matrix in matrices} <= CUT.keys():
        return None
    keys = widths.keys // (widths.key_heads if shared else degree)
    own = Widths(widths.hidden, widths.queries // degree, keys, widths.inner // degree, widths.heads // degree)
    held = widths.keys if shared else keys
    sizes = {"q_proj": own.queries, "k_proj": held, "v_proj": held, "o_proj": own.queries}
    found = list[Matrix]()
    for matrix in matrices:
        size = sizes.get(matrix.name, own.inner)
        found.append(matrix._replace(inputs=size) if matrix.name in ROWS else matrix._replace(outputs=size))
    return own, tuple(found)


def config_matrices(config: Config, modules: Collection[str]) -> tuple[Matrix, ...]:
    """The linear matrices of a layer with a gate that has modules of these names. InputError where these are not all."""
    w = layer_widths(config)
    known = {
        "q_proj": (w.hidden, w.queries, "norm"),
        "k_proj": (w.hidden, w.keys, "norm"),
        "v_proj": (w.hidden, w.keys, "norm"),
        "qkv_proj": (w.hidden, w.queries + 2 * w.keys, "norm"),
        "o_proj": (w.queries, w.hidden, "attention"),
        "gate_proj": (w.hidden, w.inner, "second norm"),
        "up_proj": (w.hidden, w.inner, "second norm"),
        "gate_up_proj": (w.hidden, 2 * w.inner, "second norm"),
        "down_proj": (w.inner, w.hidden, "gated"),
    }
    found = tuple(Matrix(name, *size) for name, size in known.items() if name in modules)
    whole = 2 * w.hidden * (w.queries + w.keys) + 3 * w.hidden * w.inner
    if sum(matrix.parameters for matrix in found) != whole:
        raise InputError(
            f"{config.path}: how the matrices of models of type {shown(config.model_type)} are called is not known; "
            "transformers says it of many types, where it is installed"
        )
    return found


def config_type(config: Config) -> Frozen:
    """The number type of the model as it is stored; float32 where it says none. InputError for others than torch's usual ones."""
    value = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if value not in get_args(Frozen):
        raise InputError(f"{config.path}: dtype is {shown(value)}; known: {', '.join(get_args(Frozen))}")
    return cast("Frozen", value)


def _count(config: Config, most: int, *names: str, default: int | None = None) -> int:
    """The first of these keys that has a value."""
    key = next((name for name in names if config.values.get(name) is not None), None)
    if key is None and default is not None:
        return default
    value = config.values.get(key) if key is not None else None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{config.path}: expected {' or '.join(names)}, a whole number from 1 to {most}, found {shown(value)}")
    return value
