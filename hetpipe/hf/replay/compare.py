"""Whether a chain is transformers' own model, bit for bit, on a tiny configuration of the same kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetpipe.hf.chain import HFLayer
from hetpipe.hf.replay.layers import chain
from hetpipe.hf.replay.trace import EXTRAS, anatomy_of
from hetpipe.layers.device import one_thread
from hetpipe.layers.transforms import tensors_of

SAMPLES, TOKENS, WORDS = 3, 12, 64
_SMALL = {
    32: ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "model_dim",
         "attention_hidden_size", "lru_width"),
    3: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    1: ("encoder_layers", "n_group", "topk_group", "first_k_dense_replace", "num_expert_group"),
    4: ("rotary_dim", "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads",
        "mamba_n_heads", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "linear_num_value_heads"),
    2: ("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k",
        "linear_num_key_heads", "encoder_attention_heads"),
    48: ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "encoder_ffn_dim"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "mamba_d_head",
         "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim", "moe_shared_expert_intermediate_size"),
    8: ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_state", "state_size", "mamba_headdim",
        "sliding_window", "attention_window_size"),
    WORDS: ("mamba_d_ssm", "mamba_intermediate_size", "vocab_size", "max_position_embeddings", "n_positions", "max_seq_len",
            "n_ctx", "max_target_positions"),
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Difference(NamedTuple):
    """The greatest of logits and of gradients, relative to the greatest value; zero where all are the same bits."""

    logits: float
    gradients: float

    @property
    def none(self) -> bool:
        """Whether there is none."""
        return self == (0.0, 0.0)


def tiny(config: Any) -> Any:
    """A configuration of the same kind with few and small layers, of each sort that it has."""
    return type(config).from_dict(_small(copy.deepcopy(config.to_dict())))


def _small(values: dict[str, Any]) -> dict[str, Any]:
    small = {key: value for value, keys in _SMALL.items() for key in keys}
    whole_heads = values.get("num_key_value_heads") == values.get("num_attention_heads")
    counts = {values[key] for key in _SMALL[3] if isinstance(values.get(key), int)}
    for key, value in list(values.items()):
        if key in small and isinstance(value, int) and not isinstance(value, bool):
            values[key] = min(value, small[key])
        elif key in _TOKENS and value is not None:
            values[key] = _TOKENS[key]
        elif isinstance(value, list) and len(value) in counts and key != "architectures":
            values[key] = _each_sort(value, 3)
        elif isinstance(value, dict) and "model_type" in value:
            values[key] = _small(value)
    if whole_heads and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def _each_sort(values: list[Any], count: int) -> list[Any]:
    """As many, in their order, and of each sort one while they last."""
    first = [i for i, value in enumerate(values) if value not in values[:i]]
    rest = [i for i in range(len(values)) if i not in first]
    return [values[i] for i in sorted([*first, *rest][:count])]


def compare(model_class: Any, config: Any) -> Difference:
    """A chain of this configuration against transformers' own, with the same values: plain, with a mask of padding, with
    positions that begin anew. CannotCutError where it is no chain."""
    with warnings.catch_warnings(), one_thread(torch.device("cpu")), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        anatomy = anatomy_of(lambda: model_class(copy.deepcopy(config)))
        torch.manual_seed(0)
        reference = model_class(copy.deepcopy(config)).eval()
        found = []
        for name, given in _inputs().items():
            with torch.device("meta"):
                model = model_class(copy.deepcopy(config))
            layers = chain(model, anatomy, None, [name] if name else [])
            found.append(_difference(reference, _filled(layers, reference), given))
    return Difference(*(max(each) for each in zip(*found, strict=True)))


def _inputs() -> dict[str, dict[str, Tensor]]:
    tokens = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    positions = torch.arange(TOKENS).expand(SAMPLES, -1).clone()
    positions[1, 5:] -= 5
    found = {"": {}, EXTRAS[0]: {EXTRAS[0]: mask}, EXTRAS[1]: {EXTRAS[1]: positions}}
    return {name: {"input_ids": tokens, **more} for name, more in found.items()}


def _filled(layers: nn.Sequential, reference: nn.Module) -> nn.Sequential:
    """With the reference's values."""
    theirs = tensors_of(reference)
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for own, name in layer.hf_names.items():
            path, _, last = own.rpartition(".")
            module, value = layer.get_submodule(path), theirs[name].detach().clone()
            if last in module._parameters:
                module._parameters[last] = nn.Parameter(value, requires_grad=theirs[name].requires_grad)
            else:
                module._buffers[last] = value
    return layers.eval()


def _difference(reference: Any, layers: nn.Sequential, given: Mapping[str, Tensor]) -> Difference:
    tokens, *extras = given.values()
    wanted = reference(**given, use_cache=False).logits
    found = layers((tokens, *extras) if extras else tokens)
    weights = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    own = dict[str, Tensor]()
    reference.zero_grad()
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    theirs = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
    for layer in layers:
        assert isinstance(layer, HFLayer)
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                key = layer.hf_names[name]
                own[key] = own[key] + parameter.grad if key in own else parameter.grad
    strange = own.keys() - theirs.keys()
    lacking = {id(reference.get_parameter(name)) for name in theirs} - {id(reference.get_parameter(name)) for name in own}
    if strange or lacking:
        return Difference(0.0, float("inf"))
    return Difference(_relative(found, wanted), max((_relative(own[name], theirs[name]) for name in own), default=0.0))


def _relative(found: Tensor, wanted: Tensor) -> float:
    if torch.equal(found, wanted):
        return 0.0
    error, scale = (found - wanted).abs().max(), wanted.abs().max()
    return float(error / scale) if scale > 0 and error == error else float("inf")
